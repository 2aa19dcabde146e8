"""What a communication hook gets to see of a bucket: the methods of torch's `GradBucket`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["GradBucket"]


class GradBucket:
    """One bucket of gradients on its way through a communication hook.

    Has the methods of `torch.distributed.GradBucket`, so that hooks written for torch's DDP
    (those of `torch.distributed.algorithms.ddp_comm_hooks` among them) work unchanged.

    Args:
        index: of the bucket, in the order in which buckets are reduced.
        buffer: flat tensor with all gradients of the bucket, unscaled.
        gradients: views of the buffer, one per parameter.
        parameters: the parameters, in the same order.
        is_last: whether no bucket follows in this backward pass.
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """Position of the bucket among all buckets."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The flat tensor of all gradients; a hook may reduce it in place."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """One view of the buffer for each parameter."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients the bucket holds."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward pass."""
        return self._is_last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the flat tensor by another of the same size."""
        self._buffer = tensor
