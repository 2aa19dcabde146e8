"""SyncBatchNorm with Horovod's signature: Lockstep's, over all ranks."""

from __future__ import annotations

from lockstep.parallel import batchnorm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(batchnorm.SyncBatchNorm):
    """Batch normalization with the mean and variance of the batches of all ranks, on CPU and GPU.

    Horovod's supports GPU tensors only. See `lockstep.parallel.batchnorm.SyncBatchNorm`.

    Args:
        num_features: number of channels: size of dimension 1 of the input.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics; None averages over all batches.
        affine: whether to learn a scale and a shift per channel.
        track_running_stats: whether to keep running statistics, for use in evaluation mode.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
