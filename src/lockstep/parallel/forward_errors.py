"""What can be wrong with a model's forward pass where a batch is split, and what to do about it."""

from __future__ import annotations

import re

import torch.distributed as dist

from lockstep.batch import BatchShare
from lockstep.errors import InputError
from lockstep.log import get_logger, warn_once

__all__ = ["explain_forward_error", "warn_of_no_tensor"]

_logger = get_logger(__name__)

# What torch's batch normalization says of a batch with one value for each channel, and the size that it got.
_ONE_VALUE = re.compile(r"Expected more than 1 value per channel when training, got input size torch\.Size\(\[(\d+)")


def explain_forward_error(error: Exception, world_size: int, share: BatchShare | None) -> Exception | None:
    """The error to raise in place of one that the model raised, from it. Local.

    Args:
        error: what the forward pass raised.
        world_size: ranks of the engine.
        share: what this rank holds of the batch; None where nobody knows.

    Returns:
        An `InputError`, which is a ValueError as torch's is, or None where there is nothing to add.
    """
    found = _ONE_VALUE.search(str(error)) if isinstance(error, ValueError) and world_size > 1 else None
    if found is None:
        return None
    return InputError(
        f"{_describe_rank()} had {_describe_samples(int(found[1]), share)}, and batch normalization needs more than "
        f"one value per channel on each of the {world_size} ranks: {error}. Normalize over the batch of all ranks, "
        "with model = lockstep.convert_sync_batchnorm(model) before DistributedDataParallel(model), or leave small "
        "last batches out (drop_last=True in the loader)"
    )


def warn_of_no_tensor(kind: str) -> None:
    """The model returned something without a tensor to watch, of a batch that the ranks do not divide. Local.

    Args:
        kind: of what it returned.
    """
    warn_once(
        _logger,
        f"the model returned no tensor that requires a gradient (it returned {kind}). Should its parameters get "
        "gradients in another way, these are averaged plainly over ranks, although the ranks hold different numbers of "
        "samples. Return tensors, or containers of tensors",
    )


def _describe_rank() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"


def _describe_samples(count: int, share: BatchShare | None) -> str:
    """`1 sample of this batch`: what the model was given, and which part of the global batch that is."""
    if share is None:
        return f"{count} sample(s) in this batch"
    if share.local_samples == 0:
        return f"none of the {share.global_samples} sample(s) of this batch, but a filler"
    return f"{share.local_samples} of the {share.global_samples} sample(s) of this batch"
