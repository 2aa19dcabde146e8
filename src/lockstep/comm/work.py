"""Work handles of collectives and messages, and the thread that runs the asynchronous calls of a group in order.

[Note: callbacks] Callbacks run in the thread that runs the calls of the group. One that waits for a call queued behind
its own would wait for its own thread. The handle of that call knows this and runs it (`Runner.run_until`); the wait of
a future is torch's C++, which does not. Nothing but a deadline ends it (`_CallbackWatch`).

[Note: a thread of its own] A group's thread adds and copies while the thread that called it keeps computing with all
its intra-op threads. OpenMP gives every thread that computes a team of its own: with eight intra-op threads a rank
would have sixteen, and those that wait at the end of each operation take the cores by asking (torch's DDP over a group,
2 ranks of 8 threads on 16 cores: 1.3 to 7.5 times slower than our engine, which computes in the caller's thread). So it
computes alone, as gloo's threads do.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

import torch
from torch.futures import Future

from lockstep import libc
from lockstep.comm import staging
from lockstep.comm.torch_version import drops_python_work
from lockstep.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from lockstep.shm.messages import Receive, Send
from lockstep.torch_private.stores import Work as _TorchWork

__all__ = ["DoneMessage", "DoneWork", "MessageWork", "PendingWork", "Runner", "compute_alone", "source_of"]

_NO_SOURCE = -1

Result = list[torch.Tensor]


def _devices(result: Result) -> list[int | str | torch.device] | None:
    """The GPUs of the tensors, which torch wants to know of a future."""
    return [*staging.cuda_devices(result)] or None


class DoneWork(_TorchWork):
    """A call that had finished before it returned.

    Args:
        result: the tensors it wrote, for `get_future` and `result`.
    """

    def __init__(self, result: Result) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> BaseException | None:
        """None."""
        return None

    def result(self) -> Result:
        """The tensors that the call wrote."""
        return self._result

    def get_future(self) -> Future[Result]:
        """A finished future with the tensors."""
        future: Future[Result] = Future(devices=_devices(self._result))
        future.set_result(self._result)
        return future

    def synchronize(self) -> None:
        """Nothing to do on CPU."""


class PendingWork(_TorchWork):
    """A call that the group's thread runs.

    Args:
        call: does the work; runs in the group's thread.
        result: the tensors that it writes.
        describe: names the call, for errors.
        runner: what will run it; None if the thread that waits for it does what it takes.
    """

    def __init__(
        self, call: Callable[[], None], result: Result, describe: Callable[[], str], runner: Runner | None = None
    ) -> None:
        super().__init__()
        self._call = call
        self._result = result
        self._describe = describe
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._trigger: Future[None] | None = None
        self._future: Future[Result] | None = None
        self._lock = threading.Lock()
        self._runner = runner

    def run(self) -> None:
        """Run the call and keep its outcome. By the group's thread, once."""
        try:
            # Autograd may give an output its grad_fn while the call is under way (functional collectives), and what
            # writes it is no operation to differentiate. Grad mode is a thread's own: the caller's stays.
            with torch.no_grad():
                self._call()
        except BaseException as error:  # raised by `wait`
            self._error = error
        self._finish()

    def cancel(self, error: CollectiveError | None = None) -> None:
        """Finish without running, with that error; default CollectiveAborted, because the group was shut down."""
        text = "the group was shut down before this call started"
        self._error = error or CollectiveAborted(f"{self.describe()}: {text}")
        self._finish()

    def describe(self) -> str:
        """What was called, such as `all_reduce(float32[10], SUM)`."""
        return self._describe()

    def _finish(self) -> None:
        del self._call
        with self._lock:
            self._finished.set()
            trigger = self._trigger
        if trigger is not None:
            with contextlib.nullcontext() if self._runner is None else self._runner.watch.running():
                trigger.set_result(None)

    def _outcome(self, _: Future[None]) -> Result:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call has finished.

        Raises:
            CollectiveTimeout: it has not within `timeout` (zero or None: the group's own timeout rules).
            CollectiveError: the error that the call raised.
        """
        timeout_s = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
        if not self._await(timeout_s):
            raise CollectiveTimeout(
                f"{self._describe()} had not finished when wait(timeout={timeout_s:g} s) ran out; it continues; the "
                "group's own deadline will say which rank is missing"
            )
        if self._error is not None:
            raise self._error
        return True

    def _await(self, timeout_s: float | None) -> bool:
        """Whether it has finished by then. Without a limit, the runner knows that the main thread waits for it."""
        runner = self._runner
        if runner is not None and runner.is_current_thread:
            return runner.run_until(self, timeout_s)
        if runner is None or timeout_s is not None or threading.current_thread() is not threading.main_thread():
            return self._finished.wait(timeout_s)
        runner.is_awaited_by_main = True
        try:
            return self._finished.wait()
        finally:
            runner.is_awaited_by_main = False

    def is_completed(self) -> bool:
        """Whether the call has finished, well or not."""
        return self._finished.is_set()

    def is_success(self) -> bool:
        """Whether it has finished without an error."""
        return self._finished.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Its error, if it has finished with one."""
        return self._error

    def result(self) -> Result:
        """The tensors that the call wrote."""
        return self._result

    def result_numel(self) -> int:
        """Elements of all tensors that the call writes."""
        return sum(tensor.numel() for tensor in self._result)

    def get_future(self) -> Future[Result]:
        """A future that finishes with the call.

        An error has to come out of a callback: only there does torch's C++ side (DDP's reducer waits
        in it) take it for an error rather than for a value.
        """
        if self._runner is not None and self._runner.is_current_thread:
            # A callback asks, which may wait for it, in C++; see [Note: callbacks].
            self._runner.run_until(self, None)
        with self._lock:
            if self._future is not None:
                return self._future
            trigger: Future[None] = Future(devices=_devices(self._result))
            self._future = trigger.then(self._outcome)
            already_finished = self._finished.is_set()
            if not already_finished:
                self._trigger = trigger
        if already_finished:
            trigger.set_result(None)
        return self._future

    def synchronize(self) -> None:
        """Wait."""
        self.wait()


# ---- messages ----------------------------------------------------------------------------------------


def source_of(operation: Send | Receive) -> int:
    """Group rank that a message came from; -1 for a send, or before it is known."""
    if isinstance(operation, Send) or operation.peer is None:
        return _NO_SOURCE
    return operation.peer


class _Payload(Protocol):
    tensor: torch.Tensor

    def write_back(self) -> None: ...


class _Owner(Protocol):
    def drive(self, work: MessageWork, timeout_s: float | None) -> None: ...

    def name_of(self, operation: Send | Receive) -> str: ...


class DoneMessage(DoneWork):
    """A send or receive that had finished before it returned.

    Args:
        tensor: what was sent or received.
        source: group rank it came from; -1 for a send.
    """

    def __init__(self, tensor: torch.Tensor, source: int) -> None:
        super().__init__([tensor])
        self._source = source

    def _source_rank(self) -> int:
        """Group rank of the sender; torch's `recv` from any source asks for it."""
        return self._source


class MessageWork(PendingWork):
    """A send or receive under way.

    Args:
        owner: moves the messages of the group.
        operation: the operation of the mailbox.
        item: the tensor that is sent, or received into.
        timeout_s: seconds from the first wait to the deadline.

    Attributes:
        awaited_since_s: monotonic time at which a thread began to wait for it; None if none has.
    """

    def __init__(self, owner: _Owner, operation: Send | Receive, item: _Payload, timeout_s: float) -> None:
        super().__init__(lambda: None, [item.tensor], lambda: owner.name_of(operation))
        self.operation = operation
        self.timeout_s = timeout_s
        self.awaited_since_s: float | None = None
        self._owner = owner
        self._item = item

    def finish(self, error: BaseException | None = None) -> None:
        """Keep the outcome and hand it to the waiting threads. Once, and under no lock: callbacks run in here."""
        if error is None and isinstance(self.operation, Receive):
            self._item.write_back()
        self._error = error
        self._finish()

    def _await(self, timeout_s: float | None) -> bool:
        """Whether it has finished by then. The thread that waits moves the messages of the group."""
        if not self.is_completed():
            self._owner.drive(self, timeout_s)
        return self.is_completed()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future that finishes with it. The deadline runs from now on."""
        self.start_deadline()
        return super().get_future()

    def start_deadline(self) -> None:
        """Let the deadline run from now on, if it does not run yet."""
        if self.awaited_since_s is None:
            self.awaited_since_s = time.monotonic()

    def _source_rank(self) -> int:
        """Group rank of the sender; torch's `recv` from any source asks for it."""
        return source_of(self.operation)


# ---- the thread --------------------------------------------------------------------------------------


def compute_alone() -> None:
    """Have torch compute in the calling thread with this thread alone; all others keep what they have. Local.

    See [Note: a thread of its own]. Without OpenMP (macOS, some builds) torch's threads are one pool for all callers,
    and there is nothing to limit.
    """
    limit = libc.function("omp_set_num_threads")
    if limit is not None:
        # First, torch gives the thread its number, as it does once for each thread.
        torch.get_num_threads()
        limit(1)  # `torch.set_num_threads` would hold for all threads that begin from now on


class _CallbackWatch:
    """Looks out for a callback that holds up queued calls for too long.

    Args:
        limit_s: tells how many seconds are too long.
        has_queued: tells whether calls are queued that the callback's thread is to run.
        give_up: called with the seconds, in a thread of its own, when a callback has taken too long.
    """

    def __init__(
        self, limit_s: Callable[[], float], has_queued: Callable[[], bool], give_up: Callable[[float], None]
    ) -> None:
        self._limit_s = limit_s
        self._has_queued = has_queued
        self._give_up = give_up
        self._since_s: float | None = None  # when the callback began that runs now
        self._timer: threading.Timer | None = None  # from the first callback with a call behind it on
        self._lock = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Callbacks run, until the block is left."""
        self._since_s = time.monotonic()
        self.look_out()
        try:
            yield
        finally:
            self._since_s = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The callback runs calls, which have deadlines of their own, until the block is left."""
        is_running, self._since_s = self._since_s is not None, None
        try:
            yield
        finally:
            if is_running:
                self._since_s = time.monotonic()
                self.look_out()

    def look_out(self) -> None:
        """Begin to look, if a callback runs and calls are queued behind it. Local."""
        if self._since_s is None or not self._has_queued():
            return
        with self._lock:
            if self._timer is None and not self._is_closed:
                self._look_in(self._limit_s())

    def _look_in(self, seconds: float) -> None:
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        limit_s = self._limit_s()
        with self._lock:
            self._timer = None
            since_s = self._since_s
            if since_s is None or self._is_closed or not self._has_queued():
                return
            left_s = since_s + limit_s - time.monotonic()
            if left_s > 0:
                self._look_in(left_s)
                return
        self._give_up(limit_s)

    def close(self) -> None:
        """Look no more. Local."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


# C++ of torch 2.6 holds the C++ half of a Work and lets its Python half go. If that is gone when C++ comes to wait, it
# waits for a C++ half that nobody ever finishes. torch's DDP waits so for the counts of used parameters, which it may
# reduce before all of its buckets: so works with small results are kept for long. Works with large results are kept for
# a few calls: C++ waits for them soon, but broadcasts a module's state with two calls on their way at a time, and the
# group's thread may have finished both before C++ comes to wait for the first.
_MAX_KEPT = 1024
_MAX_KEPT_NUMEL = 1 << 14
_MAX_KEPT_LARGE = 3

_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


class Runner:
    """Runs calls in the order they were submitted, in a thread that exists from the first call on.

    Args:
        name: name of the thread.
        limit_s: tells after how many seconds a callback may hold up queued calls no longer.
        give_up: given the first of these calls and the seconds, returns the error with which all of them end.

    Attributes:
        unfinished: calls that are queued or running.
        is_awaited_by_main: whether the main thread waits for one of them, without a limit.
        watch: the deadline of callbacks.
    """

    def __init__(
        self,
        name: str,
        limit_s: Callable[[], float] = lambda: math.inf,
        give_up: Callable[[str, float], CollectiveError | None] = lambda _call, _waited_s: None,
    ) -> None:
        self._name = name
        self._give_up = give_up
        self.watch = _CallbackWatch(limit_s, lambda: not self._queue.empty(), self._cancel_held_up)
        self._queue: queue.SimpleQueue[PendingWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.unfinished = 0
        self.is_awaited_by_main = False
        self._lock = threading.Lock()
        self._kept: tuple[deque[PendingWork], deque[PendingWork]] | None = None  # with small results, with large ones
        if drops_python_work(torch.__version__):
            self._kept = deque(maxlen=_MAX_KEPT), deque(maxlen=_MAX_KEPT_LARGE)
        _runners.add(self)

    def has_unfinished_elsewhere(self) -> bool:
        """Whether other groups of this process have calls that are queued or running."""
        return any(runner.unfinished > 0 for runner in list(_runners) if runner is not self)

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is a callback of a call that this runner has just finished."""
        return threading.current_thread() is self._thread

    def submit(self, work: PendingWork) -> None:
        """Queue `work`."""
        if self._kept is not None:
            self._kept[work.result_numel() > _MAX_KEPT_NUMEL].append(work)
        with self._lock:
            self.unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(work)
        self.watch.look_out()

    def run_now(self, work: PendingWork) -> None:
        """Run a call at once, which a callback makes."""
        with self.watch.paused():
            work.run()

    def _loop(self) -> None:
        compute_alone()
        while True:
            work = self._queue.get()
            if work is None:
                return
            self._run(work)

    def _run(self, work: PendingWork) -> None:
        work.run()
        with self._lock:
            self.unfinished -= 1

    def run_until(self, awaited: PendingWork, timeout_s: float | None) -> bool:
        """Run what is queued, in order, until `awaited` has finished. In this runner's thread, by a callback.

        A callback has the thread that would run the calls which it waits for.

        Args:
            awaited: a call that was submitted to this runner.
            timeout_s: seconds after which no further call is begun; None for no limit.

        Returns:
            Whether it has finished.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self.watch.paused():
            while not awaited.is_completed() and time.monotonic() < deadline:
                work = self._take()
                if work is None:  # Another thread has taken it, to cancel it.
                    return awaited._finished.wait(timeout_s)
                self._run(work)
        return awaited.is_completed()

    def _take(self) -> PendingWork | None:
        """The call that is next; None if there is none."""
        try:
            work = self._queue.get_nowait()
        except queue.Empty:
            return None
        if work is None:
            self._queue.put(None)  # for the thread, which it ends
        return work

    def _cancel_queued(self, error: CollectiveError | None = None) -> None:
        while (work := self._take()) is not None:
            work.cancel(error)
            with self._lock:
                self.unfinished -= 1

    def _cancel_held_up(self, waited_s: float) -> None:
        first = self._take()
        if first is None:
            return
        error = self._give_up(first.describe(), waited_s)
        first.cancel(error)
        with self._lock:
            self.unfinished -= 1
        self._cancel_queued(error)

    def finish(self) -> None:
        """Wait until the calls submitted so far have ended, well or not; each has a deadline of its own."""
        if self.unfinished:
            last = PendingWork(lambda: None, [], lambda: "shutdown()", self)
            self.submit(last)
            last._await(None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what is queued, let the running call end, stop the thread."""
        self.watch.close()
        self._cancel_queued()
        thread = self._thread
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout_s)
            self._thread = None
