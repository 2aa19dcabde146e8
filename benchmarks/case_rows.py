"""Loading rows that cost microseconds, where what a loader adds to a batch weighs most.

Contestants are `torch`, `torch.utils.data.DataLoader`, and `lockstep`, `lockstep.DataLoader`, in one process and in the
same rounds, with the same data, batch size and shuffling, without workers. The data sets hold the same two tensors:

- `indexing`: a Python class that returns `x[i], y[i]`.
- `drawing`: the same class, which adds noise from torch's process-wide generator. Lockstep's loader seeds that for each
  sample; torch's does not.
- `tensors`: a `TensorDataset`. Lockstep's loader gathers a batch in one go.

One call is an epoch, in which every row must come once. The parameters are its data set and batch size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Result, Series

__all__ = ["FULL", "QUICK", "Plan", "run"]

_WIDTH = 32


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        rows: of an epoch.
        batch_sizes: of the loaders.
        budget: per data set and batch size.
    """

    rows: int
    batch_sizes: tuple[int, ...]
    budget: Budget


FULL = Plan(8192, (8, 64, 256), Budget(seconds=4.0, sample_s=0.05, min_rounds=5, max_rounds=40))
QUICK = Plan(64, (8,), Budget(seconds=0.3, sample_s=0.001, max_rounds=3, sweeps=1))


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan.

    Raises:
        RankFailed: the process that loads failed, for instance because an epoch lacked rows.
    """
    environment = Environment.read()
    timeout_s = 120 + 30 * len(plan.batch_sizes) * plan.budget.seconds
    answer = run_ranks(_measure_on_rank, 1, asdict(plan), threads=1, timeout_s=timeout_s)
    assert isinstance(answer, list)
    settings = {**asdict(plan), "dtype": "float32", "width": _WIDTH, "threads": 1}
    return Result("rows", quick, environment, settings, [Series(**item) for item in answer])


class _Rows(Dataset[Any]):
    def __init__(self, tensors: tuple[torch.Tensor, ...], draws: bool) -> None:
        self.x, self.y = tensors
        self.draws = draws

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        return (x + torch.randn(_WIDTH) if self.draws else x), self.y[index]


def _measure_on_rank(job: Job) -> object:
    """Body of the process that loads."""
    rows, batch_sizes, budget = job["rows"], job["batch_sizes"], job["budget"]
    assert isinstance(rows, int)
    assert isinstance(batch_sizes, list)
    assert isinstance(budget, dict)
    tensors = torch.randn(rows, _WIDTH), torch.arange(rows)
    data = {"indexing": _Rows(tensors, False), "drawing": _Rows(tensors, True), "tensors": TensorDataset(*tensors)}
    configurations = [
        Configuration({"data": name, "batch_size": size}, _contestants(dataset, size, rows))
        for name, dataset in data.items()
        for size in batch_sizes
    ]
    return [asdict(each) for each in measure(configurations, Budget(**budget))]


def _contestants(dataset: Dataset[Any], batch_size: int, rows: int) -> list[Contestant]:
    loaders: dict[str, DataLoader[Any]] = {
        "torch": DataLoader(dataset, batch_size, shuffle=True),
        "lockstep": lockstep.DataLoader(dataset, batch_size, shuffle=True),
    }
    return [
        Contestant(name, lambda name=name, loader=loader: _load(name, loader, rows))  # type: ignore[misc]
        for name, loader in loaders.items()
    ]


def _load(name: str, loader: DataLoader[Any], rows: int) -> None:
    """One epoch, in which every row must come once."""
    seen = torch.cat([numbers for _, numbers in loader])
    if not torch.equal(seen.sort().values, torch.arange(rows)):
        raise RuntimeError(f"{name}: an epoch of {rows} rows gave {len(seen)}, {len(seen.unique())} of them different")
