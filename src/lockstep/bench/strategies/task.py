"""The task: model and data of a recipe, the same for every way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, SubsetRandomSampler

import lockstep
from lockstep.recipes.digits.task import DigitsNet, load_digits

__all__ = ["LISTINGS", "WHOLE", "Limit", "Task", "build_task"]

LISTINGS = ".listings"
_EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Limit:
    """Limits the length of an epoch.

    Attributes:
        steps: number of steps; None for all.
        seconds: time limit, for one process only, because clocks of ranks differ; None for no limit.
    """

    steps: int | None = None
    seconds: float | None = None

    def is_reached(self, steps: int, began_s: float) -> bool:
        """Whether to end the epoch. Local.

        Args:
            steps: number of steps done.
            began_s: start of the first step, by `time.monotonic`.
        """
        return steps == self.steps or (self.seconds is not None and time.monotonic() - began_s > self.seconds)


WHOLE = Limit()


@dataclass(frozen=True)
class Task:
    """A model, its data, and the conversion of data to the model's input.

    Attributes:
        make_model: creates a model with the same initial weights on every rank, on the CPU, in `dtype`.
        train_set: training set; samples are tuples that start with image and label.
        held_out: evaluation set; likewise.
        batch_size: global batch size.
        lr: learning rate of SGD.
        momentum: momentum of SGD.
        dtype: dtype of the model and its input.
        workers: loader processes per rank.
        seed: seed of the order and the augmentation of samples.
        as_input: converts a batch of images on the device to the model's input.
    """

    make_model: Callable[[], nn.Module]
    train_set: Dataset[Any]
    held_out: Dataset[Any]
    batch_size: int
    lr: float
    momentum: float
    dtype: torch.dtype
    workers: int
    seed: int
    as_input: Callable[[Tensor, torch.dtype], Tensor]

    def loader(self, rank: int, world_size: int, device: torch.device) -> lockstep.DataLoader[Any]:
        """A loader of this rank's part of each global training batch. Drops a partial last batch."""
        return self._loader(device, batch_size=self.batch_size, shuffle=True, rank=rank, world_size=world_size)

    def loader_alone(self, rank: int, world_size: int, device: torch.device) -> lockstep.DataLoader[Any]:
        """A loader with as many batches, each as large as this rank's part, for training without communication.

        To the loader, the rank is a single process; otherwise it would warn that gradients are not averaged.
        """
        share = max(1, self.batch_size // world_size + (rank < self.batch_size % world_size))
        steps = len(self.train_set) // self.batch_size  # type: ignore[arg-type]
        order = SubsetRandomSampler(range(steps * share))
        return self._loader(device, batch_size=share, sampler=order, rank=0, world_size=1)

    def _loader(self, device: torch.device, **arguments: Any) -> lockstep.DataLoader[Any]:
        return lockstep.DataLoader(
            self.train_set,
            seed=self.seed,
            drop_last=True,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            seed_global_rng=False,
            device=device if device.type == "cuda" else None,
            **arguments,
        )

    def evaluate(self, module: nn.Module, device: torch.device, limit: Limit = WHOLE) -> dict[str, float]:
        """Mean loss and accuracy over the held-out samples, in this process only.

        Returns:
            "loss", "accuracy", "images" (their number) and "steps" (the number of batches).
        """
        loader = lockstep.DataLoader(
            self.held_out, batch_size=_EVALUATION_BATCH, evaluation=True, seed_global_rng=False, rank=0, world_size=1
        )
        module.eval()
        loss, correct, count, number, began_s = 0.0, 0, 0, 0, time.monotonic()
        with torch.no_grad():
            for number, (images, labels, *_) in enumerate(loader, start=1):
                labels = labels.to(device)
                logits = module(self.as_input(images.to(device), self.dtype))
                loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
                correct += int((logits.argmax(1) == labels).sum())
                count += len(labels)
                if limit.is_reached(number, began_s):
                    break
        module.train()
        return {"loss": loss / count, "accuracy": correct / count, "images": float(count), "steps": float(number)}


def build_task(given: Mapping[str, Any]) -> Task:
    """Create the task of a run. Local; must be called before the process joins a group.

    Args:
        given: "recipe", "dtype", "batch_size", "images" (0 for all), "seed", "workers"; for imagenet also "data",
            "arch", "size" and "kept_in".
    """
    dtype: torch.dtype = getattr(torch, given["dtype"])
    train: Dataset[Any]
    held_out: Dataset[Any]
    make: Callable[[], nn.Module]
    if given["recipe"] == "digits":
        train, held_out = load_digits(dtype)
        make, lr, as_input = DigitsNet, 0.02, _as_is
    else:
        from lockstep.recipes.imagenet.images import FolderImages, normalize  # needs Pillow, unlike digits
        from lockstep.recipes.imagenet.listing import list_part
        from lockstep.recipes.imagenet.models import create_model

        folder, kept_in = Path(given["data"]), Path(given["kept_in"])
        listings = {part: list_part(folder, part, kept_in) for part in ("train", "val")}
        train = FolderImages(listings["train"], given["size"], augment=True)
        held_out = FolderImages(listings["val"], given["size"], augment=False)
        arch, num_classes = given["arch"], len(listings["train"].classes)
        make, lr, as_input = (lambda: create_model(arch, num_classes)), 0.05, normalize
    if given["images"]:
        train = Subset(train, range(min(given["images"], len(train))))

    def make_model() -> nn.Module:
        torch.manual_seed(given["seed"])  # type: ignore[no-untyped-call, unused-ignore]
        return make().to(dtype)

    return Task(
        make_model, train, held_out, given["batch_size"], lr, 0.9, dtype, given["workers"], given["seed"], as_input
    )


def _as_is(images: Tensor, dtype: torch.dtype) -> Tensor:
    return images
