"""Warns of batches with fewer rows than samples.

A collate function may leave out samples that could not be read (`[each for each in batch if each is not None]`). The
ranks go by the samples that they were to have, so a rank that lost some counts for more than it has.

A collate function that packs texts makes fewer rows, too, and loses nothing. One that puts all of them into one row of
tokens is known by that; of one that fills several rows nothing tells, so the warning says what those need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from lockstep.batch import BatchShare
from lockstep.data.source import name_of
from lockstep.log import get_logger, warn_once

__all__ = ["LostRows"]

_logger = get_logger(__name__)


class LostRows:
    """Looks at the batches of one loader, until it has warned.

    Args:
        collate_fn: of the loader.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._name = name_of(collate_fn)
        self._is_over = collate_fn is default_collate

    def look(self, batch: Any, share: BatchShare) -> None:
        """A batch of which this rank holds that share is yielded. Local."""
        if self._is_over or share.local_samples == 0 or not _has_lost(batch, share.local_samples):
            return
        self._is_over = True
        warn_once(
            _logger,
            f"collate_fn ({self._name}) made fewer rows than there were samples. A rank counts by the samples that it "
            "was to have, so if some were left out, others count for more. Leave them out of the dataset, or say how "
            "many the loss is the mean over: `with model.samples(n):`. If it packs several into a row, none is lost, "
            "and the loss is a mean over tokens: lockstep.mean(loss_sum, num_tokens)",
        )


def _has_lost(batch: Any, num_samples: int) -> bool:
    """Whether no part of a batch is as long as that, in any dimension, or longer in the first."""
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else (batch,)
    if isinstance(batch, (list, tuple)) and len(batch) >= num_samples:
        return False
    if all(_is_row_of_tokens(part, num_samples) for part in parts):
        return False
    sizes = list(map(_sizes_of, parts))
    return bool(sizes) and all(each and num_samples not in each and each[0] < num_samples for each in sizes)


def _is_row_of_tokens(part: Any, num_samples: int) -> bool:
    """Whether all samples may lie in it, one behind the other: ids, positions or masks, `[1, tokens]` or `[1, …]`."""
    if not isinstance(part, torch.Tensor) or part.is_nested or part.is_floating_point() or part.is_complex():
        return False
    return part.dim() > 1 and len(part) == 1 and part.numel() >= num_samples


def _sizes_of(part: Any) -> tuple[int, ...]:
    """Of a tensor, or the length of a list; empty for what nothing is known of."""
    if isinstance(part, torch.Tensor):
        return () if part.is_nested else tuple(part.shape)
    return (len(part),) if isinstance(part, (list, tuple)) else ()
