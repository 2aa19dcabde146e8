"""Point to point for one group on one rank: which thread moves messages, deadlines, errors.

A mailbox (`shm/mailbox.py`) moves messages only while a thread calls it. A thread that waits for a message drives the
mailbox itself (`PointToPoint.drive`): a message that is already there costs no thread switch. While no thread waits, a
background thread of the group drives it; that thread is started by the first operation that cannot finish at once. So
operations progress while this rank computes or is in a collective. Both kinds of thread go to sleep when nothing has
moved for a while, until a peer wakes them (`shm/doorbell.py`), and check the peers as rarely as a collective does.

[Note: deadlines] A receive may be posted long before its message is due. Its deadline counts from the moment at which a
thread waits for it. An operation that no thread waits for ends with its peer, or with the group.

[Note: what breaks a group] A pair that disagrees about a message (CollectiveMismatch) has lost that message and nothing
else. When a rank leaves in good order, only messages with it end: a server keeps serving its other clients. A rank that
died or failed, or did not come in time, is an error that breaks the group on this rank as it does in a collective:
peers that wait for this rank learn of it at once.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import torch

from lockstep.comm import clock
from lockstep.comm.callsite import CallSite, call_site, describe_exception, site_text
from lockstep.comm.contract import Team
from lockstep.comm.deadlock import Deadlock, DeadlockDetector, note_messages, note_other_caller
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.comm.tensors import FlatTensor, check_memory, check_output, check_tensor, settled
from lockstep.comm.user_threads import MAIN_THREAD
from lockstep.comm.work import DoneMessage, MessageWork, compute_alone, source_of
from lockstep.errors import CollectiveAborted, CollectiveError, CollectiveMismatch, InputError, InputTypeError
from lockstep.shm.base_mailbox import BaseMailbox
from lockstep.shm.cores import LONG_YIELD_S, LONGEST_NAP_S, own_cores
from lockstep.shm.messages import ANY_SOURCE, Label, Receive, Send
from lockstep.shm.sync import MISSED_AFTER_S, FailureKind, PeerFailure, PeerState, next_look

__all__ = ["PointToPoint"]

_YIELD_FOR_S = 0.001
_THREAD_NAPS_FOR_S = 0.002
_IDLE_NAP_S = 0.002
_THREAD_RESTS_AFTER_S = 0.02
_THREAD_RESTS_BESIDE_DRIVER_S = 0.004  # a wait that took longer wakes it afterwards, if needed
_TRY_AGAIN_S = 0.002
_THREAD_LOOKS_EVERY_S = 0.5  # the deadline of a future may start while it sleeps
_CLOSE_PATIENCE_S = 1.0
_MAPPED_WITHIN_S = 1.0  # if a rank whose memory cannot be mapped is gone, that is known by then
_LABEL_CACHE_ENTRIES = 1024
_NUM_HINTS = 3


class PointToPoint:
    """Point to point in one group on one rank.

    Args:
        team: the ranks of the group.
        recorder: its flight recorder.
        mailbox: moves the messages.
        make_detector: creates the deadlock detector, given a function that describes the awaited message; None disables
            detection.
    """

    def __init__(
        self,
        team: Team,
        recorder: FlightRecorder,
        mailbox: BaseMailbox,
        make_detector: Callable[[Callable[[], str]], DeadlockDetector] | None = None,
    ) -> None:
        self._team = team
        self._recorder = recorder
        self._mailbox = mailbox
        self._lock = threading.Lock()  # guards the mailbox and _works
        self._works: dict[Send | Receive, MessageWork] = {}
        self._labels: dict[tuple[torch.dtype, torch.Size, CallSite], Label] = {}
        self._spins = max(team.waiter.spins // 4, 1)
        self._drivers: set[int] = set()  # threads in `drive`
        self._thread: threading.Thread | None = None
        self._has_work = threading.Event()
        self._closed = False
        self._awaited: Send | Receive | None = None  # the message that is checked for deadlocks
        self._detector = None if make_detector is None else make_detector(self._describe_awaited)
        note_messages(self)

    # ---- operations ----------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout_s: float) -> DoneMessage | MessageWork:
        """Start sending a tensor. Local.

        Args:
            tensor: any shape and dtype; must not change before the send has finished.
            peer: group rank of the receiver; may be this rank itself.
            tag: a receive must have the same tag to match; at least 0.
            timeout_s: seconds from the first wait until the deadline.

        Raises:
            RankLost: the peer is gone.
            InputError, InputTypeError: not a dense tensor; no such rank or tag.
        """
        tensor = settled(check_tensor(tensor, "send"))
        check_memory(tensor, "send")
        peer, tag = self._check_address("send", peer, tag)
        item = FlatTensor(tensor)
        label = self._label(tensor, call_site())
        if peer != self._team.rank:
            self._refuse_if_gone(Send(tag, label, item.flat, peer=peer))
        with self._lock:
            send = self._mailbox.send(peer, tag, label, item.flat.view(torch.uint8))
            work = self._track(send, item, timeout_s)
            finished = self._take_finished()
        self._finish(finished)
        return DoneMessage(tensor, source_of(send)) if work is None else work

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout_s: float) -> DoneMessage | MessageWork:
        """Start receiving a tensor. Local.

        Args:
            tensor: of the shape and dtype of the sent one.
            peer: group rank of the sender; None for any.
            tag: only a send with the same tag matches.
            timeout_s: seconds from the first wait until the deadline.

        Raises:
            InputError, InputTypeError: not a dense tensor; no such rank or tag.
        """
        check_memory(check_output(tensor, "recv"), "recv")
        source, tag = self._check_address("recv", ANY_SOURCE if peer is None else peer, tag, peer is None)
        item = FlatTensor(tensor, is_read=False)
        label = self._label(tensor, call_site())
        with self._lock:
            receive = self._mailbox.receive(source, tag, label, item.flat.view(torch.uint8))
            work = self._track(receive, item, timeout_s)
            finished = self._take_finished()
        self._finish(finished)
        if work is None:
            item.write_back()
            return DoneMessage(tensor, source_of(receive))
        self._advance(blocking=True)  # The message may already be there, and its sender does not wake this rank again.
        return work

    def _check_address(self, name: str, peer: int, tag: int, is_from_any: bool = False) -> tuple[int, int]:
        """Peer and tag as Python integers; NumPy integers and one-element tensors are accepted."""
        if self._recorder.broken is not None:
            raise self._recorder.repeat()
        if threading.get_ident() != MAIN_THREAD:
            note_other_caller()
        peer, tag = _as_int(name, "rank", peer), _as_int(name, "tag", tag)
        if not 0 <= tag < 1 << 63:
            raise InputError(f"{name}: the tag is {tag}; expected an integer from 0 on")
        if not is_from_any and not 0 <= peer < self._team.world_size:
            raise InputError(
                f"{name}: there is no rank {peer} in {self._recorder.group_name}, which has "
                f"{self._team.world_size} ranks"
            )
        return peer, tag

    def _label(self, tensor: torch.Tensor, site: CallSite) -> Label:
        key = tensor.dtype, tensor.shape, site
        label = self._labels.get(key)
        if label is None:
            if len(self._labels) >= _LABEL_CACHE_ENTRIES:
                self._labels.clear()
            dtype = str(tensor.dtype).removeprefix("torch.")
            label = self._labels[key] = Label(dtype, tuple(tensor.shape), site_text(site))
        return label

    def _refuse_if_gone(self, send: Send) -> None:
        """Raise if the peer is gone: otherwise a small message would go into a ring that nobody reads."""
        gone = self._gone([send.peer])
        if gone:
            raise self._recorder.explain_message(PeerFailure(gone, 0.0), self.name_of(send))

    def _track(self, operation: Send | Receive, item: FlatTensor, timeout_s: float) -> MessageWork | None:
        """A handle for an operation that has not finished yet, or has failed; else None. Under the lock."""
        if operation.done and operation.conflict is None:
            return None
        work = MessageWork(self, operation, item, timeout_s)
        self._works[operation] = work
        if not operation.done:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="lockstep-p2p", daemon=True)
                self._thread.start()
            if not self._has_work.is_set():
                self._has_work.set()
        return work

    # ---- moving along --------------------------------------------------------------------------------

    def drive(self, work: MessageWork, timeout_s: float | None) -> None:
        """Move messages until `work` has finished, or `timeout_s` seconds have passed. Local."""
        work.start_deadline()
        started = time.perf_counter()
        thread = threading.get_ident()
        self._drivers.add(thread)
        try:
            for _ in range(self._spins):
                self._advance()
                if work.is_completed():
                    return
            self._drive_slowly(work, timeout_s)
        finally:
            self._drivers.discard(thread)
            if self._detector is not None:
                self._detector.end()
            if self._works and not self._has_work.is_set():
                self._has_work.set()
            clock.add(time.perf_counter() - started)

    def _drive_slowly(self, work: MessageWork, timeout_s: float | None) -> None:
        began = moved_at = now = time.monotonic()
        since_s = began if work.awaited_since_s is None else work.awaited_since_s
        left_s = since_s + work.timeout_s - began
        if timeout_s is not None:
            left_s = min(left_s, timeout_s)
        num_alarms = self._team.num_alarms
        look_at = next_look(began, began, left_s, self._team.failures_wake_waits)
        may_yield = own_cores.may_yield(began)
        seen: int | None = None
        with _PublishedWait(self._team, self._recorder) as published:
            while not work.is_completed():
                if self._closed:  # In a fork of the rank; when a rank shuts down, its messages end.
                    raise CollectiveAborted(f"{self.name_of(work.operation)}: not in this process")
                has_moved = self._advance()
                now = time.monotonic()
                if has_moved:
                    moved_at, may_yield = now, own_cores.may_yield(now)
                if now >= look_at:
                    published.publish(work.operation)
                    num_alarms = self._team.num_alarms
                    look_at = self._look_and_plan(began, now, left_s)
                    if timeout_s is None:  # otherwise the caller may do something else afterwards
                        look_at = min(look_at, now + self._look_for_deadlock(work, now - began))
                if timeout_s is not None and now - began >= timeout_s:
                    return
                if may_yield and now - moved_at <= _YIELD_FOR_S:
                    before = now
                    now = own_cores.give_up(before)
                    may_yield = now - before <= LONG_YIELD_S
                else:
                    seen = self._sleep(work.is_completed, num_alarms, look_at - now, now - moved_at, seen)
                    if seen is None:
                        moved_at = time.monotonic()
                    if num_alarms != self._team.num_alarms:
                        look_at = now

    def _sleep(
        self, is_over: Callable[[], bool], num_alarms: int, timeout_s: float, waited_s: float, seen: int | None
    ) -> int | None:
        """Sleep until a peer wakes this rank, at most `timeout_s` seconds. Call `_advance` before it.

        Args:
            is_over: returns whether there is nothing more to wait for.
            num_alarms: the team's number of alarms when the peers were last checked.
            timeout_s: the longest sleep, in seconds.
            waited_s: seconds since something last moved.
            seen: the return value of the previous call in this wait.

        Returns:
            The `seen` for the next call in this wait; None, without sleep, if something has moved.
        """
        if seen is None or not self._mailbox.is_armed(seen):
            seen = self._mailbox.arm()
            if self._advance(blocking=True):
                return None
            timeout_s = min(timeout_s, MISSED_AFTER_S)
        if not is_over() and num_alarms == self._team.num_alarms:
            self._mailbox.sleep(seen, timeout_s, waited_s / 20)
        return seen

    def _is_needed(self) -> bool:
        """Whether there are messages to move, and no other thread moves them."""
        return bool(self._works) and not self._drivers

    def _loop(self) -> None:
        """The background thread: moves messages while no thread waits for one."""
        needed_at = moved_at = look_at = time.monotonic()
        num_alarms = self._team.num_alarms
        seen: int | None = None
        compute_alone()
        while not self._closed:
            now = time.monotonic()
            if self._is_needed():
                needed_at = now
                if self._advance():
                    moved_at = now
                if now >= look_at or num_alarms != self._team.num_alarms:
                    num_alarms = self._team.num_alarms
                    look_at = self._look_and_plan(moved_at, now, threading.TIMEOUT_MAX)
                    look_at = min(look_at, now + _THREAD_LOOKS_EVERY_S)
                if now - moved_at > _THREAD_NAPS_FOR_S:
                    waited_s = now - moved_at
                    seen = self._sleep(lambda: not self._is_needed(), num_alarms, look_at - now, waited_s, seen)
                    if seen is None:
                        moved_at = time.monotonic()
                    continue
            elif now - needed_at > (_THREAD_RESTS_BESIDE_DRIVER_S if self._drivers else _THREAD_RESTS_AFTER_S):
                self._has_work.clear()
                if not self._is_needed() and not self._closed:
                    self._has_work.wait()
                needed_at = moved_at = look_at = time.monotonic()
                continue
            if self._is_needed():
                time.sleep(LONGEST_NAP_S)
            else:
                time.sleep(_THREAD_RESTS_BESIDE_DRIVER_S if self._drivers else _IDLE_NAP_S)

    def _advance(self, blocking: bool = False) -> bool:
        """Move what can be moved now, unless another thread is doing so; returns whether something moved."""
        if not self._lock.acquire(blocking):
            return False
        try:
            if self._closed:
                return False
            before = self._mailbox.num_records
            self._progress()
            moved = self._mailbox.num_records != before
            finished = self._take_finished()
        finally:
            self._lock.release()
        self._finish(finished)
        return moved

    def _progress(self) -> None:
        """Move messages once. Under the lock."""
        try:
            self._mailbox.progress()
        except BaseException as error:
            # A record may be half read, so there is no way to continue.
            self._break(error)
            if not isinstance(error, Exception):
                raise

    def _break(self, error: BaseException) -> None:
        """Break the group because this rank cannot move its messages."""
        name = self._recorder.name(self._team.rank)
        broken = CollectiveAborted(
            f"{name} {describe_exception(error)}, while it moved messages of {self._recorder.group_name}",
            (self._recorder.global_rank(self._team.rank),),
        )
        self._recorder.break_with(broken)

    def _take_finished(self) -> list[MessageWork]:
        """The handles of the operations that have finished. Under the lock."""
        done = self._mailbox.take_finished()
        return [self._works.pop(operation) for operation in done if operation in self._works]

    def _finish(self, works: Iterable[MessageWork]) -> None:
        """Complete these handles. Not under the lock."""
        for work in works:
            conflict = work.operation.conflict
            self._end(work, None if conflict is None else self._mismatch(work.operation, conflict))

    def _end(self, work: MessageWork, error: CollectiveError | None) -> None:
        """Set the outcome, and wake the thread that waits for it if that is another one."""
        work.finish(error)
        if len(self._drivers) > (threading.get_ident() in self._drivers):
            self._mailbox.wake_here()

    # ---- failures ------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """End the messages that can no longer finish. False, with nothing done, if another thread does so."""
        if not self._lock.acquire(blocking=False):
            return False
        failed: list[tuple[MessageWork, PeerFailure | None]] = []
        try:
            if self._closed:
                return True
            # Before reading: whatever a peer sent before it left is there by now.
            awaited = {operation.awaited for operation in self._works}
            peers = range(self._team.world_size) if ANY_SOURCE in awaited else awaited
            gone = self._gone(peer for peer in peers if peer != self._team.rank)
            self._progress()
            finished = self._take_finished()
            now = time.monotonic()
            self._break_if_unmapped(now)
            for operation, work in list(self._works.items()):
                failure = self._failure_of(work, gone, now)
                if failure is not None or self._recorder.broken is not None:
                    self._mailbox.abandon(operation)
                    failed.append((self._works.pop(operation), failure))
        finally:
            self._lock.release()
        self._finish(finished)
        for work, failure in failed:
            self._end(work, self._recorder.repeat() if failure is None else self._explain(work, failure))
        return True

    def _break_if_unmapped(self, now: float) -> None:
        """Break the group if the memory of a living rank cannot be mapped. Under the lock."""
        for rank, (since, error) in self._mailbox.unmapped.items():
            if now - since >= _MAPPED_WITHIN_S and not self._gone([rank]):
                self._break(error)

    def _look_and_plan(self, began: float, now: float, timeout_s: float) -> float:
        """Check the peers; returns the monotonic time of the next check."""
        if not self._look():
            return now + _TRY_AGAIN_S
        return next_look(began, now, timeout_s, self._team.failures_wake_waits)

    def _look_for_deadlock(self, work: MessageWork, waited_s: float) -> float:
        """End the message if its awaited rank waits for this one; otherwise return seconds until the next check.

        Args:
            work: the message that this thread waits for.
            waited_s: seconds waited so far.
        """
        operation, detector = work.operation, self._detector
        if detector is None or operation.awaited in (ANY_SOURCE, self._team.rank):
            return math.inf
        self._advance(blocking=True)  # messages that have arrived count, before the wait is confirmed
        if work.is_completed():
            return math.inf
        self._awaited = operation
        try:
            return detector.look([operation.awaited], waited_s, work.timeout_s, operation)
        except Deadlock as failure:
            with self._lock:
                self._mailbox.abandon(operation)
                is_under_way = self._works.pop(operation, None) is not None
            if is_under_way:
                self._end(work, self._explain(work, failure))
            return math.inf

    def _describe_awaited(self) -> str:
        """Describe the message that a thread waits for. For the deadlock detector."""
        return "" if self._awaited is None else self.name_of(self._awaited)

    def has_unfinished(self, besides: object = None) -> bool:
        """Whether a send or receive other than `besides` is under way."""
        return any(operation is not besides for operation in list(self._works))

    def _gone(self, peers: Iterable[int]) -> dict[int, FailureKind]:
        """Those of `peers` that will not send or receive any more."""
        dead = self._team.watch.dead()
        gone: dict[int, FailureKind] = {}
        for peer in peers:
            state = self._team.blocks.state(peer)
            # What a rank said before it died is more informative than its death.
            if state is PeerState.FAILED:
                gone[peer] = FailureKind.FAILED
            elif state is PeerState.LEFT:
                gone[peer] = FailureKind.LEFT
            elif peer in dead:
                gone[peer] = FailureKind.DEAD
        return gone

    def _failure_of(self, work: MessageWork, gone: Mapping[int, FailureKind], now: float) -> PeerFailure | None:
        awaited, since = work.operation.awaited, work.awaited_since_s
        waited_s = 0.0 if since is None else now - since
        if awaited != ANY_SOURCE:
            candidates = [awaited]
            kinds = {awaited: gone[awaited]} if awaited in gone else {}
        else:
            candidates = [peer for peer in range(self._team.world_size) if peer != self._team.rank]
            # One that has left will send no more; one that broke the group might have been the sender.
            kinds = {peer: kind for peer, kind in gone.items() if kind is not FailureKind.LEFT}
            if len(gone) == len(candidates):
                kinds = dict(gone)
        if not kinds and since is not None and waited_s >= work.timeout_s:
            kinds = dict.fromkeys(candidates, FailureKind.LATE)
        return PeerFailure(kinds, waited_s) if kinds else None

    def _explain(self, work: MessageWork, failure: PeerFailure) -> CollectiveError:
        hint = ""
        late = failure.ranks(FailureKind.LATE)
        if late and isinstance(work.operation, Receive):
            kept = [arrival for peer in late for arrival in self._mailbox.kept_from(peer)]
            others = [f"send({one.label}, tag={one.tag}) at {one.label.site}" for one in kept[:_NUM_HINTS]]
            if others:
                hint = f"Sent to this rank, and not received yet: {'; '.join(others)}. "
        return self._recorder.explain_message(failure, self.name_of(work.operation), hint)

    def _mismatch(self, operation: Send | Receive, conflict: Label) -> CollectiveMismatch:
        recorder, rank, peer = self._recorder, self._team.rank, operation.awaited
        mine = f"{recorder.name(rank)} called {self.name_of(operation)}"
        other = "recv" if isinstance(operation, Send) else "send"
        yours = f"{other}({conflict}, tag={operation.tag}) of {recorder.name(peer)} at {conflict.site}"
        return CollectiveMismatch(
            f"{mine}, but the call that matches by rank and tag is {yours}. Use the same dtype and shape on both "
            "sides (one may be flat), or another tag if they do not belong together",
            tuple(sorted({recorder.global_rank(rank), recorder.global_rank(peer)})),
        )

    def name_of(self, operation: Send | Receive) -> str:
        """`recv(float32[3], src=0, tag=0) of the default group at train.py:3 in main`."""
        return f"{_call(operation, self._recorder)} of {self._recorder.group_name} at {operation.label.site}"

    # ---- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all messages with CollectiveAborted, and the thread. Local."""
        has_lock = self._lock.acquire(timeout=_CLOSE_PATIENCE_S)
        self._closed = True
        works = list(self._works.values())
        self._works.clear()
        self._mailbox.close()
        if has_lock:
            self._lock.release()
        self._has_work.set()
        self._mailbox.wake_here()
        for work in works:
            name = self.name_of(work.operation)
            self._end(work, CollectiveAborted(f"{name}: the group was shut down before this had finished"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_PATIENCE_S)

    def disown(self) -> None:
        """In a forked child: stop using shared state. Local."""
        self._closed = True


class _PublishedWait:
    """Publishes, to the peers and in the status file, which message a thread waits for; withdraws it on exit."""

    def __init__(self, team: Team, recorder: FlightRecorder) -> None:
        self._team = team
        self._recorder = recorder
        self._is_published = False

    def publish(self, operation: Send | Receive) -> None:
        """Publish the message, unless one is published."""
        if not self._is_published:
            self._is_published = True
            self._show(_call_at(operation, self._recorder))

    def _show(self, text: str) -> None:
        self._team.publish_waiting(text)
        self._recorder.publish_waiting(text)

    def __enter__(self) -> _PublishedWait:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_published:
            self._show("")


def _as_int(name: str, what: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputTypeError(f"{name}: the {what} is {value!r}; expected an integer") from None


def _call(operation: Send | Receive, recorder: FlightRecorder) -> str:
    if isinstance(operation, Send):
        return f"send({operation.label}, dst={recorder.global_rank(operation.peer)}, tag={operation.tag})"
    source = "any" if operation.source == ANY_SOURCE else str(recorder.global_rank(operation.source))
    return f"recv({operation.label}, src={source}, tag={operation.tag})"


def _call_at(operation: Send | Receive, recorder: FlightRecorder) -> str:
    return f"{_call(operation, recorder)} at {operation.label.site}"
