"""all_reduce beside programs that compute, and what ranks that wait take from the one that computes.

Beside 0, 1, 2 and 4 busy processes on this host, as the workers of a data loader are, contestants are `gloo` and
`lockstep`: `dist.all_reduce` of a float32 tensor, synchronous, with SUM, checked once before it is timed. With 16 ranks
and more a sample is of many calls: ranks that share two cores leave the barrier in front one after the other, and in a
sample of one to four calls that is most of the time, whoever is measured.

Then, without neighbours, rank 0 computes for a second of its own CPU time while all others wait for it, in `barrier` or
in `recv`. Of each such round there are two samples: under `measure: work` how long the second took, under
`measure: waiter` the CPU seconds that a waiting rank spent for each second of it, on the average of these ranks. There
each contestant has jobs of its own, in turns, whose only group is its own: a gloo group that nobody uses still has a
thread that wakes a hundred times a second, and the waiting ranks would be charged for it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

import lockstep.comm.backend  # noqa: F401  registers the backend
from benchmarks.case_all_reduce import all_reduce_of
from lockstep.bench.harness import Budget, Configuration, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Parameters, Result, Series

__all__ = ["FULL", "QUICK", "Plan", "run"]

KIB, MIB = 1024, 1024 * 1024
# Ends with the rank that started it, however that happens.
_NEIGHBOUR = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10000))"
_WAITS = ("barrier", "recv")
_MANY_RANKS = 16


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        sizes_bytes: for each world size the sizes of the tensor; multiples of 4.
        neighbours: for each world size the numbers of busy processes beside it.
        budget: per world size, size and number of neighbours.
        budget_of_many: the same for 16 ranks and more.
        work_s: CPU time of rank 0 while the others wait.
        work_rounds: for each world size how often in each job; absent for never.
        turns: jobs of each contestant.
    """

    sizes_bytes: Mapping[int, tuple[int, ...]]
    neighbours: Mapping[int, tuple[int, ...]]
    budget: Budget
    work_s: float
    work_rounds: Mapping[int, int]
    turns: int = 2
    budget_of_many: Budget | None = None

    def budget_of(self, world_size: int) -> Budget:
        """The budget for so many ranks."""
        return self.budget if world_size < _MANY_RANKS or self.budget_of_many is None else self.budget_of_many


_BACKENDS = ("gloo", "lockstep")
_SIZES = (4, 64 * KIB, MIB, 25 * MIB)
_NEIGHBOURS = (0, 1, 2, 4)
FULL = Plan(
    {2: _SIZES, 4: _SIZES, 8: (4, MIB), 16: (4,), 32: (4,)},
    {2: _NEIGHBOURS, 4: _NEIGHBOURS, 8: (0, 2), 16: (0, 2), 32: (0, 2)},
    Budget(seconds=2.4, sample_s=0.02, sweeps=2, min_rounds=4, max_rounds=40),
    1.0,
    {8: 2, 16: 2, 32: 2},
    turns=4,
    budget_of_many=Budget(seconds=8.0, sample_s=0.3, sweeps=1, min_rounds=8, max_rounds=16),
)
QUICK = Plan({2: (4, MIB)}, {2: (0, 2)}, Budget(seconds=0.5, sample_s=0.004, max_rounds=8, sweeps=1), 0.2, {2: 2})


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan. Starts the ranks of each world size once, and those that wait once for each turn.

    Raises:
        RankFailed: a rank failed, for instance because a sum was wrong.
    """
    environment = Environment.read()
    series: list[Series] = []
    for world_size, sizes_bytes in plan.sizes_bytes.items():
        job = {
            "sizes_bytes": sizes_bytes,
            "neighbours": plan.neighbours[world_size],
            "budget": asdict(plan.budget_of(world_size)),
        }
        num_configurations = len(sizes_bytes) * len(plan.neighbours[world_size])
        timeout_s = 300 + 10 * num_configurations * (plan.budget_of(world_size).seconds + 5)
        answer = run_ranks(_measure_on_rank, world_size, job, threads=1, timeout_s=timeout_s)
        assert isinstance(answer, list)
        series += [Series(**item) for item in answer]
    for world_size, rounds in plan.work_rounds.items():
        series += _measure_waits(world_size, rounds, plan.turns, plan.work_s)
    settings = {
        "dtype": "float32",
        "op": "SUM",
        "threads_per_rank": 1,
        "budget": asdict(plan.budget),
        "budget_of_many": None if plan.budget_of_many is None else asdict(plan.budget_of_many),
        "work_s": plan.work_s,
        "turns": plan.turns,
    }
    return Result("contention", quick, environment, settings, series)


def _measure_on_rank(job: Job) -> object:
    """Body of one rank: all_reduce beside neighbours."""
    sizes, neighbours, budget = job["sizes_bytes"], job["neighbours"], job["budget"]
    assert isinstance(sizes, list)
    assert isinstance(neighbours, list)
    assert isinstance(budget, dict)
    groups = {backend: dist.new_group(backend=backend) for backend in _BACKENDS}
    world_size = dist.get_world_size()
    series: list[Series] = []
    for count in neighbours:
        configurations = []
        for size in sizes:
            contestants = [all_reduce_of(name, torch.empty(size // 4), group) for name, group in groups.items()]
            parameters: Parameters = {"world_size": world_size, "bytes": size, "neighbours": count}
            configurations.append(Configuration(parameters, contestants))
        with _busy_neighbours(count if dist.get_rank() == 0 else 0):
            series += measure(configurations, Budget(**budget))
    return [asdict(item) for item in series]


@contextmanager
def _busy_neighbours(count: int) -> Iterator[None]:
    """So many processes of this host compute meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", _NEIGHBOUR]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _measure_waits(world_size: int, rounds: int, turns: int, work_s: float) -> list[Series]:
    """What waiting ranks take: in each turn one job of each contestant, which holds no group of the other."""
    samples: dict[tuple[str, str, str], list[float]] = {
        (wait, what, name): [] for wait in _WAITS for what in ("work", "waiter") for name in _BACKENDS
    }
    for turn in range(turns):
        for name in _BACKENDS:
            job = {"work_s": work_s, "rounds": rounds}
            timeout_s = 300 + 20 * world_size + 20 * len(_WAITS) * rounds * (work_s + 1)
            answer = run_ranks(_wait_on_rank, world_size, job, threads=1, timeout_s=timeout_s, backend=name)
            assert isinstance(answer, list)
            for wait, took, spent in answer:
                samples[wait, "work", name].append(took)
                samples[wait, "waiter", name].append(spent)
            shares = ", ".join(f"{wait} {spent:.2%}" for wait, _, spent in answer)
            print(f"  {world_size} ranks of {name} wait, turn {turn + 1}: {shares} of a core", file=sys.stderr)
    return [
        Series({"world_size": world_size, "wait": wait, "measure": what}, name, 1, values)
        for (wait, what, name), values in samples.items()
    ]


def _wait_on_rank(job: Job) -> object:
    """Body of one rank: rank 0 computes, the others wait for it, in each way, so many rounds.

    Returns:
        Of each round how the ranks waited, and what `_wait_once` returns.
    """
    work_s, rounds = job["work_s"], job["rounds"]
    assert isinstance(work_s, float)
    assert isinstance(rounds, int)
    found: list[tuple[str, float, float]] = []
    for wait in _WAITS:
        meet = dist.barrier if wait == "barrier" else _message
        for _ in range(rounds):
            meet()  # lines them up, and makes the connections
            dist.barrier()
            found.append((wait, *_wait_once(meet, work_s)))
    return found


def _wait_once(meet: Callable[[], object], work_s: float) -> tuple[float, float]:
    """Wall seconds of rank 0's work, and CPU seconds of a waiter for each of them. Collective."""
    start, cpu_start = time.perf_counter(), time.process_time()
    if dist.get_rank() == 0:
        while time.process_time() - cpu_start < work_s:
            sum(range(1000))
    seconds = time.perf_counter() - start
    meet()
    is_waiter = dist.get_rank() != 0
    values = [0.0 if is_waiter else seconds, (time.process_time() - cpu_start) * is_waiter]
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals)
    took, cpu = totals.tolist()
    return took, cpu / max(dist.get_world_size() - 1, 1) / took


def _message() -> None:
    """All others wait for a message of rank 0."""
    tensor = torch.zeros(1)
    if dist.get_rank() != 0:
        dist.recv(tensor, 0)
        return
    for peer in range(1, dist.get_world_size()):
        dist.send(tensor, peer)
