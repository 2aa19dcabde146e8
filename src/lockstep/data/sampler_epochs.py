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

__all__ = ["OwnOrder", "SamplerEpochs", "teller_of_epochs"]


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
            "loader.batch_sampler.sampler stands for the order that the loader makes by itself as an epoch begins: "
            "iterate the loader"
        )


class _SetEpoch:
    """The method of a sampler, which notes with what it was called; a class of its own, so that it can be copied.

    Args:
        tell: the method as it was, which makes no note.
    """

    def __init__(self, tell: Callable[..., Any]) -> None:
        self.tell = tell
        self.told: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the sampler's own."""
        epoch: Any = next(iter((*args, *kwargs.values())), None)
        is_number = isinstance(epoch, int | np.integer) and not isinstance(epoch, bool)
        self.told = int(epoch) if is_number and epoch >= 0 else None
        return self.tell(*args, **kwargs)


def teller_of_epochs(batch_sampler: Any) -> Any:
    """Who is told the epoch of a batch sampler: itself; else its sampler, as torch's `BatchSampler` has one."""
    if callable(getattr(batch_sampler, "set_epoch", None)):
        return batch_sampler
    return getattr(batch_sampler, "sampler", None)


class SamplerEpochs:
    """The epochs of one sampler.

    Args:
        sampler: the user's; may have no epochs.
    """

    def __init__(self, sampler: Any) -> None:
        self._set_epoch: _SetEpoch | None = None
        known = getattr(sampler, "set_epoch", None)
        if callable(known):
            self._set_epoch = known if isinstance(known, _SetEpoch) else _SetEpoch(known)
            with contextlib.suppress(AttributeError, TypeError):  # it takes no attributes: then the loader tells it
                sampler.set_epoch = self._set_epoch

    def told_by_script(self) -> int | None:
        """The epoch that the script has told the sampler since the last `tell` or `forget`; None if it has not."""
        return None if self._set_epoch is None else self._set_epoch.told

    def forget(self) -> None:
        """The loader was told an epoch, which counts now. Local."""
        if self._set_epoch is not None:
            self._set_epoch.told = None

    def tell(self, epoch: int) -> None:
        """An epoch begins: tell the sampler, unless the script just has. Local."""
        if self._set_epoch is not None and self._set_epoch.told is None:
            self._set_epoch.tell(epoch)
        self.forget()
