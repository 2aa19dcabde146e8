"""Tells the user's sampler the epoch, unless the script does.

A script written for torch's loader calls `sampler.set_epoch(epoch)` itself, and may begin with another epoch than 0. To
notice that call, the method is replaced on that one sampler. An epoch set by the script holds for the next iteration;
before others, the loader sets its own. A loader without a sampler has an `OwnOrder` in its place, for programs that
call `loader.batch_sampler.sampler.set_epoch(epoch)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from lockstep.data.checks import check_integer
from lockstep.errors import DataError

__all__ = ["OwnOrder", "SamplerEpochs"]


class OwnOrder(Sampler[int]):
    """Stands for the sampler of a loader that orders its samples by itself. Only its epoch can be set."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader's next iteration, like the loader's own `set_epoch`.

        Raises:
            DataError: `epoch` is not an integer, or negative.
        """
        check_integer("epoch", epoch, 0)

    def __iter__(self) -> Iterator[int]:
        raise DataError(
            "loader.batch_sampler.sampler stands for the order that the loader creates when an epoch begins. Iterate "
            "the loader"
        )


class SamplerEpochs:
    """Replaces the `set_epoch` of one sampler; a class, so that the sampler can be copied.

    Args:
        tell: the original method; None for a sampler without epochs.

    Attributes:
        told: the epoch that the script has set since the last one began; None if it has not.
    """

    def __init__(self, tell: Callable[..., Any] | None) -> None:
        self._tell = tell
        self.told: int | None = None

    @classmethod
    def of(cls, *samplers: Any) -> SamplerEpochs:
        """Replace the method of the first sampler that has one. Local."""
        for sampler in samplers:
            known = getattr(sampler, "set_epoch", None)
            if isinstance(known, cls):
                return known
            if callable(known):
                epochs = cls(known)
                with contextlib.suppress(AttributeError, TypeError):  # it takes no attributes: then the loader tells it
                    sampler.set_epoch = epochs
                return epochs
        return cls(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The sampler's own method."""
        epoch: Any = next(iter((*args, *kwargs.values())), None)
        is_number = isinstance(epoch, int | np.integer) and not isinstance(epoch, bool)
        self.told = int(epoch) if is_number and epoch >= 0 else None
        assert self._tell is not None
        return self._tell(*args, **kwargs)

    def begin(self, epoch: int) -> None:
        """Set the epoch that begins now, unless the script has set one. Local."""
        if self._tell is not None and self.told is None:
            self._tell(epoch)
        self.told = None
