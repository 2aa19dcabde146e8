"""The flight recorder writes the flight record: what this rank is doing, and from which line, readable by all ranks.

Before its first step in a collective, a rank writes a fingerprint of the call (operation, shapes, dtype, reduce op,
root), its number, and where in the user's code it was made. After the step every rank compares fingerprints: a mismatch
raises on all of them, before any rank has read a byte. Shapes match if they differ only in dimensions of size 1, as in
sends and receives, or if one is flat and both have as many elements (`flat_shapes.py`). When a wait cannot end, the
same records say where each rank is.

[Note: two branches] Tensors of different shapes, from different lines, may be unrelated ones that a branch has brought
together. It is correct in programs where each rank has its own branch for the same call, so this is only a warning,
given once; and none if only the root's code differs from the rest, as it often does.

[Note: cost] Calls and call sites repeat, so their texts are written once and then referenced by index. A collective
writes nine words, five of them for the launcher (`lockstep.rank_status`), and compares one for each peer.
`benchmarks/case_record.py` measures the cost.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from lockstep import rank_status
from lockstep.comm.callsite import CallSite, describe_exception, site_text
from lockstep.comm.contract import Team
from lockstep.comm.deadlock import WAIT_FOR_EACH_OTHER, Deadlock
from lockstep.comm.flat_shapes import FlatShapes, Shapes
from lockstep.comm.reorder import Order, ReorderDetector
from lockstep.comm.wording import describe_mismatch, without_ones
from lockstep.errors import (
    AFTER_CTRL_C,
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    RankLost,
    SegmentDamaged,
)
from lockstep.frames import split_site
from lockstep.log import get_logger, warn_once
from lockstep.rank_status import CALL, NUMBER, RING, SITE, START, TEXT_BYTES
from lockstep.shm.control_blocks import Failure, Record, damage_text
from lockstep.shm.sync import FailureKind, PeerFailure

_logger = get_logger(__name__)

__all__ = ["FlightRecorder", "fingerprint"]


_E = TypeVar("_E", bound=CollectiveError)

# Errors with which a rank gives up without having failed itself: the ranks that waited for it raise the same.
_GIVEN_UP: dict[str, type[CollectiveError]] = {
    error.__name__: error for error in (CollectiveTimeout, CollectiveMismatch, SegmentDamaged)
}

_IN_EVALUATION = (
    "All ranks must call {}, but a loader with evaluation=True may give some ranks more batches: in a loop over it "
    "count with lockstep.metrics, or call this after the loop"
)
_FOR_ALL_RANKS = {
    "checkpoint.save": "All ranks must call checkpoint.save, though only rank 0 writes: call it outside of the branch",
    "checkpoint.load": "All ranks must call checkpoint.load, and each gets the state: call it outside of the branch",
    "metrics.synchronize": (
        "All ranks must call metrics.synchronize, and each gets the values: call it outside of the branch"
    ),
    "lockstep.any": "All ranks must call lockstep.any, and each gets the answer: call it outside of the branch",
    "lockstep.all": "All ranks must call lockstep.all, and each gets the answer: call it outside of the branch",
    "world.should_stop": "All ranks must call world.should_stop, after each step: call it outside of the branch",
    **{call: _IN_EVALUATION.format(call) for call in ("lockstep.mean", "lockstep.sum", "lockstep.all_gather")},
    "SyncBatchNorm": (
        "All ranks must run SyncBatchNorm in training mode: call model.eval() before what only one rank does"
    ),
}

_DECIDED_ALONE = (
    ". Nothing failed there. If it stopped because of its own value, such as its loss, let all ranks agree with "
    "lockstep.any(…)"
)
_SWAPPED = (
    " Flat tensors may be combined with others of equal size, but these ranks had them the other way round in an "
    "earlier call: they make the same calls in different order, and the result of that one mixes unrelated tensors."
)


def fingerprint(content: str | bytes) -> int:
    """A positive 63-bit hash of a text or of bytes, the same in every process."""
    data = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


# What ranks compare is one word: the fingerprint of the call, and in its lower bits a short one of the calling line.
_LINE_BITS = 20
_LINE_MASK = (1 << _LINE_BITS) - 1


class _RecordSlot:
    """The record slot of even, or of odd collectives, and what this rank last wrote into it.

    Args:
        parity: 0 for the slot of even collectives, 1 for that of odd ones.
        words: the record in the control block of this rank.
        fingerprint_word: index of the word with its fingerprint.
        peers: indices of the words with the other ranks' fingerprints.
    """

    __slots__ = ("fingerprint", "fingerprint_word", "key", "parity", "peers", "site", "words")

    def __init__(self, parity: int, words: memoryview, fingerprint_word: int, peers: tuple[int, ...]) -> None:
        self.parity = parity
        self.words = words
        self.fingerprint_word = fingerprint_word
        self.peers = peers
        self.fingerprint = 0
        self.key: object = None
        self.site: CallSite | None = None


class FlightRecorder:
    """Writes and reads the flight record of one group, on one rank.

    Args:
        team: the ranks of the group.
        group_name: the group's name in errors.
        global_ranks: global rank of each rank of the group.

    Attributes:
        group_name: the group's name in errors.
        number: collectives entered so far.
        status_words: of the status file; the engine sets `number` at FINISHED when a collective has succeeded.
        broken: the error that every further call repeats, or None.
    """

    def __init__(self, team: Team, group_name: str, global_ranks: Sequence[int]) -> None:
        self._team = team
        self._blocks = team.blocks
        self._words = team.blocks.words
        self.group_name = group_name
        self.global_ranks = tuple(global_ranks)
        self._rank = team.rank
        self._calls: dict[object, tuple[int, int]] = {}
        self._call_keys: list[object | None] = [None] * RING
        self._sites: dict[CallSite, tuple[int, int]] = {}
        self._site_keys: list[CallSite | None] = [None] * RING
        self._fingerprint_words = team.blocks.fingerprint_words
        self._slots = (self._make_slot(0), self._make_slot(1))
        self._slot = self._slots[0]
        self._status = rank_status.open_section(group_name)
        self.status_words, self._status_times = self._status.words, self._status.times
        self._reorder_detector = ReorderDetector()
        self._flat_shapes = FlatShapes()
        self._alike: set[frozenset[int]] = set()  # lines that lead to the same function
        self.number = 0
        self.broken: CollectiveError | None = None
        self._first_error: CollectiveError | None = None
        self._num_failed = 0  # calls that raised it, or another one
        team.on_arrival.append(self.verify)

    def _make_slot(self, parity: int) -> _RecordSlot:
        own = self._blocks.record_words[self._rank] + 8 * parity
        peers = tuple(words[parity] for rank, words in enumerate(self._fingerprint_words) if rank != self._rank)
        return _RecordSlot(parity, self._words[own : own + 4], self._fingerprint_words[self._rank][parity], peers)

    def enter(self, key: object, describe: Callable[[], str], site: CallSite, start_s: float) -> None:
        """Record that this rank is entering its next collective. Local.

        Args:
            key: determines the fingerprint; equal keys mean equal descriptions.
            describe: returns the text that peers compare and people read, such as `all_reduce(float32[10], SUM)`.
            site: where the user called it.
            start_s: start time, in seconds of the monotonic clock.

        Raises:
            CollectiveError: this group is broken; the first error is repeated.
        """
        if self.broken is not None:
            raise self.repeat()
        number = self.number + 1
        self._slot = slot = self._slots[number & 1]
        # What the slot already holds, as in a loop, is not written again.
        if key != slot.key or (site is not slot.site and site != slot.site):
            self._write(slot, key, describe, site)
        self.number = slot.words[1] = number
        self._status_times[START] = start_s
        self.status_words[NUMBER] = number
        self._team.is_entering = True

    def _write(self, slot: _RecordSlot, key: object, describe: Callable[[], str], site: CallSite) -> None:
        """Write what the next collective is, and its line."""
        call = self._calls.get(key) or self._add_call(key, describe())
        line = self._sites.get(site) or self._add_site(site)
        slot.words[2], slot.words[3] = call[1], line[1]
        self._words[slot.fingerprint_word] = slot.fingerprint = call[0] | line[0]
        self.status_words[CALL + 2 * slot.parity], self.status_words[SITE + 2 * slot.parity] = call[1], line[1]
        slot.key, slot.site = key, site

    def publish_waiting(self, text: str) -> None:
        """Tell the launcher which send or receive this rank is waiting in; empty for none. Local."""
        self._status.publish_waiting(text)

    def close(self) -> None:
        """Remove the group from the status file. Local; reports errors that the script has caught and passed over."""
        self._status.close()
        first, ends_well = self._first_error, isinstance(sys.exc_info()[1], SystemExit | None)
        if first is not None and ends_well and (self._rank == 0 or self.global_ranks[0] in first.culprits):
            get_logger(__name__).warning(
                f"{self._num_failed} call(s) of {self.group_name} failed, and the script caught the errors and went on "
                "without their results (for an averaging of gradients: without that step). The first was "
                f"{type(first).__name__}: {first}"
            )

    def _add_call(self, key: object, text: str) -> tuple[int, int]:
        index = self._blocks.add_call(text)
        self._status.write_call(index, text)
        old = self._call_keys[index]
        if old is not None:
            del self._calls[old]
        self._call_keys[index] = key
        self._calls[key] = entry = (fingerprint(without_ones(text)) & ~_LINE_MASK, index)
        return entry

    def _add_site(self, site: CallSite) -> tuple[int, int]:
        text = site_text(site)
        index = self._blocks.add_site(text)
        self._status.write_site(index, text)
        old = self._site_keys[index]
        if old is not None:
            del self._sites[old]
        self._site_keys[index] = site
        self._sites[site] = entry = (fingerprint(text) & _LINE_MASK, index)
        self._reorder_detector.note_line(entry[0], self.number + 1)
        return entry

    def verify(self) -> None:
        """Compare the calls of all ranks. Local; after the first step of a collective.

        Raises:
            CollectiveMismatch: they differ. The group stays usable: every rank raises.
        """
        words, slot = self._words, self._slot
        own = slot.fingerprint
        for word in slot.peers:
            if words[word] != own:
                self._compare()
                return

    def _compare(self) -> None:
        """Find out why fingerprints differ: other calls, reordered calls, or only other lines or shapes."""
        found = [self._words[words[self.number & 1]] for words in self._fingerprint_words]
        calls, lines = {one & ~_LINE_MASK for one in found}, [one & _LINE_MASK for one in found]
        if len(calls) > 1:
            if not self._flat_shapes.knows(tuple(found)):
                self._compare_shapes(tuple(found))
            return
        self._compare_functions(frozenset(lines))
        order = self._reorder_detector.judge(self.number, calls.pop(), lines)
        if order is Order.REORDERED:
            raise self._damaged() or self.note_failed(self._reordered(lines))
        if order is Order.SUSPICIOUS:
            own = self._blocks.record(self._rank, self.number)
            warn_once(
                _logger,
                f"{own.call} of {self.group_name} at {own.site}: another rank makes this call and the previous one in "
                "the opposite order. Unless this is intended, the results mix unrelated tensors",
            )

    def _compare_functions(self, lines: frozenset[int]) -> None:
        """Raise if ranks called different functions of ours, such as `lockstep.mean` and `sum`, that send the same."""
        if lines in self._alike:
            return
        sites = [self._blocks.record(rank, self.number).site for rank in range(self._team.world_size)]
        if len({called for _, called in map(split_site, sites) if called}) > 1:
            raise self._damaged() or self.note_failed(self._mismatch())
        if len(self._alike) >= RING:
            self._alike.clear()
        self._alike.add(lines)

    def _compare_shapes(self, found: tuple[int, ...]) -> None:
        """Raise unless the calls differ only in shapes that match. See [Note: two branches]."""
        damage = self._damaged()
        if damage is not None:
            raise damage
        records = [self._blocks.record(rank, self.number) for rank in range(self._team.world_size)]
        texts = [record.call for record in records]
        are_whole = not any(
            (fingerprint(without_ones(text)) ^ one) & ~_LINE_MASK for text, one in zip(texts, found, strict=True)
        )
        shapes = self._flat_shapes.judge(found, texts) if are_whole else Shapes.DIFFERENT
        if shapes is not Shapes.AGREE:
            raise self.note_failed(self._mismatch(_SWAPPED if shapes is Shapes.SWAPPED else ""))
        own = records[self._rank]
        if "root=" not in own.call and len({one & _LINE_MASK for one in found}) > 1:
            other = next(one for one in records if (one.fingerprint ^ own.fingerprint) & ~_LINE_MASK)
            warn_once(
                _logger,
                f"{own.call} of {self.group_name} at {own.site}: another rank called {other.call} at {other.site}. "
                "Unless these are the same tensors, the results mix unrelated ones",
            )

    def note_failed(self, error: _E) -> _E:
        """Count an error that a call of this rank raises, for `close`; returns it. Local."""
        self._first_error = self._first_error or error
        self._num_failed += 1
        return error

    def note_expected(self, error: CollectiveError) -> None:
        """Uncount an error that a library expects and handles. Local."""
        self._num_failed -= 1
        self._first_error = None if self._first_error is error else self._first_error

    def _damaged(self) -> CollectiveError | None:
        """The error if no rank can have written a record of this collective; breaks the group. None otherwise."""
        if not self._blocks.can_be_damaged:
            return None
        for rank in range(self._team.world_size):
            what = self._blocks.find_damage(rank, self.number)
            record = None if what else self._blocks.record(rank, self.number)
            is_whole = record is not None and len(record.call.encode()) < TEXT_BYTES - 4
            if (
                record is not None
                and is_whole
                and (record.fingerprint ^ fingerprint(without_ones(record.call))) & ~_LINE_MASK
            ):
                what = f"its fingerprint of collective #{self.number} is not that of {record.call[:80]!r}"
            if what is not None:
                text = damage_text(f"of {self.name(rank)}, {what}")
                return self.break_with(SegmentDamaged(f"{self.name(self._rank)} in {self.describe_activity()}: {text}"))
        return None

    def _reordered(self, lines: Sequence[int]) -> CollectiveMismatch:
        """The error for ranks that made their last two calls in opposite order."""
        now = [self._blocks.record(rank, self.number) for rank in range(self._team.world_size)]
        self._team.realign()
        parties: dict[int, list[int]] = {}
        for rank, line in enumerate(lines):
            parties.setdefault(line, []).append(rank)
        texts = {line: now[ranks[0]].site for line, ranks in parties.items()}
        stories = [f"  {self.names(ranks)}: last from {texts[line]}" for line, ranks in parties.items()]
        return CollectiveMismatch(
            f"the ranks of {self.group_name} made two calls in different order, {now[self._rank].call} in collectives "
            f"#{self.number - 1} and #{self.number}:\n"
            + "\n".join(stories)
            + f"\nThe other call of each was made from the other line. The result of #{self.number - 1} mixes "
            "unrelated tensors. Every rank must make the same calls in the same order.",
            self._globals(_minority(parties.values())),
        )

    def _mismatch(self, hint: str = "") -> CollectiveMismatch:
        records = [self._blocks.record(rank, self.number) for rank in range(self._team.world_size)]
        self._team.realign()
        groups: dict[tuple[int, str], list[int]] = {}
        for rank, record in enumerate(records):
            groups.setdefault((record.fingerprint & ~_LINE_MASK, split_site(record.site)[1]), []).append(rank)
        lines = [
            f"  {self.names(ranks)}: {_call_at(records[ranks[0]].call, _sites_of(records, ranks))}"
            for ranks in groups.values()
        ]
        what, advice = describe_mismatch(record.call for record in records)
        return CollectiveMismatch(
            f"the ranks of {self.group_name} {what} as collective #{self.number}:\n"
            + "\n".join(lines)
            + f"\n{advice}{hint}"
            + (_advice(record.site for record in records) if len({call for call, _ in groups}) > 1 else ""),
            self._globals(_minority(groups.values())),
        )

    # ---- waits that cannot end -------------------------------------------------------------------

    def explain(self, failure: PeerFailure, activity: str | None = None, hint: str = "") -> CollectiveError:
        """The error for a wait that cannot end; breaks the group.

        Args:
            failure: how the awaited ranks failed.
            activity: what this rank was waiting in; default the current collective.
            hint: what to add if a rank is late.
        """
        if activity is None:
            activity = self.describe_activity()
        if isinstance(failure, Deadlock):
            return self._explain_deadlock(failure)
        if failure.ranks(FailureKind.CLOSED):
            return CollectiveAborted(f"{self.group_name} was shut down on {self.name(self._rank)} during {activity}")
        if failure.ranks(FailureKind.LATE):
            return self.break_with(self._explain_late(failure, activity, hint))
        failures = {rank: self._blocks.failure(rank) for rank in failure.ranks(FailureKind.FAILED)}
        given_up = self._explain_given_up(failure, failures, activity)
        if given_up is not None:
            error, reason = given_up
            return self.break_with(error, reason)
        return self.break_with(self._explain_loss(failure, failures, activity))

    def explain_message(self, failure: PeerFailure, activity: str, hint: str = "") -> CollectiveError:
        """The error for a send or receive that cannot end; breaks the group unless all ranks left in good order.

        Args:
            failure: how the awaited ranks failed.
            activity: the send or receive.
            hint: what to add if a rank is late.
        """
        if all(kind is FailureKind.LEFT for kind in failure.kinds.values()):
            return self._explain_loss(failure, {}, activity)
        return self.explain(failure, activity, hint)

    def explain_held_up(self, call: str, waited_s: float) -> CollectiveError:
        """The error for calls that a callback has blocked for too long; breaks the group."""
        return self.break_with(
            CollectiveTimeout(
                f"{call} of {self.group_name} has not started on {self.name(self._rank)}: for {waited_s:g} s a "
                "callback of an earlier call has occupied the thread that should run it. In a callback, wait with "
                "wait() of the call's handle; that of a future does not let the call run",
                self._globals([self._rank]),
            )
        )

    def _explain_deadlock(self, deadlock: Deadlock) -> CollectiveMismatch:
        error = CollectiveMismatch(deadlock.text, deadlock.culprits)
        self.break_with(error, deadlock.text.replace(":\n  ", ": ").replace("\n  ", "; ").replace("\n", ". "))
        return error

    def describe_activity(self) -> str:
        """What this rank is in: `collective #5 of the default group, barrier() at train.py:81 in main`."""
        return f"collective #{self.number} of {self.group_name}, {self._own_call()}"

    def _explain_late(self, failure: PeerFailure, activity: str, hint: str) -> CollectiveTimeout:
        late = failure.ranks(FailureKind.LATE)
        clauses = [f"{self.name(rank)}, which {self._last_seen(rank)}" for rank in late]
        return CollectiveTimeout(
            f"{self.name(self._rank)} waited {failure.waited_s:.1f} s in {activity}. Missing: {'; '.join(clauses)}. "
            f"{hint}It may be stopped, stuck or far behind: look at its stack (py-spy dump --pid …), or, if it had "
            "work to do, give a longer timeout by lockstep.init(timeout=…), init_process_group or new_group"
            f"{self._advice_against(late)}",
            self._globals(late),
        )

    def _explain_given_up(
        self, failure: PeerFailure, failures: Mapping[int, Failure], activity: str
    ) -> tuple[CollectiveError, str] | None:
        """The error if the other ranks only gave up, with their reason; None if a rank itself failed."""
        kinds = {reported.kind for reported in failures.values()}
        error = _GIVEN_UP.get(next(iter(kinds), ""))
        gave_up = list(failures)
        if error is None or len(kinds) > 1 or len(gave_up) < len(failure.kinds):
            return None
        first = failures[gave_up[0]]
        blamed = sorted({culprit for rank in gave_up for culprit in failures[rank].culprits})
        if first.message.startswith(WAIT_FOR_EACH_OTHER):  # this rank is among them
            return error(first.message, tuple(blamed)), first.message
        verb = "came to" if self.global_ranks[self._rank] in blamed else "waited in"
        text = f"{self.name(self._rank)} {verb} {activity}, but {self.names(gave_up)} had given up. {first.message}"
        return error(text, tuple(blamed)), first.message

    def _explain_loss(self, failure: PeerFailure, failures: Mapping[int, Failure], activity: str) -> RankLost:
        """Name the ranks that caused the failure; the ranks missing here may only have failed in consequence."""
        raised = [
            rank
            for rank, reported in failures.items()
            if not reported.culprits or self.global_ranks[rank] in reported.culprits
        ]
        dead, left = failure.ranks(FailureKind.DEAD), failure.ranks(FailureKind.LEFT)
        named = raised or dead or list(failures)[:1] or left
        if named == list(failures)[:1] and named != raised:
            culprits = tuple(sorted({culprit for reported in failures.values() for culprit in reported.culprits}))
        else:
            culprits = self._globals(named)
        stories = [self._story(rank, failure.kinds[rank], failures.get(rank)) for rank in named]
        is_decision = all(rank not in failures and rank in left for rank in named)
        advice = self._advice_on_loss(named, failures, is_decision)
        return RankLost(f"{'; '.join(stories)}. {self.name(self._rank)} waited for it in {activity}{advice}", culprits)

    def _advice_on_loss(self, lost: Sequence[int], failures: Mapping[int, Failure], is_decision: bool) -> str:
        if any(KeyboardInterrupt.__name__ in reported.message for reported in failures.values()):
            return f". {AFTER_CTRL_C}"
        return self._advice_against(lost) or (_DECIDED_ALONE if is_decision else "")

    def _advice_against(self, missing: Sequence[int]) -> str:
        """Advice if this rank called a function of ours that all ranks must call, and the missing ones did not."""
        if not self.number:
            return ""
        latest = [self._blocks.latest_record(rank) for rank in missing]
        own = split_site(self._blocks.record(self._rank, self.number).site)[1]
        did_so = any(one is not None and split_site(one.site)[1] == own for one in latest)
        return "" if did_so or own not in _FOR_ALL_RANKS else f". {_FOR_ALL_RANKS[own]}"

    def _story(self, rank: int, kind: FailureKind, failure: Failure | None) -> str:
        if failure is not None and failure.kind in ("", CollectiveAborted.__name__):
            return f"{self.name(rank)} failed: it {failure.message} ({self._last_seen(rank)})"
        if failure is not None:  # Its message is a sentence about other ranks.
            return f"{self.name(rank)} gave up, because {failure.message} ({self._last_seen(rank)})"
        if kind is FailureKind.DEAD:
            return f"{self.name(rank)} died: its process is gone; it {self._last_seen(rank)}"
        return f"{self.name(rank)} left the group while others still needed it; it {self._last_seen(rank)}"

    def _last_seen(self, rank: int) -> str:
        record = self._blocks.latest_record(rank)
        if record is None:
            seen = "had not entered a collective yet"
        else:
            seen = f"was last seen in collective #{record.number}, {_call_at(record.call, record.site)}"
        waiting = self._team.waiting(rank)
        return f"{seen}, then in {waiting}" if waiting else seen

    # ---- the end of the group --------------------------------------------------------------------

    def break_with(self, error: CollectiveError, reason: str | None = None) -> CollectiveError:
        """Break the group on this rank: every further call repeats `error`. Tells the peers.

        Args:
            error: raised on this rank.
            reason: what the peers are told; default the first line of `error`.
        """
        if self.broken is None:
            self.broken = self.note_failed(error)
        message = str(error).splitlines()[0] if reason is None else reason
        self._blocks.fail(Failure(type(error).__name__, error.culprits, message))
        return error

    def interrupt(self, error: BaseException) -> None:
        """Break the group because an exception on this rank alone cut a collective short.

        For example KeyboardInterrupt or MemoryError. The ranks cannot be aligned again. Tells the peers.
        """
        message = describe_exception(error)
        advice = f". {AFTER_CTRL_C}" if isinstance(error, KeyboardInterrupt) else ""
        self.broken = CollectiveAborted(
            f"{self.name(self._rank)} {message}, in the middle of collective #{self.number} of {self.group_name}, "
            f"{self._own_call()}{advice}",
            self._globals([self._rank]),
        )
        rank_status.note_raised()
        self._blocks.fail(Failure(CollectiveAborted.__name__, self.broken.culprits, message))

    def fail(self, message: str, culprits: tuple[int, ...] | None = None) -> None:
        """Tell the peers that this rank raised an exception; they raise RankLost with `message`.

        Args:
            message: what it raised, and where.
            culprits: global ranks that caused it; default this rank itself.
        """
        self._first_error = None  # nobody passes over it: this rank ends with an error
        own = self.global_ranks[self._rank]
        blamed = (own,) if culprits is None else culprits
        if own in blamed:
            rank_status.note_raised()
        self._blocks.fail(Failure("", blamed, message))

    def repeat(self) -> CollectiveError:
        """The error that broke this group, to be raised again."""
        first = self.broken
        assert first is not None
        return self.note_failed(type(first)(f"{self.group_name} broke earlier on this rank: {first}", first.culprits))

    def _own_call(self) -> str:
        record = self._blocks.record(self._rank, self.number)
        return _call_at(record.call, record.site)

    def _globals(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.global_ranks[rank] for rank in ranks)

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of this group."""
        return self.global_ranks[rank]

    def name(self, rank: int) -> str:
        """`rank 2 (host, pid 4711)`, with the global rank."""
        identity = self._blocks.identity(rank)
        return f"rank {self.global_ranks[rank]} ({identity.host}, pid {identity.pid})"

    def names(self, ranks: Sequence[int]) -> str:
        """The names of several ranks, as `name` gives them."""
        return ", ".join(self.name(rank) for rank in ranks)


def _call_at(call: str, site: str) -> str:
    """`barrier() at train.py:81 in main`; if a function of ours was called there, its name comes first."""
    line, called = split_site(site)
    return f"{called} (in its {call}) at {line}" if called else f"{call} at {line}"


def _advice(sites: Iterable[str]) -> str:
    """Advice if only some ranks called a function of ours that all ranks must call."""
    called = {call for _, call in map(split_site, sites)}
    if len(called) < 2:  # all of them, or none
        return ""
    return "".join(f" {text}." for call, text in _FOR_ALL_RANKS.items() if call in called)


def _minority(parties: Iterable[list[int]]) -> list[int]:
    """The culprits: the ranks outside the largest party. Empty if no single party is the largest."""
    ordered = sorted(parties, key=len, reverse=True)
    if len(ordered) > 1 and len(ordered[0]) == len(ordered[1]):
        return []
    return sorted(rank for ranks in ordered[1:] for rank in ranks)


def _sites_of(records: list[Record], ranks: list[int]) -> str:
    sites = dict.fromkeys(records[rank].site for rank in ranks)
    return " and ".join(sites)
