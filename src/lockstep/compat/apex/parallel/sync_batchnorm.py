"""Apex's `SyncBatchNorm`: Lockstep's, with options for channels last and a ReLU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.errors import InputError, NotInitialized

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(lockstep.SyncBatchNorm):
    """Batch normalization over the batches of all ranks of a group.

    Args:
        num_features: number of channels.
        eps: see `lockstep.SyncBatchNorm`.
        momentum: see `lockstep.SyncBatchNorm`.
        affine: see `lockstep.SyncBatchNorm`.
        track_running_stats: see `lockstep.SyncBatchNorm`.
        process_group: the ranks that share a batch; default all ranks.
        channel_last: whether channels are the last dimension of the input rather than the second.
        fuse_relu: whether to apply a ReLU to the output.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `input`; add `z`, of the same shape, if given; then the ReLU. Collective in training mode."""
        if self.channel_last and input.dim() > 2:
            output = super().forward(input.movedim(-1, 1)).movedim(1, -1)
        else:
            output = super().forward(input)
        if z is not None:
            output = output + z
        return torch.relu(output) if self.fuse_relu else output


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Replace every BatchNorm layer by a `SyncBatchNorm` with the same parameters and buffers.

    Args:
        module: a model, changed in place, or a BatchNorm layer.
        process_group: the ranks that share a batch; default all ranks.
        channel_last: see `SyncBatchNorm`.

    Returns:
        The module; a new one if it is itself a BatchNorm layer.

    Raises:
        ModelError: see `lockstep.convert_sync_batchnorm`.
    """
    before = set(module.modules())
    converted = lockstep.convert_sync_batchnorm(module, process_group)
    for layer in converted.modules():
        if isinstance(layer, lockstep.SyncBatchNorm) and layer not in before:
            layer.__class__ = SyncBatchNorm
            layer.channel_last, layer.fuse_relu = channel_last, False  # type: ignore[assignment]
    return converted


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Groups of neighbouring ranks that share batches. Collective: every rank calls it.

    Args:
        group_size: number of ranks per group; must divide the number of ranks. 0 means all ranks.

    Returns:
        This rank's group; None, which means all ranks, for 0.

    Raises:
        InputError: the number of ranks is not a multiple of `group_size`.
    """
    if group_size == 0:
        return None
    if not dist.is_initialized():
        raise NotInitialized("create_syncbn_process_group needs a process group: call init_process_group first")
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if not 0 < group_size <= world_size or world_size % group_size:
        raise InputError(f"create_syncbn_process_group({group_size}): there are {world_size} ranks; expected a divisor")
    own = None
    for first in range(0, world_size, group_size):
        group = dist.new_group(list(range(first, first + group_size)))
        if first <= rank < first + group_size:
            own = group
    return own
