"""hosts: a group over several hosts, against flat gloo and torch's DDP on it.

The hosts are network namespaces of this machine, joined by virtual Ethernet; see `tests.namespaces`. Needs
root. `tc tbf` holds it to 1 Gbit/s, except where a table says otherwise.

`all_reduce` of 25 MiB over two hosts with two ranks each, contestants in the same processes and rounds:

- `gloo`: a flat gloo group of the four ranks.
- `lockstep_fp32`, `lockstep_bf16`, `lockstep_int8`: a lockstep group with that wire format; fp32 is exact.

A training step of the MLP with 10M parameters:

- `torch_ddp_gloo`: torch's DDP on gloo.
- `torch_ddp_gloo_bf16`: the same with torch's own `bf16_compress_hook`.
- `lockstep_ddp_fp32`, `lockstep_ddp_bf16`: `lockstep.DistributedDataParallel` on a lockstep group.

`all_reduce` of 4 B to 4 MiB over 2, 4 and 8 hosts with one rank and two ranks each, at 1 Gbit/s and as fast as the
machine copies: `gloo` and `lockstep`. All ranks share the cores of this machine, so what counts is mostly the processor
time that a call takes on all of them together.

Before anything is timed, every group must give the right sum, and exact engines must hold the same weights after the
same steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import lockstep
import lockstep.comm.backend  # registers the backend
from benchmarks.case_all_reduce import all_reduce_of
from benchmarks.case_train_step import MODELS, NUM_CLASSES, WARMUP_STEPS, _step, build_model, require_agreement
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, RankFailed
from lockstep.bench.results import Environment, Result, Series, Skipped
from lockstep.comm.wire import choose_wire
from tests.namespaces import Cluster, cluster, reason_to_skip
from tests.wire_bounds import error_bound

__all__ = ["FULL", "QUICK", "Plan", "run"]

MIB = 1024 * 1024
RANKS_PER_HOST = (2, 2)
UNLIMITED = "unlimited"
WIRES = ("fp32", "bf16", "int8")
_MODEL = "mlp_10m"
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        size_bytes: of the float32 tensor that is reduced.
        rate: of each host's link, in tc's words.
        all_reduce: budget of the reductions.
        step: budget of the training steps.
        shapes: hosts and ranks on each, of the reductions over more of them.
        sizes: of the float32 tensors that these reduce, in bytes.
        many: budget of each of these.
    """

    size_bytes: int
    rate: str
    all_reduce: Budget
    step: Budget
    shapes: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    many: Budget


FULL = Plan(
    25 * MIB,
    "1gbit",
    Budget(seconds=30, sample_s=0.1, min_rounds=8, max_rounds=30, sweeps=1),
    Budget(seconds=60, sample_s=0.1, min_rounds=8, max_rounds=30, sweeps=1),
    tuple((hosts, ranks) for hosts in (2, 4, 8) for ranks in (1, 2)),
    (4, 64 << 10, 4 * MIB),
    Budget(seconds=3, sample_s=0.05, min_rounds=8, max_rounds=30, sweeps=1),
)
QUICK = Plan(
    4 * MIB,
    "1gbit",
    Budget(seconds=2, sample_s=0.01, max_rounds=4, sweeps=1),
    Budget(seconds=4, sample_s=0.01, max_rounds=4, sweeps=1),
    ((2, 1), (4, 1)),
    (4, 64 << 10),
    Budget(seconds=0.2, sample_s=0.002, max_rounds=3, sweeps=1),
)


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan, or say why it cannot be measured here.

    Raises:
        RankFailed: a rank failed, for instance because a sum was wrong.
    """
    environment = Environment.read()
    settings = {
        "ranks_per_host": list(RANKS_PER_HOST),
        "rate": plan.rate,
        "threads_per_rank": 1,
        "all_reduce": asdict(plan.all_reduce),
        "step": asdict(plan.step),
        "many": asdict(plan.many),
    }
    reason = reason_to_skip()
    parameters: dict[str, int | str] = {"bytes": plan.size_bytes}
    if reason:
        return Result("hosts", quick, environment, settings, [], [Skipped(parameters, "lockstep_fp32", reason)])
    series = []
    for rate in (plan.rate, UNLIMITED):
        with cluster(max(hosts for hosts, _ in plan.shapes), rate=None if rate == UNLIMITED else rate) as made:
            if rate == plan.rate:
                series += _measure_two_hosts(plan, made)
            for hosts, ranks in plan.shapes:
                series += _measure_many(plan, made, rate, [ranks] * hosts)
    return Result("hosts", quick, environment, settings, series)


def _measure_two_hosts(plan: Plan, made: Cluster) -> list[Series]:
    job: Job = {"size_bytes": plan.size_bytes, "all_reduce": asdict(plan.all_reduce), "step": asdict(plan.step)}
    timeout_s = 120 + 4 * (plan.all_reduce.seconds + plan.step.seconds)
    return _series_of(made.run(_measure_on_rank, RANKS_PER_HOST, job, timeout=timeout_s))


def _measure_many(plan: Plan, made: Cluster, rate: str, sizes: Sequence[int]) -> list[Series]:
    """The reductions over so many ranks on each host."""
    parameters = {"hosts": len(sizes), "ranks_per_host": sizes[0], "rate": rate}
    job: Job = {"parameters": parameters, "sizes": plan.sizes, "budget": asdict(plan.many)}
    timeout_s = 120 + 4 * len(plan.sizes) * plan.many.seconds
    return _series_of(made.run(_measure_many_on_rank, sizes, job, timeout=timeout_s))


def _series_of(outcomes: Sequence[object]) -> list[Series]:
    """The series that all ranks have returned.

    Raises:
        RankFailed: one has returned none.
    """
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            raise RankFailed(f"rank {rank} of {len(outcomes)} failed: {outcome!r}")
    first = outcomes[0]
    assert isinstance(first, list)
    return [Series(**item) for item in first]


def _measure_many_on_rank(job: Job) -> object:
    """Body of one rank."""
    parameters, sizes, budget = job["parameters"], job["sizes"], job["budget"]
    assert isinstance(parameters, dict)
    assert isinstance(sizes, tuple)
    assert isinstance(budget, dict)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)  # the control plane of the harness
    groups = {name: dist.new_group(backend=name, timeout=_TIMEOUT) for name in ("gloo", "lockstep")}
    configurations = []
    for size in sizes:
        contestants = [all_reduce_of(name, torch.empty(size // 4), group) for name, group in groups.items()]
        configurations.append(Configuration({**parameters, "bytes": size}, contestants))
    series = measure(configurations, Budget(**budget))
    dist.destroy_process_group()
    return [asdict(item) for item in series]


def _measure_on_rank(job: Job) -> object:
    """Body of one rank."""
    size_bytes, all_reduce, step = job["size_bytes"], job["all_reduce"], job["step"]
    assert isinstance(size_bytes, int)
    assert isinstance(all_reduce, dict)
    assert isinstance(step, dict)
    dist.init_process_group("gloo", timeout=_TIMEOUT)  # the control plane of the harness
    series = measure([_reductions(size_bytes)], Budget(**all_reduce))
    series += measure([_steps()], Budget(**step))
    dist.destroy_process_group()
    return [asdict(item) for item in series]


def _group(wire: str) -> dist.ProcessGroup:
    """A lockstep group of all ranks with that wire format. Collective."""
    choose_wire(wire)
    group = dist.new_group(backend="lockstep", timeout=_TIMEOUT)
    choose_wire(None)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _reductions(size_bytes: int) -> Configuration:
    numel = size_bytes // 4
    contestants = [_reducer("gloo", numel, dist.new_group(backend="gloo", timeout=_TIMEOUT), 0.0)]
    for wire in WIRES:
        # Two hosts: two encodings of sums that are at most 7 in the check.
        error = 2 * float(error_bound(wire, torch.linspace(1.0, 7.0, 1024)).max())
        contestants.append(_reducer(f"lockstep_{wire}", numel, _group(wire), error))
    return Configuration({"bytes": size_bytes}, contestants)


def _reducer(name: str, numel: int, group: dist.ProcessGroup, error: float) -> Contestant:
    """all_reduce of one tensor over one group, checked once. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ramp = torch.linspace(0.0, 1.0, 997).repeat(-(-numel // 997))[:numel]
    tensor = ramp * (rank + 1) / size
    expected = ramp * (size + 1) / 2
    dist.all_reduce(tensor, group=group)
    off = float((tensor - expected).abs().max())
    if off > error + 1e-5:
        raise RuntimeError(f"{name}: all_reduce is off by {off}, expected at most {error}")
    tensor.copy_(torch.randn(numel) * 1e-3)
    return Contestant(name, lambda: dist.all_reduce(tensor.mul_(0.25), group=group))


def _bf16_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own, under a name that torch does not refuse on a CPU, where it works as well."""
    return bf16_compress_hook(group, bucket)


_bf16_hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def _steps() -> Configuration:
    """The engines, warmed up and checked against each other. Collective."""
    torch.manual_seed(0)  # the same weights on all ranks and for all contestants
    original = build_model(_MODEL)
    gloo = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    exact = nn.parallel.DistributedDataParallel(copy.deepcopy(original), process_group=gloo)
    hooked = nn.parallel.DistributedDataParallel(copy.deepcopy(original), process_group=gloo)
    hooked.register_comm_hook(gloo, _bf16_hook)
    engines: dict[str, nn.Module] = {"torch_ddp_gloo": exact, "torch_ddp_gloo_bf16": hooked}
    for wire in ("fp32", "bf16"):
        own = lockstep.DistributedDataParallel(copy.deepcopy(original), process_group=_group(wire))
        engines[f"lockstep_ddp_{wire}"] = own
    torch.manual_seed(1 + dist.get_rank())  # but different data on every rank
    shape = MODELS[_MODEL][1]
    inputs, labels = torch.randn(shape), torch.randint(NUM_CLASSES, (shape[0],))
    contestants = [Contestant(name, _step(model, inputs, labels)) for name, model in engines.items()]
    for _ in range(WARMUP_STEPS):
        for contestant in contestants:
            contestant.call()
    require_agreement(_MODEL, {name: engines[name] for name in ("torch_ddp_gloo", "lockstep_ddp_fp32")})
    return Configuration({"model": _MODEL}, contestants)
