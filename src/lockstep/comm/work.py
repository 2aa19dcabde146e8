"""Work handles, and the thread that runs the asynchronous calls of a group in order."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.futures import Future

from lockstep.comm import staging
from lockstep.comm.callback_watch import CallbackWatch
from lockstep.comm.intra_op import compute_alone
from lockstep.comm.torch_version import drops_python_work
from lockstep.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from lockstep.torch_private.stores import Work as _TorchWork

__all__ = ["DoneWork", "PendingWork", "Runner"]

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
        text = "the group was shut down before this call had its turn"
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
            # A callback asks, which may wait for it, in C++; see `callback_watch.py`.
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
        self.watch = CallbackWatch(limit_s, lambda: not self._queue.empty(), self._cancel_held_up)
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
