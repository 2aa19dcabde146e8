"""Counts and lists images that cannot be read, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.agreement import collective_device

__all__ = ["BROKEN_LIST", "BrokenImages"]

BROKEN_LIST = "broken.txt"


class _Named(Protocol):
    def name(self, index: int) -> str: ...

    def __len__(self) -> int: ...


class BrokenImages:
    """The images that could not be read, over all ranks and epochs of this run.

    There is a flag per image, on the device of the labels, so that noting a batch does not wait for a GPU.

    Args:
        parts: images by part of the data, "train" or "val".
        device: device of the batches.
        enabled: whether broken images are left out; otherwise each is an error, and nothing is noted.
    """

    def __init__(self, parts: Mapping[str, _Named], device: torch.device, enabled: bool) -> None:
        self.parts = parts
        self._marks = {
            part: torch.zeros(len(images), dtype=torch.uint8, device=device)
            for part, images in (parts.items() if enabled else ())
        }
        self._folder: Path | None = None
        self._views: Sequence[Any] = ()
        self._num_said = 0

    def report_to(self, folder: Path, views: Sequence[Any]) -> None:
        """Write `broken.txt` to that folder, on the rank with views. Local."""
        self._folder, self._views = folder, views

    def note(self, part: str, indices: Tensor, labels: Tensor) -> None:
        """Note the broken images of a batch, which have labels below 0. Local."""
        marks = self._marks[part]
        labels = labels.to(marks.device)
        # A filler repeats an image and so its flag; the order of writes does not matter.
        marks[indices.to(marks.device)] = (labels < 0).to(torch.uint8)

    def collect(self) -> dict[str, float]:
        """Count them, and list them in `broken.txt`. Collective.

        Returns:
            "broken": the number over both parts; empty if broken images are errors.
        """
        names = []
        for part, marks in self._marks.items():
            together = marks.to(collective_device())
            dist.all_reduce(together, op=dist.ReduceOp.MAX)
            marks.copy_(together)
            names += [self.parts[part].name(index) for index in together.nonzero().flatten().tolist()]
        if len(names) > self._num_said and self._views and self._folder is not None:
            path = self._folder / BROKEN_LIST
            path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
            for view in self._views:
                view.say(f"{len(names)} image{'s' if len(names) > 1 else ''} could not be read: listed in {path}")
        self._num_said = len(names)
        return {"broken": len(names)} if self._marks else {}
