"""What rank 0 alone decides or writes, every rank learns: text, paths and failures."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import DistributedDataParallel, checkpoint, seeding
from lockstep.errors import InputError, LockstepError, WorkerFailed
from lockstep.rank_zero import on_rank_zero
from lockstep.testing import run_ranks

pytestmark = pytest.mark.parametrize("world_size", [1, 2, 3, 5])


def decide_texts() -> list[str]:
    assert dist.is_initialized()
    return [on_rank_zero(lambda text=text: f"{dist.get_rank()} {text}") for text in ("", "naïve ☃", "x" * 10_000)]


def test_every_rank_gets_rank_zeros_text(world_size: int) -> None:
    expected = ["0 ", "0 naïve ☃", "0 " + "x" * 10_000]
    assert run_ranks(decide_texts, world_size) == [expected] * world_size


def fail_on_rank_zero(kind: type[Exception], *arguments: Any) -> tuple[str, str]:
    def act() -> str:
        raise kind(*arguments)

    try:
        on_rank_zero(act)
    except Exception as error:
        # The group is intact: the next collective works.
        return f"{type(error).__name__}: {error}", on_rank_zero(lambda: "still here")
    return "no error", ""


@pytest.mark.parametrize(
    ("kind", "arguments", "own", "others"),
    [
        (InputError, ("no: √2\nline",), "InputError: no: √2\nline", "InputError: no: √2\nline"),
        (OSError, ("disk full",), "OSError: disk full", "LockstepError: rank 0 failed: OSError: disk full"),
        (WorkerFailed, ("gone", 1, 137), "WorkerFailed: gone", "LockstepError: gone"),
    ],
)
def test_a_failure_is_raised_on_every_rank(
    world_size: int, kind: type[Exception], arguments: tuple[Any, ...], own: str, others: str
) -> None:
    outcomes = run_ranks(fail_on_rank_zero, world_size, kind, *arguments)
    assert outcomes == [(own, "still here")] + [(others, "still here")] * (world_size - 1)


def save_and_load(folder: Path) -> tuple[str, dict[str, Any]]:
    path = checkpoint.save(folder, {"rank": dist.get_rank()}, step=1)
    return str(path), checkpoint.load(folder)


def test_rank_zero_writes_and_all_read(world_size: int, tmp_path: Path) -> None:
    outcomes = run_ranks(save_and_load, world_size, tmp_path)
    (path,) = checkpoint.available(tmp_path)
    assert outcomes == [(str(path), {"rank": 0})] * world_size


def save_where_nothing_can_be_written(folder: Path) -> str:
    with pytest.raises((LockstepError, OSError)) as caught:
        checkpoint.save(folder / "file" / "checkpoints", {}, step=1)
    return str(caught.value)


def test_a_failed_write_is_an_error_on_every_rank(world_size: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert all("Not a directory" in said for said in run_ranks(save_where_nothing_can_be_written, world_size, tmp_path))


def seed_and_draw(seed: int) -> list[float]:
    """Seed all generators; the numbers drawn leave the second one of a pair in numpy's and `random`'s."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return draw()


def draw() -> list[float]:
    return [*torch.rand(3).tolist(), np.random.normal(), np.random.rand(), random.gauss(0, 1), random.random()]


def draw_after_saving(folder: Path) -> list[float]:
    seed_and_draw(dist.get_rank())
    checkpoint.save(folder, {"rng": checkpoint.gather_rng()}, step=1)
    return draw()


def draw_after_loading(folder: Path) -> list[float]:
    seed_and_draw(100)
    checkpoint.restore_rng(checkpoint.load(folder)["rng"])
    return draw()


def resume_under_a_seed(folder: Path, wraps_first: bool) -> list[float]:
    """An engine moves the ranks to their own streams, but not from those that were restored."""
    seeding.begin_common_stream(7, dist.get_rank())
    model: torch.nn.Module = torch.nn.Linear(2, 1)
    for wraps in (wraps_first, not wraps_first):
        if wraps:
            model = DistributedDataParallel(model)
        else:
            checkpoint.restore_rng(checkpoint.load(folder)["rng"])
    model(torch.zeros(1, 2))
    return draw()


def test_each_rank_goes_on_with_its_own_random_numbers(world_size: int, tmp_path: Path) -> None:
    drawn = run_ranks(draw_after_saving, world_size, tmp_path)
    assert run_ranks(draw_after_loading, world_size, tmp_path) == drawn
    # One rank more than before keeps the state it has; ranks that are gone are not missed.
    *known, new = run_ranks(draw_after_loading, world_size + 1, tmp_path)
    assert known == drawn
    seed_and_draw(100)
    assert new == draw()
    assert run_ranks(draw_after_loading, 1, tmp_path) == drawn[:1]
    for wraps_first in (True, False):
        assert run_ranks(resume_under_a_seed, world_size, tmp_path, wraps_first) == drawn


def log_something() -> list[tuple[str, str, str, int]]:
    records: list[logging.LogRecord] = []
    logger = lockstep.get_logger("training")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.info("loss %.2f", 0.25)
    logger.log(logging.WARNING, "slow")
    logger.debug("not asked for")
    logger.info("all", all_ranks=True)
    logger.logger.removeHandler(handler)
    return [(one.levelname, one.getMessage(), one.funcName, one.lineno) for one in records]


def test_logger_speaks_once(world_size: int) -> None:
    line = log_something.__code__.co_firstlineno
    first, *others = run_ranks(log_something, world_size)
    assert first == [
        ("INFO", "loss 0.25", "log_something", line + 7),
        ("WARNING", "slow", "log_something", line + 8),
        ("INFO", "all", "log_something", line + 10),
    ]
    assert others == [first[2:]] * (world_size - 1)


def test_logger_knows_its_rank_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        assert len(log_something()) == (3 if rank == 0 else 1)
