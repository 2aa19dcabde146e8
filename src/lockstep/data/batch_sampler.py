"""The global batches, of any sizes, that a user's batch sampler makes in an epoch.

[Note: batches as they come] A batch sampler may lack a length and be endless, and may choose its batches by the state
of training. So no order of the epoch is drawn in advance, as for a sampler: every rank runs the batch sampler itself,
one batch at a time, as torch does, and takes its share of each. Two things make the ranks agree. The sampler draws from
separate streams, seeded by (seed, epoch), which replace the process-wide generators only while it runs. And a batch's
fingerprint covers all indices of the epoch up to its end. So ranks notice when averaging gradients if their samplers
did not make the same batches (`parallel/rank_agreement.py`), and a resumed run notices if its sampler does not make the
batches that were consumed.

An evaluation is finite, and its data are compared once, with its metrics: the loader makes all its batches first.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.order import GlobalBatch, num_earlier, seed_keys
from lockstep.data.seeding import GLOBAL_RNGS, derive_seed, preserve_global_rngs, states_after
from lockstep.errors import DataError

__all__ = ["GlobalBatches"]

_MARK_BYTES = 6
_END = object()


class GlobalBatches(Iterator[GlobalBatch]):
    """The batches of one epoch of a user's batch sampler, the same on every rank; `thread` created the loader."""

    def __init__(self, sampler: Any, seed: int, epoch: int, num_samples: int, thread: int) -> None:
        self.sampler = sampler
        self._epoch = epoch
        self._thread = thread
        self._states = states_after(derive_seed(b"sampler", seed, epoch))  # of the sampler's separate streams
        self._batches: Iterator[Any] | None = None
        self._hash = hashlib.blake2b(str(seed).encode(), digest_size=_MARK_BYTES)
        self._num_samples = num_samples
        self._times: npt.NDArray[np.int32] | None = None  # how often each index has occurred
        self.number = self._num_skipped = 0  # number of batches made
        self.consumed = 0  # number of samples in them
        self.mark = 0  # a number below 2**48 for all indices of the epoch so far, batch by batch

    def __len__(self) -> int:
        """Number of batches from where the epoch begins or is resumed; TypeError if the sampler has no length."""
        return len(self.sampler) - self._num_skipped

    def __next__(self) -> GlobalBatch:
        with preserve_global_rngs(self._thread):
            for rng, state in zip(GLOBAL_RNGS, self._states, strict=True):
                rng.restore(state)
            try:
                if self._batches is None:
                    self._batches = iter(self.sampler)
                made = next(self._batches, _END)
            finally:
                self._states = [rng.state() for rng in GLOBAL_RNGS]
        if made is _END:
            if self.number > 0:
                raise StopIteration
            raise DataError(
                f"batch_sampler {self._name} yields no batch in epoch {self._epoch}. If it wraps a generator, it can "
                "be iterated only once: let __iter__ start anew each time"
            )
        indices = self._indices_of(made)
        first = self.consumed
        self.number += 1
        self.consumed += len(indices)
        self._hash.update(np.array([len(indices), *indices], dtype=np.int64).tobytes())
        self.mark = int.from_bytes(self._hash.digest(), "big")
        return GlobalBatch(indices, self._keys_of(indices), 0, len(indices), first, self.mark)

    def skip(self, consumed: int, mark: int) -> None:
        """Skip the batches of a resumed epoch up to `consumed` samples; the last must have `mark`. Local.

        Raises:
            DataError: the batch sampler does not make the same batches as before.
        """
        while self.consumed < consumed and next(self, None) is not None:
            pass
        self._num_skipped = self.number
        if consumed and (self.consumed, self.mark) != (consumed, mark):
            raise DataError(
                f"batch_sampler {self._name} yields different batches in epoch {self._epoch} from when the loader's "
                "state was saved, so some samples would come twice and others not at all. If it uses its own "
                "generator, seed it by the epoch in set_epoch, or drop it: the loader seeds the global ones. If the "
                "script calls its set_epoch, it must do so first"
            )

    @property
    def _name(self) -> str:
        return type(self.sampler).__name__

    def _indices_of(self, made: Any) -> list[int]:
        try:
            indices = [operator.index(index) for index in made]
        except TypeError:
            hint = " Pass a sampler that yields one index at a time as `sampler`" if hasattr(made, "__index__") else ""
            raise DataError(
                f"batch_sampler {self._name} yielded {made!r:.80} as batch {self.number} of epoch {self._epoch}; "
                f"expected the indices of a global batch: a list of integers.{hint}"
            ) from None
        if not indices:
            raise DataError(
                f"batch_sampler {self._name} yielded an empty batch, number {self.number} of epoch {self._epoch}: "
                "leave it out"
            )
        return indices

    def _keys_of(self, indices: list[int]) -> list[int]:
        """See `order.seed_keys`: an index that recurs in an epoch gets a different key."""
        if min(indices) < 0 or max(indices) >= self._num_samples:
            return indices  # left to the dataset, which refuses them or counts from the end
        if self._times is None:
            self._times = np.zeros(self._num_samples, np.int32)
        places = np.array(indices)
        times = self._times[places] + num_earlier(places)
        self._times[places] = times + 1  # if an index occurs twice, the last value is stored, which is the larger one
        keys: list[int] = seed_keys(places, times).tolist()
        return keys
