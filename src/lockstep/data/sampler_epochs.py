"""Which epoch a sampler of the user's is in: the loader tells it, unless the script has.

A script that was written for torch's loader calls `sampler.set_epoch(epoch)` itself, and may begin with another epoch
than 0. So that its call is seen, the method is replaced on that one sampler. What the script has told counts for the
next iteration; for one without such a call the loader tells the sampler its own epoch. A loader without a sampler has
an `OwnOrder` in its place, for programs that say `loader.batch_sampler.sampler.set_epoch(epoch)`.
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
    """Stands for the sampler of a loader that orders its samples by itself. It is told epochs, and gives nothing."""

    def set_epoch(self, epoch: int) -> None:
        """The next iteration of the loader runs this epoch, as by the loader's own `set_epoch`.

        Raises:
            DataError: `epoch` is no integer, or negative.
        """
        check_integer("epoch", epoch, 0)

    def __iter__(self) -> Iterator[int]:
        raise DataError(
            "loader.batch_sampler.sampler stands for the order that the loader creates when an epoch begins. Iterate "
            "the loader"
        )


class SamplerEpochs:
    """Stands for the `set_epoch` of one sampler; a class, so that the sampler can be copied.

    Args:
        tell: the method as it was, which makes no note; None for a sampler that has no epochs.

    Attributes:
        told: the epoch that the script has told the sampler since the last one began; None if it has not.
    """

    def __init__(self, tell: Callable[..., Any] | None) -> None:
        self._tell = tell
        self.told: int | None = None

    @classmethod
    def of(cls, *samplers: Any) -> SamplerEpochs:
        """Those of the first that has any, of which from now on is noted what it is told. Local."""
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
        """As the sampler's own."""
        epoch: Any = next(iter((*args, *kwargs.values())), None)
        is_number = isinstance(epoch, int | np.integer) and not isinstance(epoch, bool)
        self.told = int(epoch) if is_number and epoch >= 0 else None
        assert self._tell is not None
        return self._tell(*args, **kwargs)

    def begin(self, epoch: int) -> None:
        """An epoch begins: tell the sampler, unless the script just has. Local."""
        if self._tell is not None and self.told is None:
            self._tell(epoch)
        self.told = None
