"""What Amp knows in this process; the name under which scripts look into it (`amp._amp_state.loss_scalers`)."""

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
    """Amp was asked for something that does not go together. A RuntimeError, as Apex raises."""


class AmpValueError(AmpError, InputError):
    """A value that no opt level could use."""


class Options(Protocol):
    """What the state needs of `properties.Properties`, which stands above it: a value for each name."""

    options: dict[str, Any]

    def __getattr__(self, name: str) -> Any: ...


class Casts(Protocol):
    """What the state needs of `casts.AmpHandle`, which stands above it."""

    dtype: torch.dtype
    verbose: bool
    allow_banned: bool

    def is_active(self) -> bool:
        """Whether casts are in force, here and now."""

    def _clear_cache(self) -> None: ...

    def _deactivate(self) -> None: ...

    def _disable_casts(self) -> AbstractContextManager[None]: ...


class AmpState:
    """All that `initialize` sets up, for one process.

    Attributes:
        opt_properties: the options in force; None before `initialize`.
        loss_scalers: one for each loss that `initialize` was told of.
        handle: the casts of opt level O1, while they are in place.
        hard_override: warn where Amp would otherwise refuse a combination of options.
        allow_incoming_model_not_fp32: accept models that have 16-bit parameters already.
        verbosity: 0 says nothing, 1 says what was chosen and when a step is skipped, 2 every cast as well.
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
    """Refuse, or only warn if the user has set `_amp_state.hard_override`."""
    if not _amp_state.hard_override:
        raise AmpError(f"{message} (amp._amp_state.hard_override = True makes a warning of it)")
    say(f"Warning: {message}")


def say(message: str, only_first_rank: bool = False) -> None:
    """Print, unless `verbosity` is 0. On stdout, where Apex's users look for it."""
    if _amp_state.verbosity <= 0:
        return
    if only_first_rank and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    print(message)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that an optimizer updates: float32 masters where there are some, else the model's own.

    Clip these: `clip_grad_norm_(amp.master_params(optimizer), max_norm)`. Local.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
