"""The control blocks of a group over messages: what every rank is doing, according to its control messages.

The counterpart of the control segment of one host (`lockstep.shm.control_blocks`), read by the same flight recorder.
Each rank keeps a copy of all control blocks, and records in it what it sends and receives. A control message, called
*notice* here, is one message to every peer::

    kind, fingerprint, number, call, site    64 bit each
    length of the call's text, of the site's   32 bit each; -1 if the peer has received it before
    both texts                               UTF-8
    attachment                               bytes, to the end of the message

If a rank forwards several ENTER notices, its own and others' (`arrival.py`), they are one message as well::

    kind                                     64 bit
    rank, length, notice                     32 bit, 32 bit and bytes, of each

If those of all ranks are sent together, and none contains a text, they are JOINED::

    kind, number                             64 bit each
    fingerprint, number, call, site          64 bit each, of each rank
    length of the attachment                 32 bit, of each rank
    attachment                               bytes, of each rank

A rank sends one ENTER notice for each collective, and a final LEFT or FAILED, the last message that it ever sends. In
the latter two, `number` is the last collective that the rank has finished, and FAILED has its reason in place of the
call's text.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

from lockstep.rank_status import RING, TEXT_BYTES
from lockstep.shm.control_blocks import Failure, Record
from lockstep.shm.liveness import PeerIdentity
from lockstep.shm.sync import PeerState

__all__ = [
    "NOTICE_BYTES",
    "NOT_OURS",
    "MessageControlBlocks",
    "NoticeKind",
    "forward_notices",
    "forwarded_notices",
    "join_notices",
    "notice_kind",
]

_HEADER = struct.Struct("=5q2i")
_KIND, _ENTRY = struct.Struct("=q"), struct.Struct("=2I")
_REASON_BYTES = 2048
NOTICE_BYTES = _HEADER.size + max(2 * TEXT_BYTES, _REASON_BYTES)

_WORDS_PER_RANK = 16
_RECORD_WORDS = 8
_RECORD_BYTES = 4 * 8  # fingerprint, number, call, site: as in a notice
_NO_TEXT = -1
_NO_TEXTS = struct.pack("=2i", _NO_TEXT, _NO_TEXT)
_JOINED, _LENGTH_BYTES = struct.Struct("=2q"), 4


# Exceptions raised by parsing a message that cannot come from a rank.
NOT_OURS = (ValueError, LookupError, struct.error)


class NoticeKind(IntEnum):
    """The kinds of notices."""

    ENTER = 1  # the rank has arrived at a collective
    LEFT = 2  # it left the group in good order
    FAILED = 3  # it raised an exception, or gave up waiting
    FORWARDED = 4  # ENTER notices of several ranks
    JOINED = 5  # ENTER notices of all ranks


_KINDS = {int(kind): kind for kind in NoticeKind}


class MessageControlBlocks:
    """This rank's copy of the control blocks of all ranks of the group.

    Args:
        rank: this rank.
        identities: the process of each rank.
        on_failure: called once, when this rank has failed.

    Attributes:
        words: 64-bit words that hold two records per rank, for even and odd collectives.
        record_words: index of each rank's first record.
        fingerprint_words: indices of the fingerprints in each rank's two records.
        finished: for each rank that left or failed, the last collective that it has finished.
        can_be_damaged: whether anything other than the ranks could have written into the blocks: never.
    """

    can_be_damaged = False

    def __init__(self, rank: int, identities: Sequence[PeerIdentity], on_failure: Callable[[Failure], None]) -> None:
        self.rank = rank
        self._on_failure = on_failure
        self._identities = tuple(identities)
        world_size = len(self._identities)
        self.words = memoryview(array("q", bytes(8 * _WORDS_PER_RANK * world_size)))
        self._bytes = self.words.cast("B")
        self.record_words = [_WORDS_PER_RANK * peer for peer in range(world_size)]
        self.fingerprint_words = [(word, word + _RECORD_WORDS) for word in self.record_words]
        self.finished: dict[int, int] = {}
        self._states = [PeerState.READY] * world_size
        self._failures: dict[int, Failure] = {}
        self._calls: list[list[str]] = [[""] * RING for _ in range(world_size)]
        self._sites: list[list[str]] = [[""] * RING for _ in range(world_size)]
        self._ring_counts = [0, 0]
        # Texts that have not been sent to the peers yet.
        self._new_call: str | None = None
        self._new_site: str | None = None

    # ---- what the flight record needs --------------------------------------------------------------

    def identity(self, rank: int) -> PeerIdentity:
        """The process of that rank."""
        return self._identities[rank]

    def state(self, rank: int) -> PeerState:
        """The state of that rank."""
        return self._states[rank]

    def failure(self, rank: int) -> Failure:
        """Why that rank failed."""
        return self._failures[rank]

    def fail(self, failure: Failure) -> None:
        """Mark this rank as failed. Only the first failure is kept, because it is the cause of the others."""
        if self._states[self.rank] != PeerState.FAILED:
            self._states[self.rank] = PeerState.FAILED
            self._failures[self.rank] = failure
            self._on_failure(failure)

    def find_damage(self, rank: int, number: int) -> str | None:
        """None: records that come in messages are checked on arrival."""
        return None

    def add_call(self, text: str) -> int:
        """Store the description of a call; returns its index among those of this rank."""
        self._new_call = _cut(text, TEXT_BYTES)
        return self._add_text(self._calls[self.rank], 0, self._new_call)

    def add_site(self, text: str) -> int:
        """Store a call site; returns its index among those of this rank."""
        self._new_site = _cut(text, TEXT_BYTES)
        return self._add_text(self._sites[self.rank], 1, self._new_site)

    def _add_text(self, ring: list[str], which: int, text: str) -> int:
        word = self.record_words[self.rank] + 2 + which
        in_use = (self.words[word], self.words[word + _RECORD_WORDS])
        index = self._ring_counts[which] % RING
        while index in in_use:
            index = (index + 1) % RING
        self._ring_counts[which] = index + 1
        ring[index] = text
        return index

    def record(self, rank: int, number: int) -> Record:
        """The latest record of that rank for collectives of `number`'s parity."""
        word = self.record_words[rank] + (number & 1) * _RECORD_WORDS
        fingerprint, written_number, call, site = self.words[word : word + 4]
        texts = [
            ring[index] if 0 <= index < RING else ""  # no rank sends such an index
            for ring, index in ((self._calls[rank], call), (self._sites[rank], site))
        ]
        return Record(fingerprint, written_number, *texts)

    def latest_record(self, rank: int) -> Record | None:
        """The record of the last collective that this rank entered, or None before its first."""
        even, odd = self.record(rank, 0), self.record(rank, 1)
        latest = even if even.number >= odd.number else odd
        return latest if latest.number > 0 else None

    def number(self, rank: int) -> int:
        """Number of the last collective that this rank entered; 0 before its first."""
        word = self.record_words[rank] + 1
        return max(self.words[word], self.words[word + _RECORD_WORDS])

    # ---- notices -----------------------------------------------------------------------------------

    def enter_notice(self) -> bytes:
        """The notice that this rank has arrived at the collective of its latest record."""
        word = self.record_words[self.rank] + (self.number(self.rank) & 1) * _RECORD_WORDS
        call, site = self._new_call, self._new_site
        self._new_call = self._new_site = None
        if call is None and site is None:
            return _HEADER.pack(NoticeKind.ENTER, *self.words[word : word + 4], _NO_TEXT, _NO_TEXT)
        texts = [None if text is None else text.encode() for text in (call, site)]
        lengths = [_NO_TEXT if text is None else len(text) for text in texts]
        header = _HEADER.pack(NoticeKind.ENTER, *self.words[word : word + 4], *lengths)
        return header + b"".join(text or b"" for text in texts)

    def final_notice(self, finished: int) -> bytes:
        """The final notice of this rank, given the number of collectives it has finished; LEFT unless it failed."""
        failure = self._failures.get(self.rank)
        self.finished[self.rank] = finished
        if failure is None:
            self._states[self.rank] = PeerState.LEFT
            return _HEADER.pack(NoticeKind.LEFT, 0, finished, 0, 0, _NO_TEXT, _NO_TEXT)
        culprits = ",".join(map(str, failure.culprits))
        text = _cut(f"{failure.kind}|{culprits}|{failure.message}", _REASON_BYTES).encode()
        return _HEADER.pack(NoticeKind.FAILED, 0, finished, 0, 0, len(text), _NO_TEXT) + text

    def all_final(self, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks have sent their final notice."""
        return all(rank in self.finished for rank in ranks)

    def receive(self, rank: int, notice: memoryview) -> tuple[int, memoryview] | None:
        """Write a notice of that rank into its block.

        Returns:
            The number and the attachment of an ENTER notice; None for a repeated one, and for final notices.

        Raises:
            ValueError, IndexError: the notice cannot come from a rank.
        """
        if len(notice) < _HEADER.size:
            raise ValueError(f"a notice of {len(notice)} bytes")
        kind, _, number, call, site, call_bytes, site_bytes = _HEADER.unpack_from(notice)
        call_end = _HEADER.size + max(call_bytes, 0)
        site_end = call_end + max(site_bytes, 0)
        if kind == NoticeKind.ENTER:
            word = self.record_words[rank] + (number & 1) * _RECORD_WORDS
            if number <= self.words[word + 1]:  # received before in another way, see [Note: late ranks]
                return None
            if call_bytes != _NO_TEXT:
                self._calls[rank][call] = _text(notice[_HEADER.size : call_end])
            if site_bytes != _NO_TEXT:
                self._sites[rank][site] = _text(notice[call_end:site_end])
            self._bytes[8 * word : 8 * word + _RECORD_BYTES] = notice[8 : 8 + _RECORD_BYTES]
            return number, notice[site_end:]
        state = PeerState.LEFT
        if kind == NoticeKind.FAILED:
            name, culprits, message = _text(notice[_HEADER.size : call_end]).split("|", 2)
            self._failures[rank] = Failure(name, tuple(int(one) for one in culprits.split(",") if one), message)
            state = PeerState.FAILED
        self.finished[rank] = number
        self._states[rank] = state
        return None

    def distrust(self, rank: int) -> None:
        """Treat a rank as failed that has sent an invalid message; its further messages are ignored. Local."""
        if self._states[rank] != PeerState.FAILED:
            self._failures[rank] = Failure("", (), "sent an invalid message")
            self.finished.setdefault(rank, 0)
            self._states[rank] = PeerState.FAILED

    def receive_joined(self, message: memoryview) -> tuple[int, list[memoryview]]:
        """Write the notices of all ranks into their blocks, except for those received before.

        Returns:
            The number of the collective, and the attachment of each rank.

        Raises:
            ValueError: the message cannot come from a rank.
        """
        size = len(self._identities)
        lengths_at = _JOINED.size + size * _RECORD_BYTES
        end = lengths_at + size * _LENGTH_BYTES
        if len(message) < end:
            raise ValueError(f"notices of {size} ranks in {len(message)} bytes")
        _, number = _JOINED.unpack_from(message)
        lengths = message[lengths_at:end].cast("I")
        if end + sum(lengths) != len(message):
            raise ValueError(f"notices of {size} ranks in {len(message)} bytes")
        words, records = self.words, message[_JOINED.size : lengths_at].cast("q")
        second_record = (number & 1) * _RECORD_WORDS
        attachments = []
        for rank, (first, length) in enumerate(zip(self.record_words, lengths, strict=True)):
            word = first + second_record
            if words[word + 1] < number:
                words[word : word + 4] = records[4 * rank : 4 * rank + 4]
            attachments.append(message[end : end + length])
            end += length
        return number, attachments


def notice_kind(message: memoryview) -> NoticeKind | None:
    """The kind of notice that a message is, or None if it is not one: then its first 64 bits differ from all."""
    return _KINDS.get(int.from_bytes(message[:8], sys.byteorder))


def forward_notices(notices: Iterable[tuple[int, bytes | memoryview]], limit: int) -> Iterator[bytes]:
    """The messages that forward these ENTER notices, of at most `limit` bytes each.

    Args:
        notices: each with its rank.
        limit: maximum size of a message in bytes; every single notice fits.
    """
    message = _KIND.pack(NoticeKind.FORWARDED)
    for rank, notice in notices:
        if len(message) + _ENTRY.size + len(notice) > limit:
            yield message
            message = _KIND.pack(NoticeKind.FORWARDED)
        message += _ENTRY.pack(rank, len(notice)) + notice
    yield message


def join_notices(number: int, notices: Sequence[bytes | memoryview], limit: int) -> bytes | None:
    """One message with the ENTER notices of all ranks for a collective.

    Args:
        number: the number of the collective.
        notices: one for each rank, in order.
        limit: maximum size of the message in bytes.

    Returns:
        None if a notice contains a text, or they are too long together.
    """
    begin, end = _HEADER.size - len(_NO_TEXTS), _HEADER.size
    if any(notice[begin:end] != _NO_TEXTS for notice in notices):
        return None
    records = [notice[_KIND.size : begin] for notice in notices]
    lengths = array("I", [len(notice) - end for notice in notices])
    attached = [notice[end:] for notice in notices]
    message = b"".join((_JOINED.pack(NoticeKind.JOINED, number), *records, lengths.tobytes(), *attached))
    return message if len(message) <= limit else None


def forwarded_notices(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The notices in a message made by `forward_notices`, each with its rank."""
    start = _KIND.size
    while start < len(message):
        rank, length = _ENTRY.unpack_from(message, start)
        start += _ENTRY.size
        yield rank, message[start : start + length]
        start += length


def _text(data: memoryview) -> str:
    return bytes(data).decode(errors="replace")


def _cut(text: str, num_bytes: int) -> str:
    """The longest prefix of `text` that fits into `num_bytes` bytes of UTF-8."""
    return text.encode(errors="replace")[:num_bytes].decode(errors="ignore")
