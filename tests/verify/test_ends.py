"""Scripts whose ranks do not reach their end: they wait for each other, or one of them is killed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from lockstep.tools.verify import waits
from lockstep.tools.verify.report import format_text
from lockstep.tools.verify.settings import Verification
from lockstep.tools.verify.verdict import Verdict
from lockstep.tools.verify.verification import verify

# Rank 1 does something else after two batches; then each epoch's loss is reduced.
TRAINS = """
    import os, signal, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(TOTALS)
        for number, (inputs, targets) in enumerate(DataLoader(data, 4, sampler=sampler)):
            if rank == 1 and number == 2:
                OTHERWISE
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        COLLECTIVE
"""
REDUCE = "dist.all_reduce(total)"


def verdict_on(folder: Path, otherwise: str, totals: int = 1, collective: str = REDUCE) -> tuple[Verdict, str]:
    script = folder / "main.py"
    program = TRAINS.replace("OTHERWISE", otherwise).replace("TOTALS", str(totals)).replace("COLLECTIVE", collective)
    script.write_text(textwrap.dedent(program))
    (verdict,) = verify(Verification(str(script), nproc=(2,)))
    return verdict, " ".join(format_text("main.py", [verdict]).split())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, which are forked from this process, look more often and give up sooner."""
    monkeypatch.setattr(waits, "_LOOK_S", 0.1)
    monkeypatch.setattr(waits, "_LOOKS", 10)


@pytest.mark.usefixtures("impatient")
def test_ranks_that_wait_for_each_other_are_ended_and_named(tmp_path: Path) -> None:
    verdict, text = verdict_on(tmp_path, "break", collective="dist.broadcast(total, 0)")
    assert (verdict.first, verdict.steps) == (("steps", "fails"), 2), text
    assert "all ranks wait for each other: rank 0 in backward at" in text
    assert "rank 1 in broadcast at" in text


@pytest.mark.usefixtures("impatient")
def test_ranks_that_wait_for_one_that_works_are_not_ended(tmp_path: Path) -> None:
    verdict, text = verdict_on(tmp_path, "time.sleep(2.5)")
    assert verdict.code == 0, text


@pytest.mark.parametrize(
    ("otherwise", "totals", "reason"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 1, "rank 1 (pid", id="by a signal"),
        pytest.param("break", 1, "collective mismatch in your code?", id="by gloo, for a message of another size"),
    ],
)
def test_a_rank_that_is_killed_has_its_steps_compared(otherwise: str, totals: int, reason: str, tmp_path: Path) -> None:
    verdict, text = verdict_on(tmp_path, otherwise, totals)
    assert (verdict.first, verdict.steps) == (("steps", "fails"), 2), text
    assert reason in text


def test_a_rank_that_ends_its_epoch_early_is_named(tmp_path: Path) -> None:
    """Even if its collective, of the same size, is taken for the gradients of another rank."""
    verdict, text = verdict_on(tmp_path, "break", totals=9)
    assert verdict.first == ("steps", "number-of-steps"), text
    assert "by this step, the ranks have begun 1, 2 passes over their data" in text
    assert len(verdict.differences) == 1
