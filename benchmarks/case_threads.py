"""threads: a training step where ranks have several intra-op threads, or where ranks fill all cores.

Contestants, on the models of `case_train_step`, each with a model of its own that started from the same weights:

- `none`: the same step with no communication, all ranks at the same time.
- `bound`: the same, and then a barrier: computing, and waiting for the slowest rank. No engine can be faster.
- `lockstep_ddp`, `torch_ddp_lockstep`, `torch_ddp_gloo`: as in `case_train_step`.

A group whose ranks wait by asking takes cores from the threads that compute. That shows here and nowhere else, so each
layout says how many ranks, how many threads each, and what cores there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

import lockstep.comm.backend  # noqa: F401  registers the backend
from benchmarks import case_train_step
from lockstep.bench.harness import Budget, Contestant, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Result, Series

__all__ = ["FULL", "QUICK", "Plan", "run"]


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        layouts: how many ranks, and how many intra-op threads each; each gets processes of its own.
        models: names out of `case_train_step.MODELS`.
        budget: per layout and model.
        limit_s: for each layout; a model that would begin after it is not measured.
    """

    layouts: tuple[tuple[int, int], ...]
    models: tuple[str, ...]
    budget: Budget
    limit_s: float = 600.0


_MODELS = tuple(case_train_step.MODELS)
FULL = Plan(((2, 2), (4, 1)), _MODELS, Budget(seconds=20, sample_s=0.25, min_rounds=8, max_rounds=40, sweeps=1))
QUICK = Plan(((2, 2),), ("thin_100",), Budget(seconds=2, sample_s=0.05, max_rounds=4, sweeps=1))


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan. Starts the ranks of each layout once.

    Raises:
        RankFailed: a rank failed, for instance because two engines disagreed on the weights.
    """
    environment = Environment.read()
    series: list[Series] = []
    for world_size, threads in plan.layouts:
        job = {"models": plan.models, "threads": threads, "budget": asdict(plan.budget), "limit_s": plan.limit_s}
        timeout_s = 120 + 6 * len(plan.models) * (plan.budget.seconds + 15)
        answer = run_ranks(_measure_on_rank, world_size, job, threads=threads, timeout_s=timeout_s)
        assert isinstance(answer, list)
        series += [Series(**item) for item in answer]
    settings = {
        "optimizer": f"SGD(lr={case_train_step.LEARNING_RATE}, momentum={case_train_step.MOMENTUM}, fused=True)",
        "input_shape_per_rank": {name: list(case_train_step.MODELS[name][1]) for name in plan.models},
        "budget": asdict(plan.budget),
    }
    return Result("threads", quick, environment, settings, series)


def _measure_on_rank(job: Job) -> object:
    """Body of one rank: models one after the other, so that only one model's copies are alive."""
    models, threads, budget, limit_s = job["models"], job["threads"], job["budget"], job["limit_s"]
    assert isinstance(models, list)
    assert isinstance(threads, int)
    assert isinstance(limit_s, float)
    assert isinstance(budget, dict)
    groups = {backend: dist.new_group(backend=backend) for backend in ("gloo", "lockstep")}
    series: list[Series] = []
    ends_s = time.monotonic() + limit_s
    for name in models:
        steps = case_train_step.configuration(name, groups)
        floor = steps.contestants[0]
        bound = Contestant("bound", _with_barrier(floor.call, groups["lockstep"]))
        here = {"world_size": dist.get_world_size(), "threads": threads}
        configuration = replace(
            steps, parameters=steps.parameters | here, contestants=[floor, bound, *steps.contestants[1:]]
        )
        series += measure([configuration], Budget(**budget), left_s=lambda: ends_s - time.monotonic())
    return [asdict(item) for item in series]


def _with_barrier(step: Callable[[], object], group: dist.ProcessGroup) -> Callable[[], None]:
    def call() -> None:
        step()
        dist.barrier(group)

    return call
