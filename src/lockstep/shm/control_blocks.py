"""The control segment: one control block per rank, written only by its owner, and a gate for all.

Layout in bytes, all integers 64 bit little endian, every hot field on a separate cache line::

    0        header of the segment (nonce)                                 64
    64       gate: changes when sleepers are woken; its bell: not 0 if     64
             a rank sleeps until the gate changes; count of alarms
    4096     block of rank 0, then of rank 1, …                            BLOCK_BYTES each
    …        small slots of rank 0, then of rank 1, …                      2 x small_slot_bytes each

    block:
    0        step count; fingerprint of the even collective, of the odd;   64
             step at which it finished its last operation on large slots
    64       state, pid, start time, when the wait was confirmed, number   64
             of the wait, pid namespace
    128      record of the even collective: unused, number, call, site     64
    192      record of the odd collective                                  64
    256      text: host name                                               256
    512      text: announcement (handle of a new segment, or an error)     1024
    1536     text: what the rank waits in, and for whom                    512
    2048     text: failure (why the rank is in state FAILED)               2048
    4096     texts: rings of calls and of call sites, as in a section of the status file

Rings and texts have the format described in `lockstep.rank_status`.

[Note: one line] Every collective compares the fingerprints, so they share a cache line with the step count, which peers
fetch anyway. The rest of a record is only read when something is wrong, and stays in its owner's cache: in another pair
of lines, because processors fetch lines in pairs.

[Note: two records] A rank may be one collective ahead of a peer that still reads its record, never two, because the
second would need that peer's step. So even and odd collectives have separate records, and a text that either of them
refers to is not overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.errors import SegmentDamaged
from lockstep.rank_status import RING, SECTION_BYTES, call_field, read_text, site_field, write_text
from lockstep.shm.liveness import PeerIdentity
from lockstep.shm.segment import Segment
from lockstep.shm.sync import PeerState, fence

__all__ = ["Failure", "Record", "SharedControlBlocks", "damage_text"]

BLOCKS_START = 4096
BLOCK_BYTES = SECTION_BYTES

_GATE_WORD = 8
_RECORD_WORDS = 8
_FINISHED_WORD = 3
_CALL_WORD, _SITE_WORD = 2, 3
_STATE_WORD = 8
_HOST = (256, 256)
_CONFIRMED_WORD, _BLOCKED_WORD, _NAMESPACE_WORD = _STATE_WORD + 3, _STATE_WORD + 4, _STATE_WORD + 5
_ANNOUNCEMENT = (512, 1024)
_BLOCKED = (1536, 512)
_FAILURE = (2048, 2048)


def damage_text(what: str) -> str:
    """The message of a SegmentDamaged error."""
    return (
        f"the control segment of this group is damaged: {what}, which no rank writes. Something else wrote into the "
        "memory that the ranks share: a wild pointer in a process of this job, a faulty memory module, or another "
        "program of this user. The script made no mistake in this call; start the job again"
    )


@dataclass(frozen=True)
class Record:
    """The record of one rank about one collective."""

    fingerprint: int
    number: int
    call: str
    site: str


@dataclass(frozen=True)
class Failure:
    """Why a rank is in state FAILED.

    Attributes:
        kind: name of the CollectiveError with which it gave up a collective; empty if it raised another exception.
        culprits: global ranks that it blames.
        message: what happened, in one line.
    """

    kind: str
    culprits: tuple[int, ...]
    message: str


class SharedControlBlocks:
    """Typed access to the blocks of the control segment.

    Args:
        segment: the mapped control segment.
        rank: this rank; only its block is written here.
        world_size: number of blocks.
        on_end: called after this rank's block says that it has left or failed. See [Note: alarm] in `sync.py`.

    Attributes:
        can_be_damaged: whether anything other than the ranks could have written into the blocks: always.
    """

    can_be_damaged = True

    def __init__(self, segment: Segment, rank: int, world_size: int, on_end: Callable[[], None] | None = None) -> None:
        self._bytes = segment.memory
        self.words = segment.memory.cast("q")
        self.rank = rank
        self.world_size = world_size
        self._starts = [BLOCKS_START + peer * BLOCK_BYTES for peer in range(world_size)]
        self.step_words = [start // 8 for start in self._starts]
        self.gate_word, self.bell_word = _GATE_WORD, _GATE_WORD + 1
        self.state_words = [start // 8 + _STATE_WORD for start in self._starts]
        self.record_words = [start // 8 + 16 for start in self._starts]
        self.fingerprint_words = [(start // 8 + 1, start // 8 + 2) for start in self._starts]
        self._ring_counts = {_CALL_WORD: 0, _SITE_WORD: 0}
        self._num_blocked = 0
        self._on_end = on_end

    @staticmethod
    def size_bytes(world_size: int) -> int:
        """Size of header and blocks in bytes, a multiple of the page size."""
        return BLOCKS_START + world_size * BLOCK_BYTES

    def _write_text(self, offset: int, capacity: int, text: str) -> None:
        write_text(self._bytes, self._starts[self.rank] + offset, capacity, text)

    def _read_text(self, rank: int, offset: int, capacity: int) -> str:
        return read_text(self._bytes, self._starts[rank] + offset, capacity)

    def introduce(self, identity: PeerIdentity) -> None:
        """Write the identity of this rank, then the state READY."""
        self._write_text(*_HOST, identity.host)
        state = self.state_words[self.rank]
        self.words[state + 1] = identity.pid
        self.words[state + 2] = identity.start_time
        self.words[self._starts[self.rank] // 8 + _NAMESPACE_WORD] = identity.pid_namespace
        fence()
        self.words[state] = PeerState.READY

    def identity(self, rank: int) -> PeerIdentity:
        """The identity of a rank, which must not be ABSENT."""
        state = self.state_words[rank]
        namespace = self.words[self._starts[rank] // 8 + _NAMESPACE_WORD]
        return PeerIdentity(self.words[state + 1], self.words[state + 2], self._read_text(rank, *_HOST), namespace)

    def state(self, rank: int) -> PeerState:
        """The state of that rank.

        Raises:
            SegmentDamaged: the value is not a state.
        """
        word = self.words[self.state_words[rank]]
        if not PeerState.ABSENT <= word <= PeerState.FAILED:
            raise SegmentDamaged(damage_text(f"the state of rank {rank} is {word}"), (rank,))
        return PeerState(word)

    def leave(self) -> None:
        """Mark this rank as left in good order, unless it has failed."""
        state = self.state_words[self.rank]
        if self.words[state] in (PeerState.READY, PeerState.GIVING_UP):
            self._end(PeerState.LEFT)

    def fail(self, failure: Failure) -> None:
        """Mark this rank as failed. Only the first failure is kept, because it is the cause of the others."""
        state = self.state_words[self.rank]
        if self.words[state] == PeerState.FAILED:
            return
        culprits = ",".join(map(str, failure.culprits))
        self._write_text(*_FAILURE, f"{failure.kind}|{culprits}|{failure.message}")
        fence()
        self._end(PeerState.FAILED)

    def _end(self, state: PeerState) -> None:
        self.words[self.state_words[self.rank]] = state
        if self._on_end is not None:
            self._on_end()

    def failure(self, rank: int) -> Failure:
        """Why that rank failed."""
        text = self._read_text(rank, *_FAILURE)
        kind, _, rest = text.partition("|")
        culprits, separator, message = rest.partition("|")
        numbers = tuple(int(culprit) for culprit in culprits.split(",") if culprit.isascii() and culprit.isdigit())
        if not separator:  # not written by `fail`
            return Failure("", (), f"failed, and the reason cannot be read: {text[:60]!r}")
        return Failure(kind, numbers, message)

    def find_damage(self, rank: int, number: int) -> str | None:
        """What in that rank's record of collective `number`, which it has entered, no rank can have written.

        None if nothing is wrong: a rank writes its record before its step, and the fingerprint in it is that of the
        text next to it.
        """
        word = self.record_words[rank] + (number & 1) * _RECORD_WORDS
        _, written_number, call, site = self.words[word : word + 4]
        if written_number != number:
            return f"its record of collective #{number} says #{written_number}"
        if not (0 <= call < RING and 0 <= site < RING):
            return f"its record of collective #{number} names the texts {call} and {site} of {RING}"
        state = self.words[self.state_words[rank]]
        return None if PeerState.READY <= state <= PeerState.FAILED else f"it is in state {state}"

    def finish_large(self, step: int) -> None:
        """Publish that this rank, after that many steps, has finished reading the large slots."""
        fence()
        self.words[self._starts[self.rank] // 8 + _FINISHED_WORD] = step

    def finished_large(self) -> list[int]:
        """Number of steps after which each rank finished its last operation on large slots, as published so far."""
        return [self.words[start // 8 + _FINISHED_WORD] for start in self._starts]

    def announce(self, text: str) -> None:
        """Publish a short text; peers may read it after the next step."""
        self._write_text(*_ANNOUNCEMENT, text)

    def announcement(self, rank: int) -> str:
        """The last text that this rank announced."""
        return self._read_text(rank, *_ANNOUNCEMENT)

    def publish_wait(self, text: str) -> None:
        """Publish what this rank is waiting in, and for which ranks; a new wait even if the text is the same."""
        self.withdraw_wait()
        self._write_text(*_BLOCKED, text)
        self._num_blocked += 1
        fence()
        self.words[self._starts[self.rank] // 8 + _BLOCKED_WORD] = self._num_blocked

    def confirm_wait(self, time_ns: int) -> None:
        """Confirm that the published wait was still going on at that time of the monotonic clock."""
        self.words[self._starts[self.rank] // 8 + _CONFIRMED_WORD] = time_ns

    def withdraw_wait(self) -> None:
        """Publish that this rank is no longer waiting."""
        self.words[self._starts[self.rank] // 8 + _BLOCKED_WORD] = 0
        fence()

    def wait_of(self, rank: int) -> tuple[int, int, str] | None:
        """Number of that rank's wait, time of its last confirmation (ns), and its text; None if none is published."""
        start = self._starts[rank] // 8
        number, confirmed_ns = self.words[start + _BLOCKED_WORD], self.words[start + _CONFIRMED_WORD]
        fence()
        text = self._read_text(rank, *_BLOCKED)
        fence()
        if number == 0 or number != self.words[start + _BLOCKED_WORD]:
            return None
        return number, confirmed_ns, text

    def add_call(self, text: str) -> int:
        """Store the description of a call in this rank's ring; returns its index there."""
        return self._add_text(call_field, _CALL_WORD, text)

    def add_site(self, text: str) -> int:
        """Store a call site in this rank's ring; returns its index there."""
        return self._add_text(site_field, _SITE_WORD, text)

    def _add_text(self, field_of: Callable[[int], tuple[int, int]], record_word: int, text: str) -> int:
        word = self.record_words[self.rank] + record_word
        # Peers may still be reading the texts that the two records refer to.
        in_use = (self.words[word], self.words[word + _RECORD_WORDS])
        index = self._ring_counts[record_word] % RING
        while index in in_use:
            index = (index + 1) % RING
        self._ring_counts[record_word] = index + 1
        self._write_text(*field_of(index), text)
        return index

    def record(self, rank: int, number: int) -> Record:
        """That rank's latest record of a collective of `number`'s parity."""
        word = self.record_words[rank] + (number & 1) * _RECORD_WORDS
        _, written_number, call, site = self.words[word : word + 4]
        return Record(
            self.words[self.fingerprint_words[rank][number & 1]],
            written_number,
            self._read_text(rank, *call_field(call % RING)),
            self._read_text(rank, *site_field(site % RING)),
        )

    def latest_record(self, rank: int) -> Record | None:
        """The last collective that this rank entered, or None before its first."""
        even, odd = self.record(rank, 0), self.record(rank, 1)
        latest = even if even.number >= odd.number else odd
        return latest if latest.number > 0 else None
