"""`run_ranks`: calls a function on N real processes and returns the results.

The first call starts a fork server (see `fork_server.py`), which imports torch once and forks one worker per rank.
Later calls reuse the workers: a world of n takes the first n. After a call in which anything went wrong all its workers
are killed, and the next call forks new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep import env
from lockstep.errors import CollectiveAborted, InputError, InputTypeError, RankLost, WorkerFailed
from lockstep.launch.report import SECONDARY_PHRASES
from lockstep.testing.limits import limit_s
from lockstep.testing.worker import DUMP_SIGNAL, RankCall, Reply, WorkerDied
from lockstep.topology import name_ranks

__all__ = ["run_ranks"]

# For a quiet machine (`limit_s`).
_TIMEOUT_S = 60.0
# Importing torch with cold caches.
_START_DEADLINE_S = 180.0
# Seconds from the first rank's failure until the others must have noticed it, if the caller wants one error.
_GRACE_AFTER_FAILURE_S = 10.0
# Seconds from the order to dump stacks until the process must have ended; a suspended process never dumps.
_DUMP_DEADLINE_S = 2.0
_EXIT_DEADLINE_S = 10.0

# Errors of gloo and torch's stores on ranks whose peer has failed.
_SECONDARY = (*SECONDARY_PHRASES, "timed out waiting", "read timeout", "application timeout caused pair closure")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "lockstep",
    timeout: float | None = None,
    init: bool = True,
    expect_errors: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `world_size` processes; returns the results in rank order.

    Each process initialises `torch.distributed` before the call and destroys it after all ranks have returned, or at
    once if `fn` raised. With `init=False` it does not; instead `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`
    and `LOCKSTEP_RENDEZVOUS` (a new private folder) are set for the call, so that `fn` may call `lockstep.init()`.

    Ranks have the caller's environment, working directory, `sys.path`, stdout and stderr; torch, numpy and `random` are
    seeded with 0, torch has one thread, and warnings issued by Lockstep's own modules are errors.

    Args:
        fn: a function at the top level of a module that the processes can import.
        world_size: number of processes, at least 1.
        *args: arguments for `fn`; pickled, as are the results.
        backend: name for `init_process_group`.
        timeout: seconds for the whole call; by default 60 on a quiet machine, and more on a slow or busy one
            (`limit_s`). The process group's own deadline is four fifths of it, so that a rank that waits in vain raises
            before it counts as hung.
        init: whether to initialise the process group.
        expect_errors: return outcomes instead of raising: for each rank its result, or the exception that it raised, or
            a `WorkerDied`.
        **kwargs: keyword arguments for `fn`; pickled.

    Raises:
        InputError, InputTypeError: `world_size` below 1; `fn` or an argument cannot be pickled.
        TimeoutError: ranks were still running at the deadline. Their stacks are on stderr.
        WorkerFailed: a process died (without `expect_errors`).
        Exception: the exception of the first rank whose error is not just a consequence of another rank's; a note on it
            lists the errors of all ranks.
    """
    if world_size < 1:
        raise InputError(f"run_ranks: world_size is {world_size}; it must be at least 1")
    payload = _pickle_call(fn, args, kwargs)
    timeout_s = limit_s(_TIMEOUT_S) if timeout is None else timeout
    with _lock:
        outcomes = _run(payload, world_size, backend, timeout_s, init, fail_fast=not expect_errors)
    if expect_errors:
        return [outcome.value for outcome in outcomes]
    _raise_first(outcomes)
    return [outcome.value for outcome in outcomes]


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if getattr(fn, "__module__", None) == "__main__":
        raise InputError("run_ranks: fn is defined in __main__, which the ranks cannot import: move it to a module")
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise InputTypeError(
            f"run_ranks: the ranks receive fn and its arguments pickled, and that failed: {error}. "
            "Expected a function at the top level of a module (no lambda, no closure) and picklable arguments"
        ) from error


@dataclass
class _Outcome:
    """How one rank ended. `value` is its result, its exception or a `WorkerDied`."""

    rank: int
    value: Any
    failed: bool
    text: str = ""


class _RankTracebackError(Exception):
    """The traceback of an exception on its rank; shown as the cause of the re-raised exception."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"on rank {rank}:\n{text}")


def _is_secondary(error: object) -> bool:
    """Whether an error only says that another rank failed."""
    if isinstance(error, RankLost | CollectiveAborted):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _SECONDARY)


def _raise_first(outcomes: Sequence[_Outcome]) -> None:
    """Raise the first failure by rank that is not secondary; if all are, the first one."""
    failures = [outcome for outcome in outcomes if outcome.failed]
    if not failures:
        return
    first = next((failure for failure in failures if not _is_secondary(failure.value)), failures[0])
    error = first.value
    if isinstance(error, WorkerDied):
        error = WorkerFailed(f"rank {error.rank}: {error}", error.rank, error.exit_code)
    lines = [f"Outcomes of the {len(outcomes)} ranks:", *(f"  rank {o.rank}: {_in_one_line(o)}" for o in outcomes)]
    # Equivalent to add_note, which Python 3.10 does not have.
    error.__notes__ = [*getattr(error, "__notes__", []), "\n".join(lines)]
    raise error from (_RankTracebackError(first.rank, first.text) if first.text else None)


def _in_one_line(outcome: _Outcome) -> str:
    if not outcome.failed:
        return "returned"
    if isinstance(outcome.value, WorkerDied):
        return str(outcome.value)
    text = " ".join(f"{type(outcome.value).__name__}: {outcome.value}".split())
    return text if len(text) <= 300 else text[:300] + " …"


@dataclass
class _Worker:
    pid: int
    connection: Connection


class _ForkServerLostError(Exception):
    """The fork server has ended, and with it all workers."""


class _Pool:
    """The caller's side: one fork server and the workers that it has forked."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.usable = True
        self._workers: list[_Worker] = []
        self._exit_codes: dict[int, int] = {}  # of workers that died, by pid, until they are read
        self._forked: list[int] = []
        self._control, server_end = Pipe()
        self._process = _start_fork_server(server_end)
        server_end.close()
        self._folder = ""
        try:
            self._expect(limit_s(_START_DEADLINE_S), until=lambda: self._folder != "")
        except BaseException:
            self.close()
            raise

    def run(
        self, payload: bytes, world_size: int, backend: str, timeout_s: float, init: bool, *, fail_fast: bool
    ) -> list[_Outcome]:
        """Run one call on the first `world_size` workers."""
        workers = self._take(world_size)
        folder = tempfile.mkdtemp(prefix="call-", dir=self._folder)
        deadline = time.monotonic() + timeout_s
        try:
            for rank, worker in enumerate(workers):
                call = RankCall(
                    payload, rank, world_size, backend, init, timeout_s, folder,
                    env.snapshot(), os.getcwd(), list(sys.path),
                )  # fmt: skip
                _send_call(worker, call)
            outcomes = self._collect(workers, deadline, timeout_s, fail_fast=fail_fast)
            if not any(outcome.failed for outcome in outcomes):
                outcomes = self._release(workers, outcomes, deadline, timeout_s)
        except TimeoutError:
            self._retire(workers)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if any(outcome.failed for outcome in outcomes):
            self._retire(workers)
        return outcomes

    def close(self) -> None:
        """End the fork server, which kills the workers and removes the folder."""
        self.usable = False
        if os.getpid() != self.owner:
            return  # a fork of the caller has copies of the pipes, but owns none of this
        self._control.close()
        for worker in self._workers:
            worker.connection.close()
        self._workers.clear()
        try:
            self._process.wait(limit_s(_EXIT_DEADLINE_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _take(self, world_size: int) -> list[_Worker]:
        """The first `world_size` workers, after forking missing ones and replacing dead ones."""
        self._read_control()
        self._workers = [worker for worker in self._workers if worker.pid not in self._exit_codes]
        missing = world_size - len(self._workers)
        for _ in range(missing):
            ours, theirs = Pipe()
            self._control.send(("fork",))
            reduction.send_handle(self._control, theirs.fileno(), self._process.pid)
            theirs.close()
            self._expect(limit_s(_EXIT_DEADLINE_S), until=lambda: bool(self._forked))
            self._workers.append(_Worker(self._forked.pop(), ours))
        return self._workers[:world_size]

    def _collect(
        self, workers: Sequence[_Worker], deadline: float, timeout_s: float, *, fail_fast: bool
    ) -> list[_Outcome]:
        """Collect every rank's reply to the last message, or its death.

        Args:
            fail_fast: once a rank has failed, give the others only a short time to notice it; those that do not are
                reported as WorkerFailed.
        """
        outcomes: dict[int, _Outcome] = {}
        grace_s = limit_s(_GRACE_AFTER_FAILURE_S)
        failed_at: float | None = None
        while len(outcomes) < len(workers):
            now = time.monotonic()
            until = deadline if failed_at is None else min(deadline, failed_at + grace_s)
            if now >= until:
                if failed_at is None:
                    self._report_hang(workers, outcomes, timeout_s)
                _give_up_on_rest(len(workers), outcomes, grace_s)
                break
            pending = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes}
            for ready in wait([*pending, self._control], until - now):
                if ready is self._control:
                    self._read_control()
                else:
                    assert isinstance(ready, Connection)
                    rank = pending[ready]
                    outcomes[rank] = self._receive(rank, workers[rank])
            if fail_fast and failed_at is None and any(outcome.failed for outcome in outcomes.values()):
                failed_at = time.monotonic()
        return [outcomes[rank] for rank in range(len(workers))]

    def _receive(self, rank: int, worker: _Worker) -> _Outcome:
        """The reply in a worker's pipe, or how the worker died if the pipe has ended."""
        try:
            reply: Reply = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._expect(limit_s(_EXIT_DEADLINE_S), until=lambda: worker.pid in self._exit_codes)
            exit_code = self._exit_codes[worker.pid]
            died = WorkerDied(rank, -exit_code, 128 - exit_code) if exit_code < 0 else WorkerDied(rank, None, exit_code)
            return _Outcome(rank, died, failed=True)
        return _Outcome(rank, pickle.loads(reply.payload), reply.failed, reply.text)

    def _release(
        self, workers: Sequence[_Worker], outcomes: list[_Outcome], deadline: float, timeout_s: float
    ) -> list[_Outcome]:
        """Let the workers leave their groups; a rank that cannot counts as failed."""
        for worker in workers:
            with contextlib.suppress(ConnectionError):
                worker.connection.send_bytes(b"")
        left = self._collect(workers, deadline, timeout_s, fail_fast=True)
        return [after if after.failed else before for before, after in zip(outcomes, left, strict=True)]

    def _report_hang(self, workers: Sequence[_Worker], outcomes: dict[int, _Outcome], timeout_s: float) -> None:
        """Dump the stacks of the hanging ranks to stderr and raise TimeoutError."""
        hanging = [rank for rank in range(len(workers)) if rank not in outcomes]
        for rank in hanging:
            pid = workers[rank].pid
            print(f"run_ranks: stacks of rank {rank} (pid {pid}):", file=sys.stderr, flush=True)
            self._control.send(("signal", pid, int(DUMP_SIGNAL)))
            self._read_control(limit_s(_DUMP_DEADLINE_S), until=partial(self._exit_codes.__contains__, pid))
        lines = [f"  rank {rank}: {_in_one_line(outcome)}" for rank, outcome in sorted(outcomes.items())]
        head = (
            f"run_ranks: {name_ranks(hanging)} of {len(workers)} still running after {timeout_s:g} s; their stacks "
            "are on stderr, and all workers were killed"
        )
        raise TimeoutError("\n".join([head, *lines]))

    def _retire(self, workers: Sequence[_Worker]) -> None:
        """Kill workers whose call failed: their state is unknown."""
        self._workers = [worker for worker in self._workers if worker not in workers]
        for worker in workers:
            worker.connection.close()
            self._control.send(("signal", worker.pid, int(signal.SIGKILL)))
        self._expect(limit_s(_EXIT_DEADLINE_S), until=lambda: all(worker.pid in self._exit_codes for worker in workers))
        for worker in workers:
            del self._exit_codes[worker.pid]

    def _expect(self, timeout_s: float, until: Callable[[], bool]) -> None:
        """Process messages of the fork server until `until` holds; it counts as lost if that takes too long."""
        if not self._read_control(timeout_s, until):
            raise _ForkServerLostError(f"it did not answer within {timeout_s:g} s")

    def _read_control(self, timeout_s: float = 0.0, until: Callable[[], bool] = lambda: False) -> bool:
        """Process messages of the fork server until `until` holds or the time is up; returns whether it holds."""
        deadline = time.monotonic() + timeout_s
        while not until():
            if not self._control.poll(max(0.0, deadline - time.monotonic())):
                return False
            try:
                message = self._control.recv()
            except (EOFError, ConnectionError):
                raise _ForkServerLostError("it died") from None
            match message:
                case ("ready", str(folder)):
                    self._folder = folder
                case ("forked", int(pid)):
                    self._forked.append(pid)
                case ("died", int(pid), int(exit_code)):
                    self._exit_codes[pid] = exit_code
        return True


def _start_fork_server(control: Connection) -> subprocess.Popen[bytes]:
    """Start the fork server in a separate session, so that Ctrl-C reaches only the caller."""
    program = (
        f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
        f"from lockstep.testing.fork_server import main; main({control.fileno()})"
    )
    environ = env.snapshot()
    env.OMP_NUM_THREADS.set("1", environ)
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        env=environ,
        pass_fds=[control.fileno()],
        start_new_session=True,
    )


def _send_call(worker: _Worker, call: RankCall) -> None:
    """Send the call and the caller's stdout and stderr; the death of a worker is detected later."""
    with contextlib.suppress(ConnectionError):
        worker.connection.send_bytes(pickle.dumps(call))
        for descriptor in (1, 2):
            reduction.send_handle(worker.connection, descriptor, worker.pid)


def _give_up_on_rest(world_size: int, outcomes: dict[int, _Outcome], grace_s: float) -> None:
    failed = next(rank for rank, outcome in sorted(outcomes.items()) if outcome.failed)
    for rank in range(world_size):
        if rank not in outcomes:
            text = f"still running {grace_s:g} s after rank {failed} failed; it was killed"
            outcomes[rank] = _Outcome(rank, RankLost(text, (failed,)), failed=True)


_lock = threading.Lock()
_pool: _Pool | None = None


def _run(
    payload: bytes, world_size: int, backend: str, timeout_s: float, init: bool, *, fail_fast: bool
) -> list[_Outcome]:
    """Run one call on this process's pool, which is started first, or restarted after it broke."""
    global _pool
    try:
        if _pool is None or not _pool.usable or _pool.owner != os.getpid():
            if _pool is None:
                atexit.register(_close_at_exit)
            _pool = _Pool()
        return _pool.run(payload, world_size, backend, timeout_s, init, fail_fast=fail_fast)
    except TimeoutError:
        raise  # the pool has replaced the workers that hung
    except _ForkServerLostError as error:
        _close_at_exit()
        raise WorkerFailed(f"run_ranks lost the process that holds the workers: {error}", 0, 1) from None
    except BaseException:
        _close_at_exit()  # interrupted: the state of the workers is unknown
        raise


def _close_at_exit() -> None:
    if _pool is not None:
        _pool.close()
