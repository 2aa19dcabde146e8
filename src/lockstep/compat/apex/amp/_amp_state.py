"""Amp's state in this process, under the name by which scripts read it (`amp._amp_state.loss_scalers`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.compat.apex.amp.scaler import LossScaler
from lockstep.errors import InputError, LockstepError

__all__ = ["AmpError", "AmpState", "AmpValueError", "Casts", "Options", "master_params", "say", "warn_or_raise"]


class AmpError(LockstepError):
    """Wrong use of Amp, such as incompatible options. A RuntimeError, as in Apex."""


class AmpValueError(AmpError, InputError):
    """A value that is invalid at every opt level."""


class Options(Protocol):
    """The part of `properties.Properties`, in a higher layer, that the state uses: a value for each name."""

    options: dict[str, Any]

    def __getattr__(self, name: str) -> Any: ...


class Casts(Protocol):
    """The part of `casts.AmpHandle`, in a higher layer, that the state uses."""

    dtype: torch.dtype
    verbose: bool
    allow_banned: bool

    def is_active(self) -> bool:
        """Whether casts are active now."""

    def _clear_cache(self) -> None: ...

    def _deactivate(self) -> None: ...

    def _disable_casts(self) -> AbstractContextManager[None]: ...


class AmpState:
    """Everything that `initialize` sets up in a process.

    Attributes:
        opt_properties: the current options; None before `initialize`.
        loss_scalers: one per loss (`num_losses` of `initialize`).
        handle: the casts of opt level O1, while they are installed.
        hard_override: warn instead of raising when options are incompatible.
        allow_incoming_model_not_fp32: accept models that already have 16-bit parameters.
        verbosity: 0 prints nothing, 1 the options and skipped steps, 2 also every cast.
    """

    def __init__(self) -> None:
        self.opt_properties: Options | None = None
        self.loss_scalers: list[LossScaler] = []
        self.handle: Casts | None = None
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1


_amp_state = AmpState()


def warn_or_raise(message: str) -> None:
    """Raise an AmpError, or only warn if the user has set `_amp_state.hard_override`."""
    if not _amp_state.hard_override:
        raise AmpError(f"{message} (amp._amp_state.hard_override = True turns this into a warning)")
    say(f"Warning: {message}")


def say(message: str, only_first_rank: bool = False) -> None:
    """Print to stdout, as Apex does, unless `verbosity` is 0."""
    if _amp_state.verbosity <= 0:
        return
    if only_first_rank and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    print(message)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that an optimizer updates: float32 masters if there are any, otherwise the model's.

    Clip these: `clip_grad_norm_(amp.master_params(optimizer), max_norm)`. Local.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
