"""Programs as others write them, on which an earlier verification was wrong, get the answer that is right."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import met
import met_beside
import met_between
import met_given
import met_projects
import met_small
import met_wrong
from lockstep.tools.verify import session
from lockstep.tools.verify.compare import fit_ranks
from lockstep.tools.verify.report import format_text
from lockstep.tools.verify.settings import Verification
from lockstep.tools.verify.verdict import Verdict
from lockstep.tools.verify.verification import verify
from met import COMMON
from test_mistakes import is_documented

RIGHT = met.RIGHT | met_projects.RIGHT | met_small.RIGHT | met_beside.RIGHT | met_given.RIGHT | met_between.RIGHT
SUM = ("gradients", "sum")
WRONG = met_wrong.WRONG | met_projects.WRONG | met_small.WRONG | met_beside.WRONG | met_given.WRONG | met_between.WRONG
UNKNOWN = met.UNKNOWN | met_beside.UNKNOWN | met_given.UNKNOWN | met_between.UNKNOWN
SAID = met_small.SAID | met_beside.SAID

SHARDS = pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 needs a GPU")


def each_name(programs: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=SHARDS if "in shards" in name else ()) for name in programs]


def verdict_on(
    program: str, folder: Path, double: bool = False, common: str = COMMON, args: tuple[str, ...] = ()
) -> tuple[Verdict, str]:
    script = folder / "train.py"
    script.write_text(common + textwrap.dedent(program))
    (verdict,) = verify(Verification(str(script), args, steps=3, double=double))
    return verdict, format_text("train.py", [verdict])


@pytest.mark.parametrize("name", each_name(RIGHT))
def test_right_programs_are_the_answer_of_one_process(name: str, tmp_path: Path) -> None:
    verdict, text = verdict_on(RIGHT[name], tmp_path, args=met_beside.ARGUMENTS.get(name, ()))
    assert verdict.code == 0, text


@pytest.mark.parametrize("name", UNKNOWN)
def test_of_some_nothing_can_be_told(name: str, tmp_path: Path) -> None:
    why, program = UNKNOWN[name]
    verdict, text = verdict_on(program, tmp_path)
    assert verdict.code == 2, text
    assert why in " ".join(text.split())


def test_some_ranks_that_draw_the_same_samples(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMMON + textwrap.dedent(met_given.DRAWN_ALIKE))
    (verdict,) = verify(Verification(str(script), nproc=(3,), steps=3))
    assert verdict.first == ("samples", "no-sampler"), format_text("train.py", [verdict])
    assert "ranks 1, 2 had the same 5 rows" in verdict.differences[0].measured


def test_an_evaluation_by_rank_0_alone_is_no_decision_to_stop(tmp_path: Path) -> None:
    program = """
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        model.train()
        if world.rank == 0:
            with torch.no_grad():  # the wrapper sends buffers to ranks that have ended
                model(data.tensors[0][:8])
    """
    verdict, text = verdict_on(program, tmp_path)
    assert verdict.first == ("steps", "fails"), text


def test_ranks_without_a_process_group_are_told_so(tmp_path: Path) -> None:
    program = """
        import torch
        from torch import nn

        model = nn.DataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in torch.utils.data.DataLoader(torch.randn(40, 6), batch_size=5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    """
    verdict, text = verdict_on(program, tmp_path, common="")
    assert verdict.first == ("parameters", "ranks-differ"), text
    assert "the script creates no process group" in verdict.differences[0].meaning


def test_ranks_that_train_apart_are_told_whatever_comes_first(tmp_path: Path) -> None:
    program = """
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        engine = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for number, (x, y) in enumerate(split()):
            optimizer.zero_grad()
            cross_entropy((net if number % 2 else engine)(x), y).backward()
            optimizer.step()
    """
    verdict, text = verdict_on(program, tmp_path)
    assert [each.cause for each in verdict.differences] == ["batch-norm", "inner-model"], text


@pytest.mark.parametrize("name", each_name(WRONG))
def test_others_are_named_with_their_line(name: str, tmp_path: Path) -> None:
    cause, program = WRONG[name]
    verdict, text = verdict_on(program, tmp_path, args=met_beside.ARGUMENTS.get(name, ()))
    assert verdict.first == cause, text
    assert is_documented(verdict.differences[0]), text
    assert SAID.get(name, "") in verdict.differences[0].meaning
    assert verdict.differences[0].lines, text
    line = int(verdict.differences[0].lines[0].rpartition(":")[2])
    written = (tmp_path / "train.py").read_text().splitlines()[line - 1]
    assert any(
        word in written for word in ("backward()", "model(", "teacher(", "print(", "step()", " in ", "save", "dump(")
    ), written


def test_what_follows_the_samples_of_streams_is_told_too(tmp_path: Path) -> None:
    _, program = WRONG["a stream in blocks, one for each rank"]
    verdict, text = verdict_on(program, tmp_path)
    assert [each.cause for each in verdict.differences] == ["order", "sum"], text
    right, text = verdict_on(program.replace(', reduction="sum"', ""), tmp_path)
    assert [each.cause for each in right.differences] == ["order"], text


def test_an_error_is_shown_with_the_lines_that_it_lists(tmp_path: Path) -> None:
    verdict, text = verdict_on(
        """
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if world.world_size > 1:
                torch.distributed.all_reduce(x) if world.rank else torch.distributed.broadcast(x, 0)
        """,
        tmp_path,
    )
    assert verdict.first == ("steps", "fails"), text
    assert "broadcast(" in text
    assert "all_reduce(" in text


TAKEN = """
    model, optimizer = by_torch()
    batches, valid = split(), split(5)
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        left, losses = iter(valid), []
        for _ in range(len(valid)):
            x, y = next(left)
            with torch.no_grad():
                losses.append(cross_entropy(model(x), y))
        if world.rank == 0:
            print(f"epoch {epoch}: {torch.stack(losses).mean():.9f}")
"""


def test_an_evaluation_whose_loader_is_not_exhausted_is_one(tmp_path: Path) -> None:
    """As Ignite's, which takes as many batches as there are; of each epoch, not of the last one alone."""
    verdict, text = verdict_on(TAKEN, tmp_path)
    assert verdict.first == ("evaluated", "metric"), text
    assert "epoch 0" in verdict.differences[0].measured


MASKED = """
    def masked(rows):
        x, y = torch.utils.data.default_collate(rows)
        return torch.where(torch.rand(x.shape) < 0.3, 0.0, x), y[torch.randperm(len(y))]

    model, optimizer = by_torch()
    for x, y in split(collate_fn=masked):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_what_follows_the_draws_of_a_collate_function_is_told_too(tmp_path: Path) -> None:
    """As of one that masks words; it draws for all rows of a batch at once."""
    program = MASKED.replace("y[torch.randperm(len(y))]", "y")
    right, text = verdict_on(program, tmp_path)
    assert [each.cause for each in right.differences] == ["drawn"], text
    assert "only the samples' draws differ" in " ".join(text.split())
    verdict, text = verdict_on(program.replace("(model(x), y)", '(model(x), y, reduction="sum")'), tmp_path)
    assert [each.cause for each in verdict.differences] == ["drawn", "sum"], text
    mixed, text = verdict_on(MASKED, tmp_path)  # rows that are mixed stay so
    assert [each.cause for each in mixed.differences] == ["drawn"], text
    assert "without a result" in text


@pytest.mark.parametrize("name", met_projects.IN_FLOAT32)
def test_what_rounding_hides_or_makes_up_is_compared_in_float64(name: str, tmp_path: Path) -> None:
    cause, program = met_projects.IN_FLOAT32[name]
    common = COMMON.replace("torch.set_default_dtype(torch.float64)\n", "")
    verdict, text = verdict_on(program, tmp_path, common=common)
    assert verdict.first == cause, text
    assert "the script was compared in float64" in " ".join(text.split())


def test_what_is_changed_between_the_steps_is_not_said_to_be_within_one(tmp_path: Path) -> None:
    verdict, text = verdict_on(WRONG["weights that are put back by rank 0's loss"][1], tmp_path)
    assert "between the steps" in verdict.differences[0].meaning, text


def test_what_one_process_draws_as_the_ranks_do_is_not_said_to_be_given(tmp_path: Path) -> None:
    """Such as the parameters of a second model, which is made after the first was trained."""
    verdict, text = verdict_on(
        """
        for rate in 0.1, 0.2:
            torch.manual_seed(0)
            model, optimizer = trained(nn.Linear(6, 4))
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        """,
        tmp_path,
    )
    assert verdict.code == 0
    assert "random numbers drawn within" not in text


@pytest.mark.parametrize(
    ("net", "loader", "note"),
    [
        pytest.param(
            "nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)))",
            "lockstep.DataLoader(data, 10, drop_last=True)",
            "without GPUs this script fails with ValueError: SyncBatchNorm",
            id="that it fails without GPUs",
        ),
        pytest.param(
            "nn.Linear(6, 4)",
            "lockstep.DataLoader(data, batch_size=10, shuffle=True, seed=0)",
            "all epochs have the order of the first, on one process, too",
            id="that its epochs are alike",
        ),
    ],
)
def test_of_a_right_script_it_is_noted(net: str, loader: str, note: str, tmp_path: Path) -> None:
    verdict, text = verdict_on(
        f"""
        model, optimizer = trained({net})
        for epoch in range(2):
            for x, y in {loader}:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        """,
        tmp_path,
    )
    assert verdict.code == 0, text
    assert note in " ".join(text.split())


@pytest.mark.parametrize("loss", ["(z.T @ z / 5).square().sum()", "cross_entropy(z, y, reduction='sum') / 5"])
def test_a_number_for_the_size_of_a_batch_is_told_of(loss: str, tmp_path: Path) -> None:
    """One process has N times the batch, and the script's constant stays."""
    verdict, text = verdict_on(
        f"""
        sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            z = model(x)
            ({loss}).backward()
            optimizer.step()
        """,
        tmp_path,
    )
    assert verdict.code == 1
    assert "one process got batches of 10 where the script asks for 5" in " ".join(text.split())


AUGMENTED = """
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, index):
            x, y = data[index]
            return x + torch.randn(6) + np.random.rand(), y

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), LAYER, nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    noisy = Noisy()
    sampler = torch.utils.data.DistributedSampler(noisy, drop_last=True)
    torch.manual_seed(world.rank)
    for x, y in torch.utils.data.DataLoader(noisy, 5, sampler=sampler, drop_last=True, num_workers=WORKERS):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("layer", "others"), [("nn.Tanh()", []), ("nn.BatchNorm1d(8)", [("outputs", "batch-norm")])])
def test_what_samples_draw_does_not_hide_what_else_differs(
    layer: str, others: list[tuple[str, str]], workers: int, tmp_path: Path
) -> None:
    verdict, text = verdict_on(AUGMENTED.replace("LAYER", layer).replace("WORKERS", str(workers)), tmp_path)
    assert [(each.stage, each.cause) for each in verdict.differences] == [("samples", "drawn"), *others], text
    assert ("so only the samples' draws differ" in " ".join(text.split())) == (not others)


def test_what_samples_draw_does_not_hide_that_a_first_batch_is_padded(tmp_path: Path) -> None:
    program = AUGMENTED.replace("LAYER", "nn.Tanh()").replace("WORKERS", "0").replace("len(data)", "9")
    verdict, text = verdict_on(program.replace("drop_last=True", "drop_last=False"), tmp_path)
    assert [(each.stage, each.cause) for each in verdict.differences] == [
        ("samples", "drawn"),
        ("samples", "padded"),
    ], text


def test_samples_that_draw_otherwise_are_said_to_tell_no_more(tmp_path: Path) -> None:
    program = (
        AUGMENTED.replace("np.random.rand()", "own.random()").replace("LAYER", "nn.Tanh()").replace("WORKERS", "0")
    )
    verdict, text = verdict_on("own = np.random.default_rng(world.rank)\n" + textwrap.dedent(program), tmp_path)
    assert [(each.stage, each.cause) for each in verdict.differences] == [("samples", "drawn")], text
    assert "without a result: samples still differ, through collate_fn" in " ".join(text.split())


@pytest.mark.parametrize("args", [("--epochs", "5", "--batch", "5"), ("--epochs=5", "--batch=5")])
@pytest.mark.parametrize(
    ("rate", "found"),
    [
        ("0.02 * batch * world.world_size", ("", "")),
        ("0.1 * world.world_size", ("parameters", "settings")),
    ],
)
def test_what_is_computed_from_an_option_is_that_of_the_batch_of_all_ranks(
    rate: str, found: tuple[str, str], args: tuple[str, ...], tmp_path: Path
) -> None:
    verdict, text = verdict_on(
        f"""
        import argparse

        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int)
        parser.add_argument("--batch", type=int)
        options = parser.parse_args()
        batch = options.batch
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), {rate})
        for x, y in split(batch):
            optimizer.zero_grad()
            (cross_entropy(model(x), y, reduction="sum") / batch).backward()
            optimizer.step()
        """,
        tmp_path,
        args=args,
    )
    assert verdict.first == found, text
    assert "got the batches of all ranks through its arguments, which were --epochs" in " ".join(text.split())


@pytest.mark.parametrize(("reduction", "args", "found"), [("mean", ("5",), ("", "")), ("sum", ("--rows=5",), SUM)])
def test_rows_picked_without_a_loader_are_those_of_all_ranks_with_the_option_for_their_number(
    reduction: str, args: tuple[str, ...], found: tuple[str, str], tmp_path: Path
) -> None:
    program = f"""
        import sys

        size = int(sys.argv[1].removeprefix("--rows="))
        x, y = data.tensors
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        order = torch.randperm(60, generator=draws)
        for first in range(0, 60, size * world.world_size):
            rows = order[first : first + size * world.world_size][world.rank :: world.world_size]
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows], reduction="{reduction}").backward()
            optimizer.step()
    """
    verdict, text = verdict_on(program, tmp_path, args=args)
    assert (verdict.first, verdict.unknown) == (found, ""), text
    assert "got the batches of all ranks through its arguments, which were" in " ".join(text.split())
    verdict, text = verdict_on(program, tmp_path, args=(args[0].replace("5", "05"),))
    assert verdict.code == 2, text
    assert "Pass the argument that sets a rank's batch size" in " ".join(text.split())


def test_pieces_of_a_batch_are_as_many_on_one_process_with_options_for_all_loaders(tmp_path: Path) -> None:
    verdict, text = verdict_on(
        """
        import sys

        size, other = map(int, sys.argv[1:])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches, tests = split(size), split(other)
        for x, y in batches:
            optimizer.zero_grad()
            for rows, labels in zip(x.split(size), y.split(size)):
                (cross_entropy(model(rows), labels) * len(rows) / len(x)).backward()
            optimizer.step()
        """,
        tmp_path,
        args=("5", "5"),
    )
    assert verdict.first == ("outputs", "batch-norm"), text


@pytest.mark.parametrize(("wraps", "cause"), [(True, "sum"), (False, "unwrapped")])
def test_a_script_that_goes_without_gpus_where_there_are_none_is_given_some(
    wraps: bool, cause: str, tmp_path: Path
) -> None:
    """As Accelerate's, whose ranks train by themselves then, each of them all of the data."""
    verdict, text = verdict_on(
        f"""
        torch.manual_seed(0)
        model, sampler = nn.Linear(6, 4), None
        if torch.cuda.is_available():
            sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
            model.cuda()
            if {wraps}:
                model = nn.parallel.DistributedDataParallel(module=model, device_ids=[world.local_rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        device = next(model.parameters()).device
        for x, y in torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            cross_entropy(model(x.to(device)), y.to(device), reduction="sum").backward()
            optimizer.step()
        """,
        tmp_path,
    )
    assert verdict.first == ("gradients", cause), text
    assert "it got stand-ins for GPUs, one per rank" in " ".join(text.split())


def test_what_fails_on_gpus_alone_is_told_of(tmp_path: Path) -> None:
    """Where there are none, its ranks train apart, each of them all of the data, and nothing fails."""
    verdict, text = verdict_on(
        """
        torch.manual_seed(0)
        model, sampler = nn.Linear(6, 4), None
        model.unused = nn.Linear(6, 4)
        if torch.cuda.is_available():
            sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
            model.cuda()
            if world.world_size > 1:
                model = nn.parallel.DistributedDataParallel(module=model, device_ids=[world.local_rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        device = next(model.parameters()).device
        for x, y in torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        """,
        tmp_path,
    )
    assert verdict.first == ("gradients", "not-averaged"), text
    assert "failure: the ranks end with: RuntimeError: " in " ".join(text.split())


def test_a_script_that_asks_lockstep_for_nccl_is_given_gpus(tmp_path: Path) -> None:
    verdict, text = verdict_on(
        """
        world.shutdown()
        world = lockstep.init(backend="nccl")
        model, optimizer = trained(net.to(world.device))
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x.to(world.device)), y.to(world.device)).backward()
            optimizer.step()
        """,
        tmp_path,
    )
    assert verdict.code == 0, text


@pytest.mark.parametrize("epoch", [0, 1])
def test_of_ranks_that_fail_the_first_is_told(epoch: int, tmp_path: Path) -> None:
    verdict, text = verdict_on(
        f"""
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(2):
            if epoch == {epoch} and world.rank == 1:
                raise ValueError("of rank 1")
            for x, y in split():
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        """,
        tmp_path,
    )
    assert verdict.first == ("steps", "fails"), text
    assert "ranks fail with: ValueError: of rank 1 (rank 1, train.py:" in " ".join(text.split())


def test_what_computes_in_16_bits_is_compared_in_64(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
        import torch
        from torch import nn

        torch.distributed.init_process_group("gloo")
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
        sampler = torch.utils.data.DistributedSampler(data)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """
        )
    )
    (verdict,) = verify(Verification(str(script), steps=3))
    text = " ".join(format_text("train.py", [verdict]).split())
    assert verdict.code == 0, text
    assert "the script was compared in float64" in text
    assert verdict.digits[-1]["gradients"] < 1e-10


def test_numbers_that_double_leaves_single_are_no_finding(tmp_path: Path) -> None:
    verdict, text = verdict_on(
        """
        model, optimizer = trained(nn.Linear(6, 4))
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x).float(), y).backward()
            optimizer.step()
        """,
        tmp_path,
        double=True,
    )
    assert verdict.code == 0, text


def test_a_failure_of_its_own_is_no_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("no svd")

    monkeypatch.setattr(session, "verify_at", fail)
    verdict, text = verdict_on("", tmp_path)
    assert verdict.code == 2
    assert "lockstep verify itself failed, not the script" in " ".join(text.split())
    assert "ArithmeticError: no svd" in text


def test_rounding_that_a_batch_norm_of_samples_nearly_alike_makes_large_is_no_finding(tmp_path: Path) -> None:
    verdict, text = verdict_on(
        """
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        norms = [nn.BatchNorm2d(8, eps=1e-12) for _ in range(2)]
        layers = [nn.Conv2d(4, 8, 3), norms[0], nn.ReLU(), nn.Conv2d(8, 8, 1), norms[1], nn.Flatten(), nn.Linear(8, 4)]
        net = lockstep.convert_sync_batchnorm(nn.Sequential(*layers))
        alike = torch.utils.data.TensorDataset(1 + 1e-6 * torch.randn(60, 4, 3, 3), data.tensors[1][:60])
        model, optimizer = trained(net)
        for x, y in lockstep.DataLoader(alike, batch_size=10):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
        tmp_path,
    )
    assert verdict.code != 1, text


def test_gradients_that_overflowed_are_no_sum_of_the_ranks() -> None:
    fit = fit_ranks(torch.ones(2), [torch.tensor([1.0, float("inf")])])
    assert not fit.is_good


def test_a_factor_that_clipping_by_norm_hides_is_told_from_1(tmp_path: Path) -> None:
    verdict, text = verdict_on(
        """
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        """,
        tmp_path,
    )
    assert verdict.first == ("gradients", "factor"), text
    (factor,) = re.findall(r"counts (\S+) times", verdict.differences[0].meaning)
    assert float(factor) != 1
    assert float(factor) == pytest.approx(1, abs=1e-5)
