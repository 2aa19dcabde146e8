"""horovod: a training step with Horovod's DistributedOptimizer beside one with DDP, 2 ranks with 1 thread each.

Contestants, each with a model of its own that started from the same weights:

- `none`: the same step with no communication at all, both ranks at the same time. The floor.
- `lockstep_ddp`: `lockstep.DistributedDataParallel` on a lockstep group.
- `horovod`: `lockstep.compat.horovod.torch.DistributedOptimizer`, as a Horovod script uses it.

Models and steps are those of `train_step`. Before anything is timed the engines train a few steps and must agree on the
weights.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep
import lockstep.compat.horovod.torch as hvd
from benchmarks.case_train_step import (
    LEARNING_RATE,
    MODELS,
    MOMENTUM,
    NUM_CLASSES,
    WARMUP_STEPS,
    Plan,
    build_model,
    require_agreement,
)
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Result, Series

__all__ = ["FULL", "QUICK", "run"]

FULL = Plan(tuple(MODELS), 2, Budget(seconds=20, sample_s=0.25, min_rounds=8, max_rounds=60, sweeps=1))
QUICK = Plan(tuple(MODELS), 2, Budget(seconds=2, sample_s=0.05, max_rounds=4, sweeps=1))


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan.

    Raises:
        RankFailed: a rank failed, for instance because the engines disagreed on the weights.
    """
    environment = Environment.read()
    job = {"models": plan.models, "budget": asdict(plan.budget)}
    timeout_s = 120 + 4 * len(plan.models) * (plan.budget.seconds + 15)
    answer = run_ranks(_measure_on_rank, plan.world_size, job, threads=1, timeout_s=timeout_s, backend="lockstep")
    assert isinstance(answer, list)
    settings = {
        "world_size": plan.world_size,
        "threads_per_rank": 1,
        "optimizer": f"SGD(lr={LEARNING_RATE}, momentum={MOMENTUM}, fused=True)",
        "input_shape_per_rank": {name: list(MODELS[name][1]) for name in plan.models},
        "budget": asdict(plan.budget),
    }
    return Result("horovod", quick, environment, settings, [Series(**item) for item in answer])


def _measure_on_rank(job: Job) -> object:
    """Body of one rank: models one after the other, so that only one model's copies are alive."""
    models, budget = job["models"], job["budget"]
    assert isinstance(models, list)
    assert isinstance(budget, dict)
    hvd.init()
    group, meeting = dist.new_group(backend="lockstep"), dist.new_group(backend="gloo")
    series: list[Series] = []
    for name in models:
        series += measure([_configuration(name, group)], Budget(**budget), meeting)
    hvd.shutdown()
    return [asdict(item) for item in series]


def _configuration(name: str, group: dist.ProcessGroup) -> Configuration:
    """The contestants of one model, warmed up and checked against each other. Collective."""
    torch.manual_seed(0)  # the same weights on all ranks and for all contestants
    original = build_model(name)
    engines: dict[str, nn.Module] = OrderedDict(
        none=copy.deepcopy(original),
        lockstep_ddp=lockstep.DistributedDataParallel(copy.deepcopy(original), process_group=group),
        horovod=copy.deepcopy(original),
    )
    torch.manual_seed(1 + dist.get_rank())  # but different data on every rank
    shape = MODELS[name][1]
    inputs, labels = torch.randn(shape), torch.randint(NUM_CLASSES, (shape[0],))
    contestants = [Contestant(engine, _step(engine, model, inputs, labels)) for engine, model in engines.items()]
    for _ in range(WARMUP_STEPS):
        for contestant in contestants:
            contestant.call()
    # BatchNorm's running statistics are each rank's own in Horovod, and no parameters.
    require_agreement(name, {engine: model for engine, model in engines.items() if engine != "none"})
    return Configuration({"model": name}, contestants)


def _step(engine: str, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """One training step of `model` on a fixed batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
    if engine == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
