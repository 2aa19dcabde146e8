"""Lets torch's loaders draw by a rank's own stream before the first forward pass of an engine.

A loader draws the order of its samples and the seeds of its workers when it is iterated, which is before the first
forward pass ([Note: streams of ranks] in `seeding.py`). Drawn alike, an endless loader without a sampler for the ranks
would give all of them the same batches for ever. So the first iteration of a loader behind an engine moves the stream,
too; of ours as of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lockstep import seeding
from lockstep.torch_private.patching import wrap_once

__all__ = ["install"]


def _moving_stream(torchs_own: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    def iterate(loader: Any) -> Iterator[Any]:
        seeding.begin_torch_stream(trains=True)
        return torchs_own(loader)

    return iterate


def install() -> None:
    """Move torch's stream when a loader is iterated, if that is still to come. Local; may be called again."""
    wrap_once("torch.utils.data.DataLoader.__iter__", _moving_stream)
