"""An epoch of training whose batches come from worker processes, 2 ranks with 1 thread each.

Workers compute beside the ranks, on the same cores, while these average gradients. Contestants, in one set of
processes and in the same rounds:

- `torch`: `torch.utils.data.DataLoader` with a `DistributedSampler`, and torch's DDP on a gloo group.
- `lockstep`: `lockstep.DataLoader`, and `lockstep.DistributedDataParallel` on the lockstep group.

The data are those of `decode`: JPEGs that are read, cut, scaled and normalised. The model is the convolutional network
of `train_step`, on pictures of 32 x 32 pixels that it makes of them. One call is an epoch; workers stay from one to the
next. In every epoch every image must come once.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import lockstep
import lockstep.comm.backend  # registers the backend
from benchmarks.case_decode import Pictures, files_of
from benchmarks.case_train_step import LEARNING_RATE, MOMENTUM, NUM_CLASSES, build_model
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Parameters, Result, Series
from lockstep.recipes.imagenet.shapes import ShapesFolder, write_shapes

__all__ = ["FULL", "QUICK", "Plan", "run"]

_PIXELS = 256  # the edge of the JPEGs
_FILES = 64
_POOLED = 7  # 224 pixels become 32


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        images: of an epoch, over all ranks.
        batch_size: over all ranks.
        workers: numbers of worker processes of each rank.
        world_size: number of ranks.
        model: a name out of `case_train_step.MODELS`, for pictures.
        budget: per number of workers.
    """

    images: int
    batch_size: int
    workers: tuple[int, ...]
    world_size: int
    model: str
    budget: Budget


_EPOCHS = Budget(seconds=60, sample_s=0.1, min_rounds=8, max_rounds=16, sweeps=1)
FULL = Plan(256, 16, (0, 1, 2), 2, "cnn_5m", _EPOCHS)
QUICK = Plan(16, 8, (0, 1), 2, "cnn_5m", Budget(seconds=1, sample_s=0.01, max_rounds=2, sweeps=1))


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Draw the images of a plan and measure it.

    Raises:
        RankFailed: a rank failed, for instance because an epoch lacked images.
    """
    environment = Environment.read()
    folder = Path(tempfile.mkdtemp(prefix="epoch-"))
    job = {**asdict(plan), "folder": str(folder)}
    try:
        write_shapes(ShapesFolder(folder, classes=2, images=min(plan.images, _FILES), val_images=2, size=_PIXELS))
        timeout_s = 300 + 10 * len(plan.workers) * (plan.budget.seconds + 15)
        answer = run_ranks(_measure_on_rank, plan.world_size, job, threads=1, timeout_s=timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert isinstance(answer, list)
    settings = {**asdict(plan), "pixels": _PIXELS, "threads_per_rank": 1}
    return Result("epoch", quick, environment, settings, [Series(**item) for item in answer])


def _measure_on_rank(job: Job) -> object:
    """Body of one rank."""
    folder, budget, model, workers = job["folder"], job["budget"], job["model"], job["workers"]
    images, batch_size = job["images"], job["batch_size"]
    assert isinstance(folder, str)
    assert isinstance(budget, dict)
    assert isinstance(model, str)
    assert isinstance(workers, list)
    assert isinstance(images, int)
    assert isinstance(batch_size, int)
    pictures = Pictures(files_of(Path(folder)), images)
    groups = {backend: dist.new_group(backend=backend) for backend in ("gloo", "lockstep")}
    series: list[Series] = []
    for count in workers:
        torch.manual_seed(0)  # the same weights on all ranks and for both contestants
        original = nn.Sequential(nn.AvgPool2d(_POOLED), build_model(model))
        options: dict[str, Any] = {"num_workers": count, "persistent_workers": count > 0}
        calls = {
            "torch": _torchs(original, pictures, batch_size, groups["gloo"], options),
            "lockstep": _locksteps(original, pictures, batch_size, groups["lockstep"], options),
        }
        parameters: Parameters = {"workers": count}
        contestants = [Contestant(name, call, warms_up=False) for name, call in calls.items()]
        series += measure([Configuration(parameters, contestants)], Budget(**budget))
    return [asdict(item) for item in series]


def _torchs(
    original: nn.Module, pictures: Pictures, batch_size: int, group: dist.ProcessGroup, options: dict[str, Any]
) -> Callable[[], None]:
    """An epoch in torch's way."""
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(original), process_group=group)
    sampler: DistributedSampler[Any] = DistributedSampler(pictures, shuffle=True)
    share = batch_size // dist.get_world_size()
    loader: DataLoader[Any] = DataLoader(pictures, share, sampler=sampler, **options)
    epoch = _epoch("torch", model, loader, len(pictures))
    numbers = itertools.count()

    def call() -> None:
        sampler.set_epoch(next(numbers))
        epoch()

    return call


def _locksteps(
    original: nn.Module, pictures: Pictures, batch_size: int, group: dist.ProcessGroup, options: dict[str, Any]
) -> Callable[[], None]:
    """An epoch in ours."""
    model = lockstep.DistributedDataParallel(copy.deepcopy(original), process_group=group)
    loader = lockstep.DataLoader(pictures, batch_size, shuffle=True, **options)
    return _epoch("lockstep", model, loader, len(pictures))


def _epoch(name: str, model: nn.Module, loader: DataLoader[Any], images: int) -> Callable[[], None]:
    """Train on everything that the loader yields. Collective."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)

    def call() -> None:
        seen = torch.zeros(1, dtype=torch.int64)
        for pictures, numbers in loader:
            optimizer.zero_grad()
            cross_entropy(model(pictures), numbers % NUM_CLASSES).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen += len(numbers)
        dist.all_reduce(seen)  # over the harness's own group
        if int(seen) != images:
            raise RuntimeError(f"{name}: an epoch of {images} images gave {int(seen)}")

    return call
