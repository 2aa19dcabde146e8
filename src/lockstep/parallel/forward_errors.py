"""What to write where batch normalization refuses the one sample that a rank holds of a batch."""

from __future__ import annotations

import torch.distributed as dist

from lockstep.batch import BatchShare
from lockstep.errors import InputError

__all__ = ["explain_forward_error"]

_ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's words


def explain_forward_error(error: ValueError, world_size: int, share: BatchShare | None) -> ValueError:
    """The error to raise in place of one that the model raised: with a remedy, or itself. Local.

    Args:
        error: what the forward pass raised.
        world_size: ranks of the engine.
        share: what this rank holds of the batch; None where nobody knows.
    """
    if world_size == 1 or _ONE_VALUE not in str(error):
        return error
    held = "few samples" if share is None else f"{share.local_samples} of the {share.global_samples} sample(s)"
    return InputError(
        f"rank {dist.get_rank()} had {held} of this batch, and batch normalization needs more than one value per "
        f"channel on each of the {world_size} ranks: {error}. Normalize over the batch of all ranks, with model = "
        "lockstep.convert_sync_batchnorm(model) before DistributedDataParallel(model), or leave small last batches out "
        "(drop_last=True in the loader)"
    )
