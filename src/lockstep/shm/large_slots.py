"""The large slots of the groups of this process, and which of them are backed by memory.

[Note: idle slots] The large slots of a group take 4 MiB for each rank, and a job with many groups rarely moves data in
all of them. So a process keeps the memory of its slots in the most recently used groups, and returns that of the others
to the system; the addresses stay, and the next operation of such a group allocates memory again. A rank may release a
slot once every rank has read it: each rank writes into its control block at which step it finished its last operation,
and if that is the same step for all ranks of an idle group, nobody is reading there and nobody will before this rank's
next step in that group. Steps are compared rather than a count of operations: after mismatched calls, ranks have begun
different numbers of operations, but taken the same steps.
"""

from __future__ import annotations

import threading
import weakref

import torch

from lockstep.shm.control_blocks import SharedControlBlocks
from lockstep.shm.segment import give_back, populate

__all__ = ["LargeSlots"]

# Number of groups whose slots keep their memory. Those of two ranks take 8 MiB, so it may be many; of larger groups,
# two, unless there are many ranks, of which one group takes 64 MiB and more. Allocating 4 MiB again costs a rank a
# millisecond.
_PAIR, _MANY = 2, 16
_KEPT_PAIRS, _KEPT_LARGER, _KEPT_OF_MANY = 64, 2, 1


class LargeSlots:
    """The large slots of one group. Not thread-safe, but groups may be used by different threads.

    Args:
        parts: uint8 tensors, one per rank, each with both slots of that rank; all mapped here.
        slot_bytes: size of each of a rank's two slots in bytes.
        blocks: the control blocks of the group.
    """

    def __init__(self, parts: list[torch.Tensor], slot_bytes: int, blocks: SharedControlBlocks) -> None:
        self.parts = parts
        self.slot_bytes = slot_bytes
        self._blocks = blocks
        self._finished_at = 0
        self._is_in_use = False
        self._has_memory = True

    def begin(self) -> None:
        """Make sure that this rank's slots have memory, before an operation on them. Local.

        Raises:
            SharedMemoryError: memory is exhausted.
        """
        with _lock:
            self._is_in_use = True
            _kept.pop(self, None)
            _kept[self] = len(self.parts)
            _release_idle()
            if not self._has_memory:
                populate(self._own)
                self._has_memory = True

    def finish(self, step: int) -> None:
        """Tell the other ranks that this one has finished reading in the operation. Local.

        Args:
            step: number of steps that this rank has taken in the group.
        """
        self._blocks.finish_large(step)
        self._finished_at = step
        self._is_in_use = False

    def close(self) -> None:
        """Forget the slots; their memory is freed with its last mapping. Local."""
        with _lock:
            _kept.pop(self, None)

    @property
    def _own(self) -> torch.Tensor:
        return self.parts[self._blocks.rank]

    def release_if_idle(self) -> bool:
        """Release the memory of this rank's slots, unless a rank may still read it. Local; returns whether it did."""
        if self._is_in_use or any(step != self._finished_at for step in self._blocks.finished_large()):
            return False
        self._has_memory = not give_back(self._own)
        return not self._has_memory


_lock = threading.Lock()
# The slots that have memory, with the sizes of their groups; most recently used last.
_kept: weakref.WeakKeyDictionary[LargeSlots, int] = weakref.WeakKeyDictionary()


def _release_idle() -> None:
    """Release the memory of the least recently used slots, until no more groups have memory than allowed."""
    pairs = [slots for slots, num_ranks in _kept.items() if num_ranks <= _PAIR]
    larger = [slots for slots, num_ranks in _kept.items() if num_ranks > _PAIR]
    num_larger = _KEPT_OF_MANY if any(_kept[slots] > _MANY for slots in larger) else _KEPT_LARGER
    for slots in (*pairs[: max(0, len(pairs) - _KEPT_PAIRS)], *larger[: max(0, len(larger) - num_larger)]):
        if slots.release_if_idle():
            del _kept[slots]
