"""train_step: what gradient synchronisation adds to a step of three models, 2 ranks with 1 thread each.

Contestants, each with a model of its own that started from the same weights:

- `none`: the same step with no communication at all, both ranks at the same time. The floor.
- `lockstep_ddp`: `lockstep.DistributedDataParallel` on the lockstep group.
- `torch_ddp_lockstep`: `torch.nn.parallel.DistributedDataParallel` on the lockstep group.
- `torch_ddp_gloo`: the same on a gloo group.

A step is zero_grad, forward, cross entropy, backward and SGD with momentum (fused). All engines run
with their defaults. Before anything is timed the engines train a few steps and must agree on the weights.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep
import lockstep.comm.backend  # registers the backend
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Result, Series

__all__ = ["FULL", "MODELS", "QUICK", "Plan", "build_model", "configuration", "require_agreement", "run"]

NUM_CLASSES = 10
WARMUP_STEPS = 3
LEARNING_RATE = 1e-3
MOMENTUM = 0.9
# Engines may add in different orders inside a bucket, never in different precision. Gradients are
# O(1) sums of up to 2**10 terms, so three steps of 1e-3 leave weights closer than this.
WEIGHT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        models: names out of `MODELS`.
        world_size: number of ranks.
        budget: per model.
    """

    models: tuple[str, ...]
    world_size: int
    budget: Budget


def _mlp_10m() -> nn.Sequential:
    """784-2048-2048-2048-10 with ReLU: 10.0M parameters, most of the step is moving them."""
    widths = [784, 2048, 2048, 2048]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], NUM_CLASSES))


def _cnn_5m() -> nn.Sequential:
    """Six 3x3 convolutions with batch norm, 32x32 input: 4.8M parameters, most of the step is arithmetic."""
    layers: list[nn.Module] = []
    before = 3
    for channels, pool in ((64, True), (128, False), (256, True), (256, False), (512, True), (512, False)):
        layers += [nn.Conv2d(before, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        if pool:
            layers.append(nn.MaxPool2d(2))
        before = channels
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, NUM_CLASSES)]
    return nn.Sequential(*layers, *head)


def _thin_100() -> nn.Sequential:
    """100 linear layers, 64 wide: 0.4M parameters in 200 tensors, most of the step is latency."""
    layers: list[nn.Module] = []
    for _ in range(99):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, NUM_CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "mlp_10m": (_mlp_10m, (32, 784)),
    "cnn_5m": (_cnn_5m, (8, 3, 32, 32)),
    "thin_100": (_thin_100, (32, 64)),
}
"""Name -> (constructor, shape of one rank's input: batch first)."""

FULL = Plan(tuple(MODELS), 2, Budget(seconds=20, sample_s=0.25, min_rounds=8, max_rounds=60, sweeps=1))
QUICK = Plan(tuple(MODELS), 2, Budget(seconds=2, sample_s=0.05, max_rounds=4, sweeps=1))


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan.

    Raises:
        RankFailed: a rank failed, for instance because two engines disagreed on the weights.
    """
    environment = Environment.read()
    job = {"models": plan.models, "budget": asdict(plan.budget)}
    timeout_s = 120 + 4 * len(plan.models) * (plan.budget.seconds + 15)
    answer = run_ranks(_measure_on_rank, plan.world_size, job, threads=1, timeout_s=timeout_s)
    assert isinstance(answer, list)
    settings = {
        "world_size": plan.world_size,
        "threads_per_rank": 1,
        "optimizer": f"SGD(lr={LEARNING_RATE}, momentum={MOMENTUM}, fused=True)",
        "num_parameters": {name: _num_parameters(build_model(name)) for name in plan.models},
        "input_shape_per_rank": {name: list(MODELS[name][1]) for name in plan.models},
        "budget": asdict(plan.budget),
    }
    return Result("train_step", quick, environment, settings, [Series(**item) for item in answer])


def build_model(name: str) -> nn.Sequential:
    """One of `MODELS`, initialised so that activations keep their scale through every layer.

    PyTorch's default initialisation shrinks them: after 100 thin layers gradients would be
    denormal numbers, and the processor's slow path for those would be what is measured.
    """
    model = MODELS[name][0]()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _measure_on_rank(job: Job) -> object:
    """Body of one rank: models one after the other, so that only one model's copies are alive."""
    models, budget = job["models"], job["budget"]
    assert isinstance(models, list)
    assert isinstance(budget, dict)
    groups = {backend: dist.new_group(backend=backend) for backend in ("gloo", "lockstep")}
    series: list[Series] = []
    for name in models:
        series += measure([configuration(name, groups)], Budget(**budget))
    return [asdict(item) for item in series]


def configuration(name: str, groups: dict[str, dist.ProcessGroup]) -> Configuration:
    """The four contestants of one model, warmed up and checked against each other. Collective."""
    torch.manual_seed(0)  # the same weights on all ranks and for all contestants
    original = build_model(name)
    engines: dict[str, nn.Module] = OrderedDict(
        none=copy.deepcopy(original),
        lockstep_ddp=lockstep.DistributedDataParallel(copy.deepcopy(original), process_group=groups["lockstep"]),
        torch_ddp_lockstep=nn.parallel.DistributedDataParallel(
            copy.deepcopy(original), process_group=groups["lockstep"]
        ),
        torch_ddp_gloo=nn.parallel.DistributedDataParallel(copy.deepcopy(original), process_group=groups["gloo"]),
    )
    torch.manual_seed(1 + dist.get_rank())  # but different data on every rank
    shape = MODELS[name][1]
    inputs, labels = torch.randn(shape), torch.randint(NUM_CLASSES, (shape[0],))
    contestants = [Contestant(engine, _step(model, inputs, labels)) for engine, model in engines.items()]
    for _ in range(WARMUP_STEPS):
        for contestant in contestants:
            contestant.call()
    require_agreement(name, {engine: model for engine, model in engines.items() if engine != "none"})
    return Configuration({"model": name}, contestants)


def _step(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """One training step of `model` on a fixed batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def require_agreement(name: str, engines: dict[str, nn.Module]) -> None:
    """All engines must hold the same weights after the same steps. Local.

    Raises:
        RuntimeError: two engines differ; names them, the parameter and the difference.
    """
    (reference_name, reference), *others = engines.items()
    for other_name, other in others:
        for (parameter, expected), got in zip(reference.named_parameters(), other.parameters(), strict=True):
            difference = float((expected - got).detach().abs().max())
            if not difference <= WEIGHT_TOLERANCE:
                raise RuntimeError(
                    f"{name}: {other_name} and {reference_name} differ by {difference} in {parameter} "
                    f"after {WARMUP_STEPS} steps, expected at most {WEIGHT_TOLERANCE}"
                )


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
