"""Seeds as a function of (seed, epoch, index), and the global generators that take them.

See `lockstep.seeding.derive_seed`. Its `purpose` keeps the streams of one (seed, epoch) apart: the shuffle of
an epoch and its augmentations never draw the same numbers.

torch's CPU generator and numpy's legacy one are both a Mersenne Twister that keeps 32 bits of
its seed, so they get different halves of the hash: with the same half, a dataset that draws
from both would see two copies of one stream.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lockstep.data import deferred, deferred_numpy
from lockstep.data.numpy_stream import NumpyStream
from lockstep.errors import DataError
from lockstep.seeding import derive_seed as derive_seed  # `as` marks a re-export for type checkers
from lockstep.seeding import derive_seeds as derive_seeds

__all__ = ["GlobalRngs", "make_generator", "preserve_global_rngs", "restore_if_seeded", "seed_global_rngs"]


_seed_torch = torch.default_generator.manual_seed  # looked up once: it is called for each sample


def make_generator(purpose: bytes, seed: int, epoch: int, index: int = 0) -> torch.Generator:
    """A fresh CPU generator at the start of the stream that `derive_seed` names."""
    return torch.Generator().manual_seed(derive_seed(purpose, seed, epoch, index))


def seed_global_rngs(value: int) -> None:
    """Start the process-wide generators of torch (CPU), numpy and `random` anew.

    Generators of accelerators stay as they are: a dataset has no business drawing there, and
    touching them would initialise the device in every worker.

    In a worker process and within `restore_if_seeded`, those of numpy and `random` are seeded when they are used: see
    `deferred_numpy.py` and `deferred.py`.

    Args:
        value: 0 … 2**64-1.

    Raises:
        DataError: another thread than the loader's fetches, and may draw from them meanwhile.
    """
    blocks = _open.blocks
    if blocks:
        blocks[-1].begin()
    _seed_torch(value)
    may_wait = bool(blocks or get_worker_info())
    deferred_numpy.seed(value >> 32, may_wait=may_wait)  # the half that torch's generator drops
    deferred.seed(value, may_wait=may_wait)


class GlobalRngs:
    """The state of the process-wide generators now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def are_as_now(self) -> bool:
        """Whether nobody has drawn since, nor seeded."""
        now = GlobalRngs()
        is_same_numpy = all(
            np.array_equal(part, now._numpy["state"][key]) for key, part in self._numpy["state"].items()
        )
        return torch.equal(self._torch, now._torch) and self._python == now._python and is_same_numpy

    def put_back(self) -> None:
        """Go on from where they were."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class _Aside:
    """The process-wide generators as the training process left them. They are to be seeded now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._num_changes = deferred.num_changes()
        self._numpy = NumpyStream()

    def put_back(self) -> None:
        """Go on from where they were."""
        torch.set_rng_state(self._torch)
        if not deferred.drop() or deferred.num_changes() != self._num_changes:
            random.setstate(self._python)
        self._numpy.put_back()


class _Block:
    """One `restore_if_seeded` block.

    Args:
        thread: the only one that may seed in it, beside the main thread; None for any.
    """

    def __init__(self, thread: int | None) -> None:
        self._thread = thread
        self._aside: _Aside | None = None

    def begin(self) -> None:
        """The process-wide generators are about to be seeded."""
        if self._aside is None:
            now = threading.current_thread()
            if now is not threading.main_thread() and self._thread not in (None, now.ident):
                raise DataError(
                    "batches are fetched in another thread than the one that made the loader. Torch's, numpy's and "
                    "Python's generators belong to all threads, so seeding them for each sample would change what the "
                    "training draws meanwhile: dropout. Pass num_workers=1, make the loader in the thread that "
                    "fetches, or pass seed_global_rng=False and let __getitem__ take a `generator`"
                )
            self._aside = _Aside()

    def end(self) -> None:
        """Put the generators back if they were seeded."""
        if self._aside is not None:
            self._aside.put_back()


class _Blocks(threading.local):
    """The `restore_if_seeded` blocks that are open in a thread."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


_open = _Blocks()


@contextmanager
def preserve_global_rngs() -> Iterator[None]:
    """Put the process-wide generators back afterwards, whatever happens inside."""
    before = GlobalRngs()
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def restore_if_seeded(thread: int | None = None) -> Iterator[None]:
    """Put the process-wide generators back afterwards if `seed_global_rngs` was called inside.

    Saving them takes longer than fetching a small batch that needs no seeds.

    Args:
        thread: the one that trains; seeding in another one is an error, unless it is the main thread. None for any.
    """
    _open.blocks.append(_Block(thread))
    try:
        yield
    finally:
        _open.blocks.pop().end()
