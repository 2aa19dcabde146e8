"""A shuffled order that is computed, position by position, and never stored.

A Feistel network permutes pairs (left, right) whatever its round functions are: a round adds to one half a number that
depends on the other half, and can be taken back by subtracting it. Here left counts to about the square root of the
number of samples and right to what is left, so that hardly more pairs exist than samples; a pair beyond the last sample
is sent through the network again until it is a sample (cycle walking, Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002), which keeps it a permutation. Four rounds with random functions are enough for large domains (Luby and
Rackoff, 1988). On a handful of samples not every permutation can come out (a round on an odd number of rows is an even
permutation), so `lockstep.data.order` stores small orders, which costs nothing.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lockstep.seeding import derive_seed

__all__ = ["ComputedOrder"]

_ROUNDS = 12
_BLOCK = 4096  # positions that are computed together: numpy's calls cost more than what they compute for a few
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64

Numbers = npt.NDArray[np.uint64]


class ComputedOrder:
    """A permutation of 0 … num_samples-1, at least one, that is a function of (seed, epoch), and takes no memory.

    Slices, of step 1, give int64 arrays as those of a stored permutation do. Not for several threads at once.

    >>> sorted(ComputedOrder(5, seed=0, epoch=0)[:].tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self.num_samples = num_samples
        self._left = math.isqrt(num_samples - 1) + 1
        self._right = -(-num_samples // self._left)
        self._keys = [np.uint64(derive_seed(b"feistel", seed, epoch, number)) for number in range(_ROUNDS)]
        self._block: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, positions: slice) -> npt.NDArray[np.int64]:
        begin, end, _ = positions.indices(self.num_samples)
        parts = [
            self._block_of(number)[max(begin - number * _BLOCK, 0) : end - number * _BLOCK]
            for number in range(begin // _BLOCK, -(-end // _BLOCK))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, dtype=np.int64)])

    def _block_of(self, number: int) -> npt.NDArray[np.int64]:
        """The samples at positions number·_BLOCK and following; those asked for last are kept."""
        if self._block[0] != number:
            begin = number * _BLOCK
            positions = np.arange(begin, min(begin + _BLOCK, self.num_samples), dtype=np.uint64)
            self._block = number, self._compute(positions)
        return self._block[1]

    def _compute(self, positions: Numbers) -> npt.NDArray[np.int64]:
        found = self._permute(positions)
        while (beyond := found >= self.num_samples).any():
            found[beyond] = self._permute(found[beyond])
        return found.astype(np.int64)

    def _permute(self, numbers: Numbers) -> Numbers:
        """The network, on 0 … left·right-1."""
        sizes = np.uint64(self._left), np.uint64(self._right)
        changed, other = numbers // sizes[1], numbers % sizes[1]
        for number, key in enumerate(self._keys):
            changed, other = other, (changed + _mix(other ^ key) % sizes[number % 2]) % sizes[number % 2]
        left, right = (changed, other) if _ROUNDS % 2 == 0 else (other, changed)
        return left * sizes[1] + right


def _mix(numbers: Numbers) -> Numbers:
    """splitmix64's finalizer (Steele, Lea and Flood, 2014): each bit of the result depends on each bit given."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    return numbers ^ (numbers >> np.uint64(31))
