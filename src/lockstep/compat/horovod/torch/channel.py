"""The channel of a process set: negotiates which operations all ranks have requested, and runs these.

[Note: rounds] Ranks may make requests in different orders, and from several threads; c10d groups need the same order.
So the ranks of a set negotiate in rounds. In a round they first compare, by an all_gather of 8 bytes, a digest of what
each has requested since the last round. Usually all digests are equal, and the ranks run all requests. Otherwise
they exchange descriptions of their requests and enter them in a table, the same on all ranks; they run what all have
requested, in the order of the table, and the rest stays in it. A thread that waits for a request takes part in
rounds; if none waits, a thread of the channel does, a millisecond after the first request. A rank that has requested
only the gradients of an optimizer averages them without a comparison: if another rank does something else,
the group's flight recorder detects that on all ranks before anything is changed, and then they compare. A rank without
requests does not take part in rounds: nothing could run without it. While it has entries in the table, it takes part in
a round every millisecond.

[Note: own groups] A channel runs everything on its own groups, so that the order in which the script
uses other groups does not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from lockstep import env
from lockstep.comm.backend import engine_of
from lockstep.comm.callsite import describe_exception
from lockstep.compat.horovod.common.exceptions import HorovodInternalError
from lockstep.compat.horovod.torch.execution import Executor, Match, gather_equal
from lockstep.compat.horovod.torch.meta import Entry, Meta, decode, encode, find_mismatch
from lockstep.compat.horovod.torch.request import Request
from lockstep.compat.horovod.torch.timeline import Timeline
from lockstep.errors import CollectiveMismatch, InputError
from lockstep.log import get_logger
from lockstep.world import current_world

__all__ = ["CYCLE_S", "Channel", "RequestHolder"]

CYCLE_S = 1e-3
_PATIENCE_S = 5e-3
_IDLE_S = 10.0
_STALL_WARNING_S = 60.0  # as in Horovod
# Rounds, of at least a millisecond, without new requests while the scripts of all ranks wait. Other threads
# of a script may still make a request, so this is not an error at once.
_MAX_FRUITLESS = 5000

_DUPLICATE = (
    "Requested to {kind} a tensor with the same name as another tensor that is currently being processed: {name!r}. "
    "If you want to request another tensor, use a different tensor name, or synchronize() the first one before"
)
_SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to use a tensor "
    "operation after hvd.shutdown(); call hvd.init() again to continue"
)


class RequestHolder(Protocol):
    """An object that holds requests back until the rank waits: an optimizer on the CPU."""

    def offer(self) -> None:
        """Submit complete gradients. Local."""


class Channel:
    """A process set on one of its ranks.

    Args:
        set_id: number of the process set.
        ranks: global ranks, ascending.
        global_rank: global rank of this process.
        control: a group of exactly these ranks for CPU tensors, for exclusive use.
        accelerator: another group, for tensors on GPUs, or None.
        timeline: records the channel's operations.
        timeout_s: seconds until a request that other ranks have not made is an error.
        hosts: global ranks of each host.
    """

    def __init__(
        self,
        set_id: int,
        ranks: Sequence[int],
        global_rank: int,
        control: dist.ProcessGroup,
        accelerator: dist.ProcessGroup | None,
        timeline: Timeline,
        timeout_s: float,
        hosts: Sequence[Sequence[int]],
    ) -> None:
        self.set_id = set_id
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(global_rank)
        self.control = control
        self.accelerator = accelerator
        self._executor = Executor(self.ranks, self.rank, control, accelerator, hosts)
        self._timeline = timeline
        self._timeout_s = env.HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.get() or timeout_s
        self._warning_s = env.HOROVOD_STALL_CHECK_TIME_SECONDS.get() or _STALL_WARNING_S
        if env.HOROVOD_STALL_CHECK_DISABLE.get():
            self._warning_s = math.inf
        self._news = threading.Condition()
        self._turn = threading.Lock()  # held by the thread that is in a round
        self._fresh: list[Request] = []  # requested, and not yet sent to the others
        self._own: dict[str, Request] = {}  # requested, and not done; includes the fresh
        self._table: dict[str, dict[int, Entry]] = {}  # sent by ranks, and not yet requested by all
        self._joined: set[int] = set()
        self._last_joined = -1
        self._counts: dict[str, int] = {}
        self._holders: weakref.WeakSet[RequestHolder] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._roused = threading.Event()
        self._num_waiting = 0  # threads in `wait`
        self._broken: BaseException | None = None
        self._closed = False
        self._warned: set[str] = set()
        self._num_fruitless = 0  # rounds without progress; the same number on all ranks

    # ---- requests ----------------------------------------------------------------------------------

    def full_name(self, kind: str, name: str | None) -> str:
        """`allreduce.name`; requests without a name are matched by their count."""
        if name is not None:
            return f"{kind}.{name}"
        with self._news:
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
        return f"{kind}.noname.{number}"

    def submit(self, request: Request) -> Request:
        """Submit a request. Local; it runs when all ranks have submitted it, and this one waits or was roused.

        Raises:
            InputError: a request of that name is pending.
            HorovodInternalError: the channel is closed, or has failed before.
        """
        with self._news:
            if self._closed:
                raise HorovodInternalError(_SHUT_DOWN)
            if self._broken is not None:
                raise HorovodInternalError(str(self._broken)) from self._broken
            name = request.meta.name
            if name in self._own:
                raise InputError(_DUPLICATE.format(kind=request.meta.kind, name=name))
            self._own[name] = request
            self._fresh.append(request)
            self._news.notify_all()
        return request

    def rouse(self) -> None:
        """Take part in rounds even while no thread waits, until nothing is left to do. Local."""
        self._roused.set()
        with self._news:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name=f"horovod-set-{self.set_id}", daemon=True)
                self._thread.start()

    def add_holder(self, holder: RequestHolder) -> None:
        """Have `holder.offer()` called whenever this rank is about to wait. Local."""
        self._holders.add(holder)

    def add_symmetric(self, memory: torch.Tensor) -> None:
        """Note that some gradients are in this memory on this rank, but maybe not on others. Local."""
        self._executor.add_symmetric(memory)

    # ---- waiting -----------------------------------------------------------------------------------

    def wait(self, request: Request) -> None:
        """Take part in rounds until a request is done."""
        with self._news:
            self._num_waiting += 1
        try:
            self._wait(request)
        finally:
            with self._news:
                self._num_waiting -= 1

    def _wait(self, request: Request) -> None:
        while not request.done:
            for holder in list(self._holders):
                holder.offer()
            if not self._turn.acquire(blocking=False):
                with self._news:
                    if not request.done:
                        self._news.wait(_PATIENCE_S)
                continue
            try:
                progressed = request.done or self._round(is_waiting=True)
            finally:
                self._end_turn()
            if not progressed:
                self._await_news()

    def _end_turn(self) -> None:
        self._turn.release()
        with self._news:
            self._news.notify_all()

    def _await_news(self) -> None:
        with self._news:
            if not self._fresh and not self._closed:
                self._news.wait(CYCLE_S)

    def _serve(self) -> None:
        """The channel's own thread: takes part in rounds for requests that no thread waits for."""
        world = current_world()
        if world is not None and world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # the current device is per thread, and initially the first
        while not self._closed:
            if not self._own:
                self._roused.clear()
                if not self._own:
                    self._roused.wait(_IDLE_S)
            # Most scripts wait soon, in a thread that then takes part itself, and may make more requests before.
            time.sleep(CYCLE_S)
            if self._num_waiting or not self._own or not self._turn.acquire(blocking=False):
                continue
            try:
                if not self._closed:
                    self._round(is_waiting=False)
            finally:
                self._end_turn()

    # ---- rounds ------------------------------------------------------------------------------------

    def _round(self, is_waiting: bool) -> bool:
        """Run a round with the other ranks. Collective; only in the thread that holds `_turn`.

        An error fails all pending requests, and is raised where they are waited for.

        Args:
            is_waiting: whether the script waits.

        Returns:
            Whether anything was done.
        """
        if self._broken is not None or self._closed:
            self._fail_all(self._broken or HorovodInternalError(_SHUT_DOWN))
            return True
        with self._news:
            fresh, self._fresh = self._fresh, []
        self._timeline.mark_cycle()
        try:
            return self._meet(sorted(fresh, key=lambda request: request.meta.signature), is_waiting)
        except Exception as error:
            self._break(error)
            return True
        except BaseException as error:  # Ctrl-C is re-raised in the script, but the channel cannot continue.
            self._break(error)
            raise

    def _meet(self, fresh: list[Request], is_waiting: bool) -> bool:
        is_clear = not self._table and not self._joined
        if is_clear and len(fresh) == 1 and fresh[0].is_ready and self._try_fused(fresh[0]):
            return True
        if is_clear and self._all_ask_alike(fresh) and not any(request.meta.kind == "join" for request in fresh):
            everyone = range(len(self.ranks))
            self._run([Match(request, dict.fromkeys(everyone, request.meta)) for request in fresh])
            return bool(fresh)
        can_help_itself = bool(fresh) or not is_waiting
        anybody_can = self._share_requests(fresh, can_help_itself)
        progressed = self._run_ready()
        self._count_fruitless(progressed or anybody_can)
        return progressed

    def _all_ask_alike(self, fresh: Sequence[Request]) -> bool:
        """Whether the digests of all ranks' requests are equal. Collective."""
        if len(self.ranks) == 1:
            return True
        digest = hashlib.blake2b(b"\n".join(request.meta.signature for request in fresh), digest_size=8).digest()
        own = int.from_bytes(digest, "little", signed=True)
        try:
            numbers = self._gather_numbers(own)
        except CollectiveMismatch as error:  # Another rank tried gradients; it compares now.
            self._note_expected(error)
            numbers = self._gather_numbers(own)
        return all(number == numbers[0] for number in numbers)

    def _share_requests(self, fresh: Sequence[Request], can_help_itself: bool) -> bool:
        """Enter the requests of all ranks in the table. Collective.

        Args:
            fresh: new requests of this rank.
            can_help_itself: whether this rank makes requests, or still can.

        Returns:
            Whether any rank can help itself.
        """
        told, anybody_can = self._exchange(encode([request.entry for request in fresh]), can_help_itself)
        for rank, entries in enumerate(map(decode, told)):
            for entry in entries:
                self._note(rank, entry)
        return anybody_can

    def _count_fruitless(self, may_go_on: bool) -> None:
        """Count rounds in which nothing ran and no rank could make more requests.

        Raises:
            HorovodInternalError: there were too many in succession.
        """
        self._num_fruitless = 0 if may_go_on else self._num_fruitless + 1
        if self._num_fruitless == _MAX_FRUITLESS:
            raise HorovodInternalError(self._describe_deadlock())

    def _try_fused(self, request: Request) -> bool:
        """Run it without comparing first, as in nearly every round of training. Collective. See [Note: rounds].

        Returns:
            False, on all ranks, if another rank's round is for something else.
        """
        assert request.run_fused is not None
        start_s = time.perf_counter()
        try:
            with torch.no_grad():
                request.run_fused()
        except CollectiveMismatch as error:
            self._note_expected(error)
            return False
        request.complete()
        self._timeline.record([Match(request, {self.rank: request.meta})], start_s)
        self._finish(request)
        return True

    def _note_expected(self, error: CollectiveMismatch) -> None:
        engine = engine_of(self.control)
        if engine is not None:
            engine.recorder.note_expected(error)

    def _note(self, rank: int, entry: Entry) -> None:
        """Enter a rank's request in the table."""
        if entry.meta.kind == "join":
            self._joined.add(rank)
            self._last_joined = self.ranks[rank]
        else:
            self._table.setdefault(entry.meta.name, {})[rank] = entry

    def _run_ready(self) -> bool:
        """Run what all ranks have requested, or joined."""
        matches = []
        ready = [name for name, entries in self._table.items() if len(entries.keys() | self._joined) == len(self.ranks)]
        for name in ready:
            entries = self._table.pop(name)
            mismatch = find_mismatch({self.ranks[rank]: entry for rank, entry in entries.items()}, self._joined)
            request = self._own.get(name)
            if mismatch is None:
                matches.append(Match(request, {rank: entry.meta for rank, entry in sorted(entries.items())}))
            elif request is not None:
                self._finish(request, HorovodInternalError(mismatch))
        self._run(matches)
        has_ended = len(self._joined) == len(self.ranks)
        if has_ended:
            self._end_join()
        self._check_stalls()
        return bool(ready) or has_ended

    def _end_join(self) -> None:
        """When all ranks have joined: continue, and restart counting requests without names."""
        self._joined.clear()
        with self._news:
            self._counts.clear()
            request = next(request for request in self._own.values() if request.meta.kind == "join")
        request.complete(result=self._last_joined)
        self._finish(request)

    def _run(self, matches: Sequence[Match]) -> None:
        if not matches:
            return
        start_s = time.perf_counter()
        for match in matches:
            problem = _find_own_problem(match.meta)
            if problem is not None and match.request is not None:
                self._finish(match.request, HorovodInternalError(problem))
        runnable = [match for match in matches if match.request is None or not match.request.done]
        self._executor.run(runnable)
        self._timeline.record(runnable, start_s)
        for match in runnable:
            if match.request is not None:
                self._finish(match.request)

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        with self._news:
            self._own.pop(request.meta.name, None)
        if error is not None:
            request.fail(error)

    def _gather_numbers(self, *numbers: int) -> list[tuple[int, ...]]:
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        rows = torch.empty(len(self.ranks) * len(numbers), dtype=torch.int64, device="cpu")
        gather_equal(rows, own, self.control)
        return [tuple(row) for row in rows.view(len(self.ranks), -1).tolist()]

    def _exchange(self, content: bytes, flag: bool) -> tuple[list[bytes], bool]:
        """The contents of all ranks, and whether the flag of any is set. Collective."""
        facts = self._gather_numbers(len(content), int(flag))
        lengths = [length for length, _ in facts]
        longest = max(lengths)
        own = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        table = torch.empty(len(lengths) * longest, dtype=torch.uint8, device="cpu")
        gather_equal(table, own, self.control)
        rows = table.view(-1, longest).unbind(0)
        contents = [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]
        return contents, any(is_set for _, is_set in facts)

    # ---- failures ----------------------------------------------------------------------------------

    def _check_stalls(self) -> None:
        """Warn about requests that some ranks have not made for long; fail them at the deadline."""
        now_s = time.perf_counter()
        for name in list(self._table):
            request = self._own.get(name)
            waited_s = now_s - request.submitted_s if request is not None else 0.0
            if request is None or waited_s < min(self._warning_s, self._timeout_s):
                continue
            missing = [self.ranks[rank] for rank in range(len(self.ranks)) if rank not in self._table[name]]
            text = (
                f"{name} ({request.entry.site}) has waited for {waited_s:.0f} s: rank(s) "
                f"{', '.join(map(str, missing))} have not requested it, but have made other requests"
            )
            if waited_s >= self._timeout_s:
                raise HorovodInternalError(text)
            if name not in self._warned:
                self._warned.add(name)
                get_logger(__name__).warning("%s", text)

    def _describe_deadlock(self) -> str:
        waiting = [
            f"rank {self.ranks[rank]}: {name} at {entry.site}"
            for name, entries in self._table.items()
            for rank, entry in sorted(entries.items())
        ]
        return (
            "all ranks wait, each for a request that another has not made; ranks must use the same names and make the "
            f"same unnamed calls. {'; '.join(waiting[:20])}"
        )

    def _break(self, error: BaseException) -> None:
        """Fail all requests of this channel, after a failed round."""
        if isinstance(error, HorovodInternalError):
            wrapped = error
        else:
            wrapped = HorovodInternalError(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
        self._broken = wrapped
        engine = engine_of(self.control)
        if engine is not None:
            engine.fail(describe_exception(error), error)
        self._fail_all(wrapped)

    def _fail_all(self, error: BaseException) -> None:
        with self._news:
            requests, self._fresh = list(self._own.values()), []
            self._own.clear()
            self._table.clear()
            for request in requests:
                request.fail(error)
            self._news.notify_all()

    def close(self, leave: Callable[[dist.ProcessGroup], None]) -> None:
        """Leave the set. Local; pending requests fail.

        Args:
            leave: function that destroys a group.
        """
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._roused.set()
        for group in (self.control, self.accelerator):
            if group is not None:
                with contextlib.suppress(ValueError):  # the script has already destroyed it
                    leave(group)
        self._fail_all(HorovodInternalError(_SHUT_DOWN))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE_S * 200)


def _find_own_problem(meta: Meta) -> str | None:
    """Why a request on which all ranks agree is not supported, or None."""
    return find_mismatch({0: Entry(meta, "")}) if meta.kind in ("allgather", "alltoall", "reducescatter") else None
