"""sharded: a step of which each rank does a share, beside the same step with no communication that waits at its end.

Contestants, each with a model of its own that started from the same weights, with one thread a rank:

- `bound`: the step with no communication, then a barrier: computing, and waiting for the slowest rank.
- `lockstep_ddp`: `lockstep.DistributedDataParallel` and the plain optimizer.
- `sharded`: the same engine and `lockstep.ZeroRedundancyOptimizer`.
- `torch_ddp_gloo`: torch's DDP on gloo and the plain optimizer.
- `torch_zero_gloo`: torch's DDP and its ZeroRedundancyOptimizer, on gloo.
- `fsdp2_gloo`: `fully_shard` of each layer and of the whole, on gloo.

Each contestant has the first of `_IMPLEMENTATIONS` that it can run, fastest first: fused, then foreach, then one tensor
at a time. Which one it was stands with its samples; DTensor, and so FSDP2, has no fused SGD. Who can run none is a line
in the result. Memory is measured in processes of its own for each: what all ranks together have resident more than
before they made model and optimizer, at its most after a backward pass or a step: as glibc comes, and where it gives
large tensors back (`_RETURNED`, see docs/guide-sharded.md), for both alike.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep
import lockstep.comm.backend  # registers the backend
from benchmarks import case_train_step
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Parameters, Result, Series, Skipped

__all__ = ["FULL", "QUICK", "Plan", "run"]

_ROWS, _INPUTS, _CLASSES = 32, 784, 10
# The hidden layers of each model. Only the memory of deep_50m is measured: glibc keeps two of the largest gradients,
# and each is a tenth of this model, but nearly half of mlp_50m.
_WIDTHS = {"mlp_10m": (2048,) * 3, "mlp_50m": (4736,) * 3, "deep_50m": (2112,) * 12}
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-4}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}
# Fastest first.
_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "one tensor at a time": {"foreach": False},
}
_WARMUP_STEPS = 2
_CONTESTANTS = ("bound", "lockstep_ddp", "sharded", "torch_ddp_gloo", "torch_zero_gloo", "fsdp2_gloo")
_COMPARED = ("torch_ddp_gloo", "sharded", "lockstep_ddp", "torch_zero_gloo")
_IN_MEMORY = ("torch_ddp_gloo", "sharded")
_RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "THP_MEM_ALLOC_ENABLE": "1"}

Made = tuple[nn.Module, torch.optim.Optimizer]
Groups = dict[str, dist.ProcessGroup]


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        cases: ranks, model and optimizer of each.
        budget: for each.
        memory: ranks and model of which the memory is measured, with Adam.
    """

    cases: tuple[tuple[int, str, str], ...]
    budget: Budget
    memory: tuple[tuple[int, str], ...]


FULL = Plan(
    (
        *((2, model, optimizer) for model in ("mlp_10m", "mlp_50m") for optimizer in _OPTIMIZERS),
        *((4, "mlp_10m", optimizer) for optimizer in _OPTIMIZERS),
    ),
    Budget(seconds=25, sample_s=0.2, min_rounds=8, max_rounds=60, sweeps=1),
    tuple((world_size, model) for model in ("mlp_50m", "deep_50m") for world_size in (2, 4)),
)
QUICK = Plan(
    tuple((2, "mlp_10m", optimizer) for optimizer in _OPTIMIZERS),
    Budget(seconds=2, sample_s=0.05, max_rounds=4, sweeps=1),
    ((2, "mlp_10m"),),
)


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan. Starts the ranks of each case, and of each measure of memory, anew.

    Raises:
        RankFailed: a rank failed, for instance because two engines disagreed on the weights.
    """
    environment = Environment.read()
    series: list[Series] = []
    skipped: list[Skipped] = []
    for world_size, model, optimizer in plan.cases:
        job = {"model": model, "optimizer": optimizer, "budget": asdict(plan.budget)}
        answer = run_ranks(
            _measure_on_rank, world_size, job, threads=1, timeout_s=240 + 8 * plan.budget.seconds, backend="lockstep"
        )
        assert isinstance(answer, dict)
        series += [Series(**item) for item in answer["series"]]
        skipped += [Skipped(**item) for item in answer["skipped"]]
    memory: dict[str, dict[str, float]] = {}
    for variables, (world_size, model), name in itertools.product(({}, _RETURNED), plan.memory, _IN_MEMORY):
        job = {"model": model, "contestant": name}
        found = run_ranks(
            _resident_on_rank, world_size, job, threads=1, timeout_s=300, backend="lockstep", variables=variables
        )
        assert isinstance(found, float)
        where = f"{world_size} ranks, {model}{', large tensors given back' if variables else ''}"
        memory.setdefault(where, {})[name] = found
    settings = {
        "threads_per_rank": 1,
        "rows_per_rank": _ROWS,
        "optimizers": {name: f"{kind.__name__}({options})" for name, (kind, options) in _OPTIMIZERS.items()},
        "resident_bytes": memory,
        "budget": asdict(plan.budget),
    }
    return Result("sharded", quick, environment, settings, series, skipped)


def _build(model: str) -> nn.Sequential:
    widths = _WIDTHS[model]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((_INPUTS, *widths)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], _CLASSES))


def _make(name: str, original: nn.Module, optimizer: str, implementation: str, groups: Groups) -> Made:
    """Model and optimizer of one contestant. Collective."""
    kind, options = _OPTIMIZERS[optimizer]
    options = {**options, **_IMPLEMENTATIONS[implementation]}
    model = copy.deepcopy(original)
    gloo = groups["gloo"]
    if name == "bound":
        return model, kind(model.parameters(), **options)
    if name in ("lockstep_ddp", "sharded"):
        engine = lockstep.DistributedDataParallel(model, process_group=groups["lockstep"])
        if name == "sharded":
            return engine, lockstep.ZeroRedundancyOptimizer(engine.parameters(), kind, **options)
        return engine, kind(engine.parameters(), **options)
    if name == "fsdp2_gloo":
        return _make_fsdp(model, gloo, kind, options)
    theirs = nn.parallel.DistributedDataParallel(model, process_group=gloo)
    if name == "torch_ddp_gloo":
        return theirs, kind(theirs.parameters(), **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return theirs, ZeroRedundancyOptimizer(theirs.parameters(), kind, process_group=gloo, **options)


def _make_fsdp(model: nn.Module, gloo: dist.ProcessGroup, kind: Any, options: dict[str, Any]) -> Made:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(gloo, "cpu")
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, kind(model.parameters(), **options)


def _find_implementation(name: str, optimizer: str, groups: Groups) -> tuple[str, str]:
    """The fastest that a contestant can run, and what stopped it from running faster ones; "" for none. Collective."""
    problems: list[str] = []
    for implementation in _IMPLEMENTATIONS:
        problem = _problem_with(name, optimizer, implementation, groups)
        if not problem:
            return implementation, "; ".join(problems)
        problems.append(f"{implementation}: {problem}")
    return "", "; ".join(problems)


def _problem_with(name: str, optimizer: str, implementation: str, groups: Groups) -> str:
    """What stops a contestant from a step of a small model, on all ranks alike; "" for nothing. Collective."""
    try:
        _step_of(_make(name, nn.Sequential(nn.Linear(_INPUTS, _CLASSES)), optimizer, implementation, groups))()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def _step_of(made: Made, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """One step on a fixed batch, others on each rank; then a barrier, if there is a group."""
    model, optimizer = made
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    inputs = torch.randn(_ROWS, _INPUTS, generator=generator)
    labels = torch.randint(_CLASSES, (_ROWS,), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if group is not None:
            dist.barrier(group)

    return step


def _make_groups() -> Groups:
    warnings.simplefilter("ignore")
    return {backend: dist.new_group(backend=backend) for backend in ("gloo", "lockstep")}


def _measure_on_rank(job: Job) -> object:
    """Body of one rank."""
    optimizer, budget = str(job["optimizer"]), job["budget"]
    assert isinstance(budget, dict)
    groups = _make_groups()
    torch.manual_seed(0)  # the same weights on all ranks and for all contestants
    original = _build(str(job["model"]))
    parameters: Parameters = {"world_size": dist.get_world_size(), "model": str(job["model"]), "optimizer": optimizer}
    made: dict[str, Made] = {}
    implementations: dict[str, str] = {}
    skipped: list[Skipped] = []
    for name in _CONTESTANTS:
        implementation, problems = _find_implementation(name, optimizer, groups)
        if implementation:
            implementations[name] = implementation
            made[name] = _make(name, original, optimizer, implementation, groups)
        else:
            skipped.append(Skipped(parameters, name, problems))
    contestants = [
        Contestant(name, _step_of(each, groups["lockstep"] if name == "bound" else None)) for name, each in made.items()
    ]
    for _ in range(_WARMUP_STEPS):
        for contestant in contestants:
            contestant.call()
    compared = {name: made[name][0] for name in _COMPARED if name in made}
    case_train_step.require_agreement(str(job["model"]), compared)
    series = measure([Configuration(parameters, contestants)], Budget(**budget))
    for each in series:
        each.facts["implementation"] = implementations[each.contestant]
    return {"series": [asdict(each) for each in series], "skipped": [asdict(each) for each in skipped]}


def _resident_on_rank(job: Job) -> object:
    """What one contestant takes with Adam, in bytes over all ranks."""
    groups, name = _make_groups(), str(job["contestant"])
    warm = _make(name, nn.Linear(_INPUTS, _CLASSES), "adam", "fused", groups)
    _step_of(warm, groups["lockstep"])()
    # No model of this size has been made yet: what glibc would keep of it could be used without being counted.
    before = _resident_bytes()
    torch.manual_seed(0)
    made = _make(name, _build(str(job["model"])), "adam", "fused", groups)
    step = _step_of(made, groups["lockstep"])
    for _ in range(2):
        step()
    noted: list[int] = []
    made[1].register_step_pre_hook(lambda *_: noted.append(_resident_bytes()))
    for _ in range(2):
        step()
        noted.append(_resident_bytes())
    total = torch.tensor(float(max(noted) - before), dtype=torch.float64)
    dist.all_reduce(total, group=groups["gloo"])
    return float(total)


def _resident_bytes() -> int:
    """Of this process; what several share is counted in parts."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
