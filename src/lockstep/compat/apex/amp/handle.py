"""`scale_loss`: a backward pass with a scaled loss, whose gradients are unscaled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.apex.amp._amp_state import AmpError, AmpValueError, _amp_state
from lockstep.compat.apex.amp.casts import casts_off
from lockstep.compat.apex.amp.scaler import LossScaler

__all__ = ["scale_loss", "scaled"]


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scale a loss for its backward pass, and unscale the gradients when the block ends.

    ::

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    If a gradient is not finite, the scale is halved and the next `optimizer.step()` is skipped. With master weights,
    the masters (`amp.master_params`) have the unscaled gradients; those of the model stay scaled.
    Local; with an engine, its backward pass is collective, and an overflow on one rank is averaged into all.

    Args:
        loss: a tensor; converted to float32 first if it has 16 bits.
        optimizers: the optimizer, or list of optimizers, of parameters that the loss depends on.
        loss_id: index of the loss scaler, below `num_losses`.
        model: ignored, as in Apex.
        delay_unscale: leave gradients scaled, to be unscaled by a later block without it. For gradients that
            accumulate over several passes, in particular if only the last averages over ranks.
        delay_overflow_check: do not check that gradients are finite.

    Raises:
        AmpError: `initialize` was not called, or not with this optimizer.
        AmpValueError: there is no such `loss_id`.
    """
    del model
    properties = _amp_state.opt_properties
    if properties is None:
        raise AmpError(
            "amp.scale_loss before amp.initialize: call model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=...) first"
        )
    if not properties.enabled:
        yield loss
        return
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise AmpValueError(
            f"loss_id={loss_id}: amp.initialize was called with num_losses={len(_amp_state.loss_scalers)}, so loss_id "
            f"is at most {len(_amp_state.loss_scalers) - 1}"
        )
    scaler = _amp_state.loss_scalers[loss_id]
    if not properties.master_weights and not scaler.dynamic and scaler.loss_scale() == 1.0:
        with casts_off():
            yield _widened(loss)
        return
    chosen = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    with scaled(loss, chosen, scaler, loss_id, delay_unscale, delay_overflow_check) as scaled_loss:
        yield scaled_loss


@contextmanager
def scaled(
    loss: Tensor,
    optimizers: Sequence[Any],
    scaler: LossScaler,
    loss_id: int = 0,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """`scale_loss` with a given scaler."""
    stashes = _stashes_of(optimizers)
    prepared = []
    for stash in stashes:
        if delay_unscale:
            stash.init_masters()
        elif not stash.params_have_scaled_gradients:
            stash.prepare()
            prepared.append(stash)
    with _undone_by_an_error(prepared), casts_off():
        yield _widened(loss) * scaler.loss_scale()
    if delay_unscale:
        for stash in stashes:
            stash.params_have_scaled_gradients = True
        return
    scaler.clear_overflow_state()
    with torch.no_grad():
        for stash in stashes:
            stash.finish(scaler)
            stash.params_have_scaled_gradients = False
    if not delay_overflow_check and scaler.update_scale():
        for stash in stashes:
            stash.skipped_by = stash.skipped_by or (loss_id, scaler)


def _stashes_of(optimizers: Sequence[Any]) -> list[Any]:
    """The `_amp_stash` of each optimizer."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "_amp_stash"):
            raise AmpError(
                f"amp.scale_loss: this {type(optimizer).__name__} was not passed to amp.initialize. Pass it there, "
                "and use what that returns"
            )
    return [optimizer._amp_stash for optimizer in optimizers]


@contextmanager
def _undone_by_an_error(prepared: Sequence[Any]) -> Iterator[None]:
    """Restore the gradients that `prepare` has removed if an error, such as out of memory, occurs inside."""
    try:
        yield
    except BaseException:
        for stash in prepared:
            stash.undo()
        raise


def _widened(loss: Tensor) -> Tensor:
    return loss.float() if loss.element_size() < 4 else loss
