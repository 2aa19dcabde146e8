"""Work handles of collectives and messages, and the thread that runs the asynchronous calls of a group in order.

[Note: callbacks] Callbacks run in the thread that runs the calls of the group. A callback that waits for a call queued
after its own would wait for its own thread. The handle of that call knows this and runs it (`Runner.run_until`);
waiting for a future is torch's C++ code, which does not. Only a deadline ends that wait (`_CallbackWatch`).

[Note: a thread of its own] A group's thread adds and copies while the thread that called it keeps computing with all
its intra-op threads. OpenMP gives every computing thread a separate team: with eight intra-op threads a rank would have
sixteen, and those that wait at the end of each operation take the cores by spinning (torch's DDP over a group, 2 ranks
of 8 threads on 16 cores: 1.3 to 7.5 times slower than our engine, which computes in the caller's thread). So the
group's thread computes with a single thread, as gloo's threads do.
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
    """The GPUs of the tensors, which torch needs when a future is created."""
    return [*staging.cuda_devices(result)] or None


class DoneWork(_TorchWork):
    """The handle of a call that finished before it returned.

    Args:
        result: the tensors it wrote, for `get_future` and `result`.
    """

    def __init__(self, result: Result) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True; there is nothing to wait for."""
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
        """Do nothing: the tensors are ready."""


class PendingWork(_TorchWork):
    """The handle of a call that the group's thread runs.

    Args:
        call: does the work, in the group's thread.
        result: the tensors that it writes.
        describe: names the call, for errors.
        runner: runs the call; None if the thread that waits for it makes it progress.
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
        """Run the call and store its outcome. Called once, by the group's thread."""
        try:
            # Autograd may attach a grad_fn to an output while the call is under way (functional collectives), and
            # writing it is not an operation to differentiate. Grad mode is per thread: the caller's is unchanged.
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
        """Describe the call, such as `all_reduce(float32[10], SUM)`."""
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
            CollectiveTimeout: it has not within `timeout` (zero or None: only the group's own timeout applies).
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
        """Whether it finishes in time. Without a limit, the runner notes that the main thread waits for it."""
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
        """Whether the call has finished, successfully or not."""
        return self._finished.is_set()

    def is_success(self) -> bool:
        """Whether it has finished without an error."""
        return self._finished.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Its error, if it has finished with one; else None."""
        return self._error

    def result(self) -> Result:
        """The tensors that the call wrote."""
        return self._result

    def result_numel(self) -> int:
        """Total number of elements of the tensors that the call writes."""
        return sum(tensor.numel() for tensor in self._result)

    def get_future(self) -> Future[Result]:
        """A future that finishes with the call.

        An error has to be raised from a callback: only then does torch's C++ side (DDP's reducer waits in it) treat it
        as an error rather than as a value.
        """
        if self._runner is not None and self._runner.is_current_thread:
            # The caller is a callback, which may wait for the future in C++; see [Note: callbacks].
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
        """Wait for the call."""
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
    """The handle of a send or receive that finished before it returned.

    Args:
        tensor: the tensor that was sent or received.
        source: group rank of its sender; -1 for a send.
    """

    def __init__(self, tensor: torch.Tensor, source: int) -> None:
        super().__init__([tensor])
        self._source = source

    def _source_rank(self) -> int:
        """Group rank of the sender; torch's `recv` from any source reads it."""
        return self._source


class MessageWork(PendingWork):
    """The handle of a send or receive under way.

    Args:
        owner: moves the messages of the group.
        operation: the mailbox's operation.
        item: the tensor that is sent, or received into.
        timeout_s: seconds from the first wait until the deadline.

    Attributes:
        awaited_since_s: monotonic time at which a thread first waited for it; None if none has.
    """

    def __init__(self, owner: _Owner, operation: Send | Receive, item: _Payload, timeout_s: float) -> None:
        super().__init__(lambda: None, [item.tensor], lambda: owner.name_of(operation))
        self.operation = operation
        self.timeout_s = timeout_s
        self.awaited_since_s: float | None = None
        self._owner = owner
        self._item = item

    def finish(self, error: BaseException | None = None) -> None:
        """Set the outcome and wake the waiting threads. Call it once, and without locks: callbacks run in here."""
        if error is None and isinstance(self.operation, Receive):
            self._item.write_back()
        self._error = error
        self._finish()

    def _await(self, timeout_s: float | None) -> bool:
        """Whether it finishes in time. The waiting thread moves the messages of the group."""
        if not self.is_completed():
            self._owner.drive(self, timeout_s)
        return self.is_completed()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future that finishes with it. Starts the deadline."""
        self.start_deadline()
        return super().get_future()

    def start_deadline(self) -> None:
        """Start the deadline, unless it has been started."""
        if self.awaited_since_s is None:
            self.awaited_since_s = time.monotonic()

    def _source_rank(self) -> int:
        """Group rank of the sender; torch's `recv` from any source reads it."""
        return source_of(self.operation)


# ---- the thread --------------------------------------------------------------------------------------


def compute_alone() -> None:
    """Make torch compute in the calling thread with a single thread; other threads are unaffected. Local.

    See [Note: a thread of its own]. Without OpenMP (macOS, some builds) torch has one thread pool for all callers, and
    there is nothing to limit.
    """
    limit = libc.function("omp_set_num_threads")
    if limit is not None:
        # First, because torch sets the number of threads once for each thread.
        torch.get_num_threads()
        limit(1)  # `torch.set_num_threads` would apply to all threads created from now on


class _CallbackWatch:
    """Detects a callback that blocks queued calls for too long.

    Args:
        limit_s: returns how many seconds are too long.
        has_queued: returns whether calls are queued for the callback's thread.
        give_up: called with the seconds, in another thread, when a callback has taken too long.
    """

    def __init__(
        self, limit_s: Callable[[], float], has_queued: Callable[[], bool], give_up: Callable[[float], None]
    ) -> None:
        self._limit_s = limit_s
        self._has_queued = has_queued
        self._give_up = give_up
        self._since_s: float | None = None  # start time of the current callback
        self._timer: threading.Timer | None = None  # created by the first callback with a call queued after it
        self._lock = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager in which callbacks run."""
        self._since_s = time.monotonic()
        self.look_out()
        try:
            yield
        finally:
            self._since_s = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which the callback runs calls, which have their own deadlines."""
        is_running, self._since_s = self._since_s is not None, None
        try:
            yield
        finally:
            if is_running:
                self._since_s = time.monotonic()
                self.look_out()

    def look_out(self) -> None:
        """Start checking, if a callback runs and calls are queued after it. Local."""
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
        """Stop checking. Local."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


# C++ of torch 2.6 holds the C++ half of a Work but not its Python half. If that is gone when C++ comes to wait, it
# waits for a C++ half that never finishes. torch's DDP waits like this for the counts of used parameters, which it may
# reduce before all of its buckets: so works with small results are kept for long. Works with large results are kept for
# a few calls: C++ waits for them soon, but broadcasts a module's state with two calls under way at a time, and the
# group's thread may have finished both before C++ comes to wait for the first.
_MAX_KEPT = 1024
_MAX_KEPT_NUMEL = 1 << 14
_MAX_KEPT_LARGE = 3

_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


class Runner:
    """Runs calls in the order they were submitted, in a thread that is created for the first call.

    Args:
        name: name of the thread.
        limit_s: returns the number of seconds for which a callback may block queued calls.
        give_up: given the first of these calls and the seconds, returns the error with which all of them end.

    Attributes:
        unfinished: calls that are queued or running.
        is_awaited_by_main: whether the main thread waits for one of them, without a timeout.
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
        """Run a call made by a callback at once."""
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
        """Run queued calls, in order, until `awaited` has finished. Called by a callback, in this runner's thread.

        The callback occupies the thread that would run the calls which it waits for.

        Args:
            awaited: a call that was submitted to this runner.
            timeout_s: seconds after which no further call is started; None for no limit.

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
        """The next call; None if there is none."""
        try:
            work = self._queue.get_nowait()
        except queue.Empty:
            return None
        if work is None:
            self._queue.put(None)  # put back: it ends the thread
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
        """Wait until the calls submitted so far have ended, successfully or not; each has its own deadline."""
        if self.unfinished:
            last = PendingWork(lambda: None, [], lambda: "shutdown()", self)
            self.submit(last)
            last._await(None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel queued calls, let the running one end, stop the thread."""
        self.watch.close()
        self._cancel_queued()
        thread = self._thread
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout_s)
            self._thread = None
