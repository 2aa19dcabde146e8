"""The flight record: what it adds to the smallest all_reduce, where nothing hides it.

Contestants, all on lockstep groups in the same processes and in the same rounds, all `dist.all_reduce` of 4 bytes:

- `no_record`: the record taken out: no fingerprint, no comparison, no user's line looked for. (One store of a word,
  when the call is over, remains.)
- `record`: as it is without a launcher of ours.
- `record_launched`: as it is under `lockstep run`, where each rank also keeps its status file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep import env
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Result, Series
from lockstep.comm.callsite import CallSite
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.rank_status import make_status_files

__all__ = ["FULL", "QUICK", "Plan", "run"]

_BYTES = 4
_NOWHERE: CallSite = ("", 0, "")


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        world_sizes: each gets processes of its own.
        budget: per world size.
    """

    world_sizes: tuple[int, ...]
    budget: Budget


FULL = Plan((2,), Budget(seconds=20.0, sample_s=0.01, max_rounds=600))
QUICK = Plan((2,), Budget(seconds=0.5, sample_s=0.004, max_rounds=8, sweeps=1))


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan. Starts the ranks of each world size once.

    Raises:
        RankFailed: a rank failed.
    """
    environment = Environment.read()
    series: list[Series] = []
    for world_size in plan.world_sizes:
        folder = tempfile.mkdtemp(prefix="record-")
        try:
            job = {"folder": folder, "budget": asdict(plan.budget)}
            timeout_s = 60 + 4 * plan.budget.seconds
            answer = run_ranks(_measure_on_rank, world_size, job, threads=1, timeout_s=timeout_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        assert isinstance(answer, list)
        series += [Series(**item) for item in answer]
    settings = {"dtype": "float32", "op": "SUM", "threads_per_rank": 1, "budget": asdict(plan.budget)}
    return Result("record", quick, environment, settings, series)


class _NoRecorder(FlightRecorder):
    """A flight recorder that records nothing and compares nothing."""

    def enter(self, key: object, describe: Callable[[], str], site: CallSite, start_s: float) -> None:
        """Count, which errors need."""
        self.number += 1


def _measure_on_rank(job: Job) -> object:
    """Body of one rank: three groups that differ in their records alone."""
    folder, budget = job["folder"], job["budget"]
    assert isinstance(folder, str)
    assert isinstance(budget, dict)
    bare, plain = _make_group(), _make_group()
    bare.engine.recorder.__class__ = _NoRecorder
    bare.engine.locate = lambda: _NOWHERE
    status_files = make_status_files(Path(folder), [dist.get_rank()])  # as the launcher does
    env.LOCKSTEP_RENDEZVOUS.set(folder)
    env.RANK.set(dist.get_rank())
    groups = {"no_record": bare, "record": plain, "record_launched": _make_group()}
    contestants = [_reducer(name, group) for name, group in groups.items()]
    parameters: dict[str, int | str] = {"world_size": dist.get_world_size(), "bytes": _BYTES}
    series = measure([Configuration(parameters, contestants)], Budget(**budget))
    for fd in status_files:
        os.close(fd)
    return [asdict(item) for item in series]


def _make_group() -> Any:
    return dist.new_group(backend="lockstep")


def _reducer(name: str, group: Any) -> Contestant:
    """all_reduce of one number over one group, checked once. Collective."""
    tensor = torch.full((_BYTES // 4,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) // 2
    if tensor.item() != expected:
        raise RuntimeError(f"{name}: the sum is {tensor.item()}, expected {expected}")
    tensor.zero_()
    return Contestant(name, lambda: dist.all_reduce(tensor, group=group))
