"""Waking a rank that sleeps until a peer has done something for it: written a record, or made room for one.

[Note: bells] A rank that is about to sleep arms its bell, looks once more at what there is to do, and sleeps unless it
has been rung meanwhile. A peer that has changed something looks at the bell behind its store, and rings if it is armed
for that. So messages cost one look at a word while nobody sleeps. Of the rare case in which both looks pass the
stores, [Note: missed wake-ups] in futex.py says what becomes.
"""

from __future__ import annotations

from lockstep.shm.cores import nap
from lockstep.shm.futex import Futex
from lockstep.shm.mail_area import MailArea
from lockstep.shm.sync import fence, random_word

__all__ = ["Doorbell"]

_SILENT, _FOR_RECORDS, _FOR_ROOM_TOO = 0, 1, 2


class Doorbell:
    """The bells of the ranks that share a mail area, as one of them uses them.

    Args:
        area: where they lie.
        place: of this rank in the area.
    """

    def __init__(self, area: MailArea, place: int) -> None:
        self._area = area
        self._place = place
        self._words = area.words
        self._futex = Futex(self._words) if Futex.is_supported() else None
        self._num_rings = 0

    def arm(self, wants_room: bool) -> int:
        """Ask to be rung for. Local; then look once more, then `sleep`.

        Args:
            wants_room: also when a peer has only read, or given memory back.

        Returns:
            What `sleep` needs.
        """
        word = self._area.bell_word(self._place)
        seen = self._words[word]
        fence()
        self._words[word + 1] = _FOR_ROOM_TOO if wants_room else _FOR_RECORDS
        fence()
        return seen

    def sleep(self, seen: int, limit_s: float, poll_s: float) -> None:
        """Sleep until rung for. Local; may return early for no reason.

        Args:
            seen: what `arm` returned.
            limit_s: not longer than this.
            poll_s: not longer than this where nothing can wake this rank.
        """
        if self._futex is None:
            nap(min(limit_s, poll_s))
        elif limit_s > 0:
            self._futex.sleep(self._area.bell_word(self._place), seen, limit_s)

    def ring(self, place: int, *, wrote: bool) -> None:
        """Something was done for the rank in that place: wake it if it sleeps until then. Local.

        Args:
            place: in the area.
            wrote: there is a record to read; otherwise there is only more room.
        """
        bell = self._area.bell_word(place) + 1
        armed_for = self._words[bell]
        if armed_for == _FOR_ROOM_TOO or (wrote and armed_for == _FOR_RECORDS):
            self._words[bell] = _SILENT
            fence()
            self._wake(place)

    def ring_here(self) -> None:
        """Wake the threads of this rank that sleep. Local."""
        self.ring(self._place, wrote=True)

    def ring_all(self) -> None:
        """Wake all ranks, whatever they sleep for: there is trouble to be looked at. Local, in any thread."""
        for place in range(self._area.num_places):
            word = self._area.bell_word(place)
            self._words[word] = random_word()
            if self._futex is not None:
                self._futex.wake(word)

    def _wake(self, place: int) -> None:
        word = self._area.bell_word(place)
        self._num_rings += 1
        # Of two that ring, neither repeats what the other wrote.
        self._words[word] = self._num_rings * self._area.num_places + self._place
        if self._futex is not None:
            self._futex.wake(word)
