"""Batches on their way from a worker process to the training process.

A worker of torch's puts its batch into a queue, whose own thread pickles it and moves its tensors to shared memory.
What fails there (a full /dev/shm, an object that cannot be pickled) is printed by that thread and told to nobody, and
the training process waits for ever. So a worker packs its batch where an error is torch's to carry over: in the
collate function.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data import get_worker_info

from lockstep.errors import DataError

__all__ = ["CollateAndPack"]

_SHARED_MEMORY = "/dev/shm"
# What torch says when it cannot make a file there.
_FULL_PHRASES = (
    "unable to allocate shared memory",
    "No space left on device",
    "unable to mmap",
    "unable to resize file",
)


class _Packed:
    """A pickled batch, which comes out of the queue as the batch itself."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._content,)


class CollateAndPack:
    """A collate function whose result is packed when it was made in a worker process.

    Args:
        collate_fn: makes a batch of samples.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        """The batch, or in a worker what becomes the batch in the training process.

        Raises:
            DataError: the batch cannot be sent: /dev/shm is full, or something in it cannot be pickled.
        """
        if get_worker_info() is None:
            return self.collate_fn(samples)
        try:
            batch = self.collate_fn(samples)
        except RuntimeError as error:  # the default one makes tensors in shared memory to begin with
            if _is_full(error):
                raise _full_memory(error) from None
            raise
        try:
            return _Packed(bytes(ForkingPickler.dumps(batch)))
        except Exception as error:
            if _is_full(error):
                raise _full_memory(error) from None
            raise DataError(
                f"a batch of type {type(batch).__name__} cannot be sent from its worker to the training process "
                f"({error}); return tensors or plain data from the dataset and collate_fn, or pass num_workers=0"
            ) from None


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError | RuntimeError) and any(phrase in str(error) for phrase in _FULL_PHRASES)


def _full_memory(error: Exception) -> DataError:
    """The error for the user. Removes the file that torch leaves behind when it cannot fill it."""
    left = re.search(r"file <(/torch_[0-9_]+)>", str(error))
    if left is not None:
        with contextlib.suppress(OSError):
            os.unlink(_SHARED_MEMORY + left[1])
    try:
        status = os.statvfs(_SHARED_MEMORY)
        size = f" ({status.f_blocks * status.f_frsize / 2**20:,.0f} MiB in all)"
    except OSError:
        size = ""
    return DataError(
        f"{_SHARED_MEMORY}{size} has no room for the next batch, which workers hand over there: {error}. Lower "
        "num_workers or prefetch_factor (each worker keeps that many batches), give the container more "
        "(docker run --shm-size), or pass num_workers=0"
    )
