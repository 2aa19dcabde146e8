"""The doorbell wakes a rank that sleeps until a peer has written a record, or made room for one.

[Note: bells] A rank that is about to sleep arms its bell, checks once more for work, and sleeps unless a peer has rung
meanwhile. A peer that has changed something then reads the bell, and rings it if it is armed for that kind of change.
So messages cost only one read of a word while nobody sleeps. In rare cases both ranks read too early, and each misses
what the other has stored; see [Note: missed wake-ups] in futex.py. Threads of one rank share its bell: if one finds
that there is no room while another sleeps until there is a record, it wakes that one.
"""

from __future__ import annotations

from lockstep.shm.cores import nap
from lockstep.shm.futex import Futex
from lockstep.shm.mail_area import MailArea
from lockstep.shm.sync import fence, random_word

__all__ = ["Doorbell"]

_SILENT, _FOR_RECORDS, _FOR_ROOM_TOO = 0, 1, 2


class Doorbell:
    """One rank's access to the bells of all ranks that share a mail area.

    Args:
        area: the memory with the bells.
        local_rank: the index of this rank in the area.
    """

    def __init__(self, area: MailArea, local_rank: int) -> None:
        self._area = area
        self._local_rank = local_rank
        self._words = area.words
        self._futex = Futex(self._words) if Futex.is_supported() else None
        self._num_rings = 0

    def arm(self, wants_room: bool) -> int:
        """Ask the peers to ring. Local; the caller then checks once more for work, and then calls `sleep`.

        Args:
            wants_room: let a peer ring also when it has only read, or given memory back.

        Returns:
            The value of the bell, for `sleep`.
        """
        word = self._area.bell_word(self._local_rank)
        seen = self._words[word]
        fence()
        self._words[word + 1] = _FOR_ROOM_TOO if wants_room else _FOR_RECORDS
        fence()
        return seen

    def is_armed(self, seen: int, wants_room: bool) -> bool:
        """Whether the bell is armed for that, and has not rung since `arm` returned `seen`. Local."""
        word = self._area.bell_word(self._local_rank)
        enough = _FOR_ROOM_TOO if wants_room else _FOR_RECORDS
        return self._words[word] == seen and self._words[word + 1] >= enough

    def want_room(self) -> None:
        """Wake this rank's threads that sleep for records only, so that they also arm the bell for room. Local."""
        if self._words[self._area.bell_word(self._local_rank) + 1] == _FOR_RECORDS:
            self.ring_here()

    def sleep(self, seen: int, timeout_s: float, poll_s: float) -> None:
        """Sleep until a peer rings. Local; may return early without reason.

        Args:
            seen: the return value of `arm`.
            timeout_s: the longest sleep, in seconds.
            poll_s: the longest sleep if this system cannot wake a sleeper.
        """
        if self._futex is None:
            nap(min(timeout_s, poll_s))
        elif timeout_s > 0:
            self._futex.sleep(self._area.bell_word(self._local_rank), seen, timeout_s)

    def ring(self, local_rank: int, *, wrote: bool) -> None:
        """Wake a rank that is waiting for this kind of change. Local.

        Args:
            local_rank: the index of that rank in the area.
            wrote: there is a record to read; otherwise there is only more room.
        """
        bell = self._area.bell_word(local_rank) + 1
        armed_for = self._words[bell]
        if armed_for == _FOR_ROOM_TOO or (wrote and armed_for == _FOR_RECORDS):
            self._words[bell] = _SILENT
            fence()
            self._wake(local_rank)

    def ring_here(self) -> None:
        """Wake the sleeping threads of this rank. Local."""
        self.ring(self._local_rank, wrote=True)

    def ring_all(self) -> None:
        """Wake all ranks, whatever they are waiting for, to check for a failure. Local; any thread may call it."""
        for local_rank in range(self._area.num_ranks):
            word = self._area.bell_word(local_rank)
            self._words[word] = random_word()
            if self._futex is not None:
                self._futex.wake(word)

    def _wake(self, local_rank: int) -> None:
        word = self._area.bell_word(local_rank)
        self._num_rings += 1
        # The values of two ranks that ring at once must differ.
        self._words[word] = self._num_rings * self._area.num_ranks + self._local_rank
        if self._futex is not None:
            self._futex.wake(word)
