"""Communication hooks: their view of a bucket, and the buckets being reduced by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.errors import ModelError

__all__ = ["CommHook", "GradBucket", "HookedBuckets"]


@dataclass(eq=False)
class GradBucket:
    """One bucket of gradients on its way through a communication hook.

    Has the methods of `torch.distributed.GradBucket`, so that hooks written for torch's DDP
    (those of `torch.distributed.algorithms.ddp_comm_hooks` among them) work unchanged.
    """

    _index: int
    _buffer: torch.Tensor
    _gradients: list[torch.Tensor]
    _owners: list[torch.Tensor]
    _is_last: bool

    def index(self) -> int:
        """Its place in the order in which buckets are reduced."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All its gradients, flat and unscaled; a hook may reduce it in place."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, one for each parameter."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of these gradients, in the same order."""
        return self._owners

    def is_last(self) -> bool:
        """Whether no bucket follows in this backward pass."""
        return self._is_last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the buffer by another flat tensor of the same shape."""
        self._buffer = tensor


CommHook = Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]


@dataclass(eq=False)
class HookedBuckets:
    """The buckets that a hook, with its state, reduces in a backward pass. Local."""

    state: Any
    hook: CommHook
    num_buckets: int
    _futures: list[tuple[int, torch.futures.Future[torch.Tensor]]] = field(default_factory=list, init=False)

    def begin(
        self, bucket: int, buffer: torch.Tensor, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Pass the hook a bucket, see `GradBucket`; ModelError if it does not return a future."""
        is_last = bucket == self.num_buckets - 1
        future = self.hook(self.state, GradBucket(bucket, buffer, list(gradients), list(parameters), is_last))
        if not isinstance(future, torch.Future):  # the base class too: gloo's own futures
            raise ModelError(
                f"the communication hook returned {type(future).__name__}; expected a torch.futures.Future of the "
                "reduced flat tensor"
            )
        self._futures.append((bucket, future))

    def results(self) -> list[tuple[int, torch.Tensor]]:
        """The reduced buckets; waits for them."""
        found = []
        for bucket, future in self._futures:
            result: Any = future.wait()
            if isinstance(result, (list, tuple)):
                (result,) = result
            found.append((bucket, result))
        self._futures.clear()
        return found

    def abandon(self) -> None:
        """Wait for running reductions, and discard them."""
        for _, future in self._futures:
            with contextlib.suppress(RuntimeError):
                future.wait()
        self._futures.clear()
