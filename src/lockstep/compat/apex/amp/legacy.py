"""The interface that Amp had before `initialize`: `amp.init()` and its handle."""

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
    """An optimizer with a loss scale for each of several losses, which come in the same order in every step.

    Args:
        optimizer: the optimizer; anything that is not defined here is its own.
        handle: what `amp.init` returned.
        num_loss: how many losses there are in a step.
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
        """As `amp.scale_loss`, with the scale of the next loss of this step."""
        if not self._handle.is_active():
            yield loss
            return
        if self._next_loss == len(self._loss_scaler):
            raise AmpError(
                f"more than num_loss={len(self._loss_scaler)} losses before step(): give wrap_optimizer the number of "
                "losses of a step"
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
    """Casts as with O1, and a loss scale of its own."""

    def __init__(self, loss_scale: float | str, verbose: bool, allow_banned: bool) -> None:
        super().__init__(torch.float16, verbose=verbose, allow_banned=allow_banned)
        self._default_scaler = LossScaler(loss_scale)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """The optimizer, with a `scale_loss` of its own."""
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
    """What `init(enabled=False)` gives: everything as if Amp were not there."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Never."""
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """The optimizer, with a `scale_loss` that does nothing."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """The loss as it is."""
        yield loss

    def _clear_cache(self) -> None:
        """There is no cache."""

    def _deactivate(self) -> None:
        """There is nothing to put back."""


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> LegacyHandle | NoOpHandle:
    """Cast what goes into torch functions from now on, as O1 does; the interface before `initialize`. Local.

    Args:
        enabled: False gives a handle that does nothing.
        loss_scale: a number, or "dynamic".
        enable_caching: ignored; see [Note: autocast] in `casts.py`.
        verbose: print the casts of decorated and registered functions.
        allow_banned: let `binary_cross_entropy` take 16-bit inputs.
    """
    del enable_caching
    if not enabled:
        return NoOpHandle()
    return LegacyHandle(loss_scale, verbose, allow_banned)
