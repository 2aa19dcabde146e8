"""Decoding and augmenting JPEGs: Lockstep's loader beside torch's, with the same worker processes.

Contestants are `torch`, `torch.utils.data.DataLoader`, and `lockstep`, `lockstep.DataLoader`, with the same dataset,
batch size, shuffling and workers, in one process and in the same rounds. The dataset reads a JPEG from a file, cuts a
part out of it at random, scales it to 224 pixels, flips every second one, and makes normalised float32 of it, as
everybody does for ImageNet. It draws from torch's process-wide generator, as torchvision does: Lockstep's loader seeds
that, numpy's and Python's before each sample, and torch's does not.

A worker process may be some percent faster than another one of the same loader, for as long as it lives: where its
memory lies is chance. So several processes measure in turns, each with loaders and workers of its own, and another
loader comes first in every second turn.

One call is an epoch, workers staying from one to the next. Before it is timed, an epoch must hold every image once,
and Lockstep's batches must be those that one process without workers makes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Parameters, Result, Series
from lockstep.recipes.imagenet.images import random_box, read_image
from lockstep.recipes.imagenet.shapes import ShapesFolder, write_shapes

__all__ = ["FULL", "QUICK", "Pictures", "Plan", "files_of", "run"]

_EDGE = 224  # of what the network gets, in pixels
_FILES = 64  # of one size; an epoch reads them several times
_MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
_STD = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        images: of an epoch, for each edge of the JPEGs in pixels.
        workers: numbers of worker processes.
        batch_size: of the loaders.
        budget: per size, number of workers and turn.
        turns: processes that measure, one after the other.
    """

    images: Mapping[int, int]
    workers: tuple[int, ...]
    batch_size: int
    budget: Budget
    turns: int


FULL = Plan(
    {256: 512, 500: 256},
    (0, 1, 2, 3, 4),
    16,
    Budget(seconds=6.0, sample_s=0.1, min_rounds=3, max_rounds=10, sweeps=1),
    turns=6,
)
QUICK = Plan({256: 32}, (0, 2), 8, Budget(seconds=1.0, sample_s=0.01, max_rounds=3, sweeps=1), turns=2)


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Draw the images of a plan and measure it.

    Raises:
        RankFailed: the process that loads failed, for instance because a batch was wrong.
    """
    environment = Environment.read()
    folder = Path(tempfile.mkdtemp(prefix="decode-"))
    try:
        for edge, images in plan.images.items():
            count = min(images, _FILES)
            write_shapes(ShapesFolder(folder / str(edge), classes=2, images=count, val_images=2, size=edge))
        size_bytes = {edge: _mean_bytes(folder / str(edge)) for edge in plan.images}
        job = {
            "folder": str(folder),
            "images": list(plan.images.items()),
            "workers": plan.workers,
            "batch_size": plan.batch_size,
            "budget": asdict(plan.budget),
        }
        configurations = len(plan.images) * len(plan.workers)
        timeout_s = 300 + 10 * configurations * (plan.budget.seconds + 5)
        series: dict[str, Series] = {}
        for turn in range(plan.turns):
            answer = run_ranks(_measure_on_rank, 1, {**job, "turn": turn}, threads=1, timeout_s=timeout_s)
            assert isinstance(answer, list)
            for one in (Series(**item) for item in answer):
                series.setdefault(f"{one.parameters} {one.contestant}", replace(one, samples_s=[])).samples_s.extend(
                    one.samples_s
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "batch_size": plan.batch_size,
        "edge": _EDGE,
        "dtype": "float32",
        "threads": 1,
        "jpeg_bytes": {str(edge): size for edge, size in size_bytes.items()},
        "budget": asdict(plan.budget),
        "turns": plan.turns,
    }
    return Result("decode", quick, environment, settings, list(series.values()))


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """JPEGs as a network is trained on them.

    Args:
        paths: of the files.
        length: samples; sample i is file i modulo the number of files.
    """

    def __init__(self, paths: list[Path], length: int) -> None:
        self.paths, self.length = paths, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """The image, float32 `(3, 224, 224)`, and its number."""
        generator = torch.default_generator
        picture = read_image(self.paths[index % len(self.paths)])
        flips = bool(torch.rand((), generator=generator) < 0.5)
        box = random_box(*picture.size, generator)
        square = picture.resize((_EDGE, _EDGE), Image.Resampling.BILINEAR, box=box)
        if flips:
            square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div_(255).sub_(_MEAN).div_(_STD), index


def _mean_bytes(folder: Path) -> int:
    sizes = [path.stat().st_size for path in files_of(folder)]
    return round(sum(sizes) / len(sizes))


def files_of(folder: Path) -> list[Path]:
    """The JPEGs to train on, in a folder that `write_shapes` has made."""
    return sorted((folder / "train").rglob("*.jpg"))


def _measure_on_rank(job: Job) -> object:
    """Body of the process that loads."""
    folder, images, workers = job["folder"], job["images"], job["workers"]
    batch_size, budget, turn = job["batch_size"], job["budget"], job["turn"]
    assert isinstance(folder, str)
    assert isinstance(images, list)
    assert isinstance(workers, list)
    assert isinstance(batch_size, int)
    assert isinstance(budget, dict)
    assert isinstance(turn, int)
    configurations = []
    for edge, length in images:
        pictures = Pictures(files_of(Path(folder) / str(edge)), length)
        for count in workers:
            _check_batches(pictures, batch_size, count)
            parameters: Parameters = {"pixels": edge, "workers": count}
            contestants = _contestants(pictures, batch_size, count, is_reversed=turn % 2 == 1)
            configurations.append(Configuration(parameters, contestants))
    lengths = dict(images)
    return [
        asdict(replace(each, facts={"images": lengths[each.parameters["pixels"]]}))
        for each in measure(configurations, Budget(**budget))
    ]


def _contestants(pictures: Pictures, batch_size: int, workers: int, is_reversed: bool) -> list[Contestant]:
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
    loaders: dict[str, DataLoader[Any]] = {
        "torch": DataLoader(pictures, batch_size, **options),
        "lockstep": lockstep.DataLoader(pictures, batch_size, **options),
    }
    contestants = [
        Contestant(name, lambda name=name, loader=loader: _load(name, loader, len(pictures)), warms_up=False)  # type: ignore[misc]
        for name, loader in loaders.items()
    ]
    return contestants[::-1] if is_reversed else contestants


def _load(name: str, loader: DataLoader[Any], expected: int) -> None:
    """One epoch, of which every image must come, once."""
    seen: list[int] = []
    for _, numbers in loader:
        seen += numbers.tolist()
    if sorted(seen) != list(range(expected)):
        raise RuntimeError(
            f"{name}: an epoch of {expected} images gave {len(seen)}, {len(set(seen))} of them different"
        )


def _check_batches(pictures: Pictures, batch_size: int, workers: int) -> None:
    """Whether Lockstep's first batches are the same with and without worker processes."""
    ours, plain = (
        list(islice(lockstep.DataLoader(pictures, batch_size, shuffle=True, num_workers=count), 2))
        for count in (workers, 0)
    )
    for one, other in zip(ours, plain, strict=True):
        if not all(map(torch.equal, one, other)):
            raise RuntimeError(f"lockstep: {workers} workers make other batches than one process does")
