"""Amp's interface before `initialize`: `amp.init()` and its handle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.apex.amp._amp_state import AmpError
from lockstep.compat.apex.amp.casts import AmpHandle
from lockstep.compat.apex.amp.handle import scaled
from lockstep.compat.apex.amp.optimizers import process_optimizer
from lockstep.compat.apex.amp.scaler import LossScaler

__all__ = ["LegacyHandle", "NoOpHandle", "OptimWrapper", "init"]


class OptimWrapper:
    """An optimizer with separate scales for several losses, which have the same order in every step.

    Args:
        optimizer: the optimizer; other attributes are taken from it.
        handle: the handle from `amp.init`.
        num_loss: number of losses per step.
    """

    def __init__(self, optimizer: Any, handle: LegacyHandle | NoOpHandle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._handle = handle
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]
        self._next_loss = 0
        if handle.is_active():
            process_optimizer(optimizer, has_masters=False)

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """As `amp.scale_loss`, with the scale of this step's next loss."""
        if not self._handle.is_active():
            yield loss
            return
        if self._next_loss == len(self._loss_scaler):
            raise AmpError(
                f"more than num_loss={len(self._loss_scaler)} losses before step(): pass wrap_optimizer the number of "
                "losses per step"
            )
        index = self._next_loss
        with scaled(loss, [self._optimizer], self._loss_scaler[index], index) as scaled_loss:
            yield scaled_loss
        self._next_loss += 1

    def step(self, closure: Any = None) -> Any:
        """The optimizer's step, skipped after an overflow."""
        self._next_loss = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class LegacyHandle(AmpHandle):
    """Casts as at O1, with its own loss scale."""

    def __init__(self, loss_scale: float | str, verbose: bool, allow_banned: bool) -> None:
        super().__init__(torch.float16, verbose=verbose, allow_banned=allow_banned)
        self._default_scaler = LossScaler(loss_scale)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wrap the optimizer; the result has its own `scale_loss`."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """As `amp.scale_loss`."""
        if isinstance(optimizer, OptimWrapper):
            raise AmpError("this optimizer was wrapped by wrap_optimizer: use optimizer.scale_loss(loss)")
        if not self.is_active():
            yield loss
            return
        if not hasattr(optimizer, "_amp_stash"):
            process_optimizer(optimizer, has_masters=False)
        with scaled(loss, [optimizer], self._default_scaler) as scaled_loss:
            yield scaled_loss


class NoOpHandle:
    """Returned by `init(enabled=False)`: does nothing."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Never."""
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wrap the optimizer; the result's `scale_loss` does nothing."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """The unchanged loss."""
        yield loss

    def _clear_cache(self) -> None:
        """Does nothing, as there is no cache."""

    def _deactivate(self) -> None:
        """Does nothing."""


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> LegacyHandle | NoOpHandle:
    """Cast inputs of torch functions from now on, as O1 does; the interface before `initialize`. Local.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: a number, or "dynamic".
        enable_caching: ignored; see [Note: autocast] in `casts.py`.
        verbose: print the casts of decorated and registered functions.
        allow_banned: let `binary_cross_entropy` take 16-bit inputs.
    """
    del enable_caching
    if not enabled:
        return NoOpHandle()
    return LegacyHandle(loss_scale, verbose, allow_banned)
