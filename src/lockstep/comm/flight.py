"""The flight record: what every rank is doing, from which line, readable by all the others.

Before its first step in a collective, a rank writes a fingerprint of the call (operation, shapes, dtype,
reduce op, root), its number, and where in the user's code it was made. After the step every rank
compares fingerprints: a mismatch raises on all of them, before anybody has read a byte. When a
wait cannot end, the same records say who is where.

[Note: cost] Calls and call sites repeat, so their texts are written once and then named by an
index. A collective writes four words and compares one for each peer.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType

import torch

from lockstep.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    RankLost,
)
from lockstep.shm.board import RING, Board, Failure, Record
from lockstep.shm.sync import PeerTrouble, TroubleKind
from lockstep.shm.team import Team

__all__ = ["INTERNAL_FOLDERS", "CallSite", "Flight", "call_site", "describe_tensor", "fingerprint"]

# Frames of these folders are not the user's: Lockstep itself and torch.
INTERNAL_FOLDERS = (str(Path(__file__).parents[1]) + "/", str(Path(torch.__file__).parent) + "/")
_INTERNAL_FILES = ("<frozen ", "<string>")

# A fingerprint no call has: its rank gave up this collective.
_GAVE_UP = -1

CallSite = tuple[CodeType | None, int]


@functools.lru_cache(maxsize=4096)
def _is_internal(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith(_INTERNAL_FILES) or "/contextlib.py" in name or "/threading.py" in name:
        return True
    # A test or tool inside our own package that calls a collective is a user of it.
    return name.startswith(INTERNAL_FOLDERS) and "/lockstep/testing/conformance/" not in name


def call_site() -> CallSite:
    """The innermost frame of the user's code that led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_internal(code):
            return code, frame.f_lineno
        frame = frame.f_back
    return None, 0


def _site_text(site: CallSite) -> str:
    code, line = site
    if code is None:
        return "an unknown line"
    path = code.co_filename
    tail = f":{line} in {code.co_name}"
    room = 250 - len(tail)
    return (path if len(path) <= room else "…" + path[-room + 1 :]) + tail


def describe_tensor(tensor: torch.Tensor) -> str:
    """`float32[2, 3]`: the form in which errors name a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def fingerprint(text: str) -> int:
    """A positive 63-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Flight:
    """The flight record of one group on one rank.

    Args:
        team: the ranks that take part.
        group_name: how errors call the group.
        global_ranks: global rank of each rank of the group.
    """

    def __init__(self, team: Team, group_name: str, global_ranks: Sequence[int]) -> None:
        self._team = team
        self._board: Board = team.board
        self._words = team.board.words
        self._group_name = group_name
        self._global_ranks = tuple(global_ranks)
        self._rank = team.rank
        self._calls: dict[object, tuple[int, int]] = {}
        self._call_keys: list[object | None] = [None] * RING
        self._sites: dict[CallSite, int] = {}
        self._site_keys: list[CallSite | None] = [None] * RING
        self._record_words = team.board.record_words
        self.number = 0
        self.broken: CollectiveError | None = None
        self._verify = self.verify  # bound once, not per collective

    def enter(self, key: object, describe: Callable[[], str], site: CallSite) -> None:
        """Record that this rank enters its next collective. Local.

        Args:
            key: whatever decides the fingerprint; equal keys have equal descriptions.
            describe: the text that peers compare and people read, such as
                `all_reduce(float32[10], SUM)`.
            site: where the user called it.

        Raises:
            CollectiveError: this group broke earlier; the first error is repeated.
        """
        if self.broken is not None:
            raise self._repeat()
        fingerprint_, call = self._calls.get(key) or self._add_call(key, describe())
        site_index = self._sites.get(site)
        if site_index is None:
            site_index = self._add_site(site)
        self.number = number = self.number + 1
        words = self._words
        word = self._record_words[self._rank] + (number & 1) * 8
        words[word] = fingerprint_
        words[word + 1] = number
        words[word + 2] = call
        words[word + 3] = site_index
        self._team.after_step = self._verify

    def _add_call(self, key: object, text: str) -> tuple[int, int]:
        index = self._board.add_call(text)
        old = self._call_keys[index]
        if old is not None:
            del self._calls[old]
        self._call_keys[index] = key
        self._calls[key] = entry = (fingerprint(text), index)
        return entry

    def _add_site(self, site: CallSite) -> int:
        index = self._board.add_site(_site_text(site))
        old = self._site_keys[index]
        if old is not None:
            del self._sites[old]
        self._site_keys[index] = site
        self._sites[site] = index
        return index

    def verify(self) -> None:
        """Compare what all ranks came for. Local; after the first step of a collective.

        Raises:
            CollectiveMismatch: not all came for the same. The group stays usable: every rank raises.
            CollectiveTimeout: a peer had given up waiting for this rank.
        """
        words = self._words
        parity = (self.number & 1) * 8
        mine = words[self._record_words[self._rank] + parity]
        for word in self._record_words:
            if words[word + parity] != mine:
                raise self._mismatch()

    def _mismatch(self) -> CollectiveError:
        records = [self._board.record(rank, self.number) for rank in range(self._team.world_size)]
        quitters = [rank for rank, record in enumerate(records) if record.fingerprint == _GAVE_UP]
        if quitters:
            return self.break_with(self._late_arrival(quitters))
        self._team.realign()
        groups: dict[int, list[int]] = {}
        for rank, record in enumerate(records):
            groups.setdefault(record.fingerprint, []).append(rank)
        # The smaller party is the culprit; with no majority nobody is singled out.
        largest = max(len(ranks) for ranks in groups.values())
        majorities = [ranks for ranks in groups.values() if len(ranks) == largest]
        culprits: list[int] = []
        if len(majorities) == 1:
            culprits = [rank for ranks in groups.values() if ranks is not majorities[0] for rank in ranks]
        lines = [
            f"  {self.names(ranks)}: {records[ranks[0]].call} at {_sites_of(records, ranks)}"
            for ranks in groups.values()
        ]
        return CollectiveMismatch(
            f"the ranks of {self._group_name} came for different things in collective #{self.number}:\n"
            + "\n".join(lines)
            + "\nEvery rank must call the same collective, in the same order, with the same shapes, dtype, reduce op "
            "and root. Look for a branch that only some ranks take.",
            self._globals(culprits),
        )

    def _late_arrival(self, quitters: list[int]) -> CollectiveError:
        failures = [self._board.failure(rank) for rank in quitters]
        return CollectiveTimeout(
            f"{self.name(self._rank)} came to collective #{self.number} of {self._group_name}, {self._own_call()}, but "
            f"{self.names(quitters)} had given up: {failures[0].message}",
            failures[0].culprits or self._globals([self._rank]),
        )

    def explain(self, trouble: PeerTrouble) -> CollectiveError:
        """The error for a wait that cannot end; breaks the group."""
        if trouble.kind == TroubleKind.CLOSED:
            return CollectiveAborted(
                f"{self._group_name} was shut down on {self.name(self._rank)} during {self._own_call()}"
            )
        if trouble.kind == TroubleKind.LATE:
            return self.break_with(self._explain_late(trouble))
        here = f"{self.name(self._rank)} waited in collective #{self.number} of {self._group_name}, {self._own_call()}"
        stories = [self._story(rank, trouble.kind) for rank in trouble.ranks]
        culprits = self._root_culprits(trouble)
        return self.break_with(RankLost(f"{'; '.join(stories)}. {here}", culprits))

    def _root_culprits(self, trouble: PeerTrouble) -> tuple[int, ...]:
        if trouble.kind != TroubleKind.FAILED:
            return self._globals(trouble.ranks)
        blamed = {culprit for rank in trouble.ranks for culprit in self._board.failure(rank).culprits}
        return tuple(sorted(blamed)) or self._globals(trouble.ranks)

    def _story(self, rank: int, kind: TroubleKind) -> str:
        record = self._board.latest_record(rank)
        last = (
            f"its last collective was #{record.number}, {record.call} at {record.site}"
            if record
            else ("it had not entered a collective yet")
        )
        if kind == TroubleKind.DEAD:
            return f"{self.name(rank)} died: its process is gone; {last}"
        if kind == TroubleKind.FAILED:
            return f"{self.name(rank)} failed: {self._board.failure(rank).message} ({last})"
        return f"{self.name(rank)} left the group while others still needed it; {last}"

    def _explain_late(self, trouble: PeerTrouble) -> CollectiveTimeout:
        places = []
        for rank in trouble.ranks:
            record = self._board.latest_record(rank)
            where = (
                f"was last seen in #{record.number}, {record.call} at {record.site}"
                if record
                else ("has not entered a collective yet")
            )
            places.append(f"{self.name(rank)} {where}")
        return CollectiveTimeout(
            f"{self.name(self._rank)} waited {trouble.waited_s:.1f} s in collective #{self.number} of "
            f"{self._group_name}, {self._own_call()}. Missing: {'; '.join(places)}. It may be stopped, stuck "
            "or far behind: look at its stack (py-spy dump --pid …), or give a longer timeout if it had work to do",
            self._globals(trouble.ranks),
        )

    def break_with(self, error: CollectiveError) -> CollectiveError:
        """Make `error` the fate of this group on this rank, and tell the peers."""
        if self.broken is None:
            self.broken = error
        # A peer that comes late to this very collective must not take it for finished.
        self._words[self._record_words[self._rank] + (self.number & 1) * 8] = _GAVE_UP
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        self._board.fail(Failure(first_line, error.culprits))
        return error

    def fail(self, message: str, culprits: tuple[int, ...] | None = None) -> None:
        """Tell the peers that this rank raised something; they raise RankLost with `message`.

        Args:
            message: what it raised and where.
            culprits: global ranks behind it; default this rank itself.
        """
        self._board.fail(Failure(message, self._globals([self._rank]) if culprits is None else culprits))

    def _repeat(self) -> CollectiveError:
        first = self.broken
        assert first is not None
        return type(first)(f"{self._group_name} broke earlier on this rank: {first}", first.culprits)

    def _own_call(self) -> str:
        # The fingerprint may say by now that this rank gave up; call and site are still there.
        record = self._board.record(self._rank, self.number)
        return f"{record.call} at {record.site}"

    def _globals(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._global_ranks[rank] for rank in ranks)

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of this group."""
        return self._global_ranks[rank]

    def name(self, rank: int) -> str:
        """`rank 2 (host, pid 4711)`, with the global rank."""
        identity = self._board.identity(rank)
        return f"rank {self._global_ranks[rank]} ({identity.host}, pid {identity.pid})"

    def names(self, ranks: Sequence[int]) -> str:
        """Several ranks, by name."""
        return ", ".join(self.name(rank) for rank in ranks)

    def position(self, rank: int) -> Record | None:
        """The last collective that a rank entered, or None."""
        return self._board.latest_record(rank)


def _sites_of(records: list[Record], ranks: list[int]) -> str:
    sites = dict.fromkeys(records[rank].site for rank in ranks)
    return " and ".join(sites)
