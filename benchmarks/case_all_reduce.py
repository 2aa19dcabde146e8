"""all_reduce: Lockstep against gloo, from 4 bytes to 64 MiB, and against one memcpy of the same bytes.

Contestants, all in the same processes and in the same rounds:

- `gloo`, `lockstep`: `dist.all_reduce(tensor, group=...)`, SUM, synchronous, tensor on the heap.
- `lockstep_symmetric`: the same call on a tensor that lies in symmetric memory.
- `memcpy_one_rank`: `destination.copy_(source)` on rank 0 while the other ranks sleep.
- `memcpy_all_ranks`: the same copy on all ranks at once; memory bandwidth is shared, as it is in
  an all_reduce.

Before it is timed, every contestant must give the right sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

import lockstep
import lockstep.comm.backend  # registers the backend
from lockstep.bench.harness import Budget, Configuration, Contestant, agree_on_maximum, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Result, Series, Skipped
from lockstep.errors import SharedMemoryError

__all__ = ["FULL", "QUICK", "Plan", "all_reduce_of", "run"]

KIB, MIB = 1024, 1024 * 1024
SIZES_BYTES = (4, 64, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 25 * MIB, 64 * MIB)


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        world_sizes: each gets processes of its own.
        sizes_bytes: of the float32 tensor; multiples of 4.
        budget: per world size and size.
    """

    world_sizes: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    budget: Budget


FULL = Plan((2, 4), SIZES_BYTES, Budget(seconds=3.2, sample_s=0.01))
QUICK = Plan((2, 4), (4, 64 * KIB, 4 * MIB), Budget(seconds=0.5, sample_s=0.004, max_rounds=8, sweeps=1))


def all_reduce_of(name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> Contestant:
    """all_reduce of one tensor over one group, checked once. Collective."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    tensor.fill_(rank + 1)
    dist.all_reduce(tensor, group=group)
    expected = world_size * (world_size + 1) // 2
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"{name}: all_reduce of {tensor.nbytes} bytes gave {tensor}, expected all {expected}")
    tensor.zero_()  # repeated sums of zeros stay zeros; anything else would overflow
    return Contestant(name, lambda: dist.all_reduce(tensor, group=group))


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan. Starts the ranks of each world size once.

    Raises:
        RankFailed: a rank failed, for instance because a sum was wrong.
    """
    environment = Environment.read()
    series: list[Series] = []
    skipped: list[Skipped] = []
    for world_size in plan.world_sizes:
        job = {"sizes_bytes": plan.sizes_bytes, "budget": asdict(plan.budget)}
        timeout_s = 120 + 4 * len(plan.sizes_bytes) * (plan.budget.seconds + 5)
        answer = run_ranks(_measure_on_rank, world_size, job, threads=1, timeout_s=timeout_s)
        assert isinstance(answer, dict)
        series += [Series(**item) for item in answer["series"]]
        skipped += [Skipped(**item) for item in answer["skipped"]]
    settings = {"dtype": "float32", "op": "SUM", "threads_per_rank": 1, "budget": asdict(plan.budget)}
    return Result("all_reduce", quick, environment, settings, series, skipped)


def _measure_on_rank(job: Job) -> object:
    """Body of one rank: build the contestants of all sizes, then time them."""
    sizes, budget = job["sizes_bytes"], job["budget"]
    assert isinstance(sizes, list)
    assert isinstance(budget, dict)
    groups = {backend: dist.new_group(backend=backend) for backend in ("gloo", "lockstep")}
    configurations, skipped = [], []
    for size_bytes in sizes:
        parameters: dict[str, int | str] = {"world_size": dist.get_world_size(), "bytes": size_bytes}
        contestants = [all_reduce_of(name, torch.empty(size_bytes // 4), group) for name, group in groups.items()]
        symmetric, problem = _symmetric_tensor(size_bytes // 4, groups["lockstep"])
        if symmetric is None:
            skipped.append(Skipped(parameters, "lockstep_symmetric", problem))
        else:
            contestants.append(all_reduce_of("lockstep_symmetric", symmetric, groups["lockstep"]))
        configurations.append(Configuration(parameters, [*contestants, *_copiers(size_bytes // 4)]))
    series = measure(configurations, Budget(**budget))
    return {"series": [asdict(item) for item in series], "skipped": [asdict(item) for item in skipped]}


def _symmetric_tensor(numel: int, group: dist.ProcessGroup) -> tuple[torch.Tensor | None, str]:
    """A tensor in symmetric memory, or None and the reason on all ranks if one lacks the space."""
    tensor, problem = None, ""
    try:
        tensor = lockstep.symmetric_empty((numel,), dtype=torch.float32, group=group)
    except SharedMemoryError as error:
        problem = str(error)
    if agree_on_maximum([float(tensor is None)])[0] > 0:
        return None, problem or "shared memory is too small on another rank"
    return tensor, ""


def _copiers(numel: int) -> Sequence[Contestant]:
    """One memcpy between two heap tensors, on rank 0 alone and on all ranks at once."""
    source, destination = torch.zeros(numel), torch.ones(numel)

    def copy() -> None:
        destination.copy_(source)

    def idle() -> None:
        pass

    alone: Callable[[], None] = copy if dist.get_rank() == 0 else idle
    return [Contestant("memcpy_one_rank", alone), Contestant("memcpy_all_ranks", copy)]
