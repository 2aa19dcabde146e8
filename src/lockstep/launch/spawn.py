"""`lockstep.spawn`: runs a Python function on N processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeVar

from lockstep.env import snapshot
from lockstep.errors import InputError, WorkerFailed
from lockstep.launch import support
from lockstep.launch.attempt import Attempt
from lockstep.launch.attempt_folder import AttemptFolder
from lockstep.launch.config import LaunchConfig, resolve_nproc
from lockstep.launch.environment import AttemptEnvironment, new_job_id
from lockstep.launch.free_port import find_free_port
from lockstep.launch.output import Relay
from lockstep.launch.payload import PackedCall, check_main_is_ready, load_exception, load_result
from lockstep.launch.positions import RankStatus, describe_interrupt, describe_statuses, look
from lockstep.launch.process import RankCommand, start_reaper, worker_command_line
from lockstep.launch.report import read_reports
from lockstep.launch.root_cause import RankFailure, find_first_failure, find_own_errors
from lockstep.rank_status import make_status_files
from lockstep.secret import new_token
from lockstep.topology import name_ranks

__all__ = ["RankTraceback", "spawn"]

T = TypeVar("T")

_DRAIN_TIMEOUT_S = 5.0
# The exit code of coreutils' `timeout`.
_TIMEOUT_CODE = 124


class RankTraceback(Exception):
    """Cause of an exception that `spawn` raises: the rank's traceback, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def spawn(
    fn: Callable[..., T],
    args: Sequence[object] = (),
    nproc: int | str = "auto",
    *,
    timeout: float | timedelta | None = None,
    env: Mapping[str, str] | None = None,
    prefix: bool = True,
) -> list[T]:
    """Run `fn(*args)` on `nproc` new processes and return what each returned. Local.

    Inside `fn`, `lockstep.init()` and torch's `env://` find the same environment as under `lockstep run`. Each process
    imports the caller's main module again, as multiprocessing's "spawn" does, so a script must call this under
    `if __name__ == "__main__":`. From a notebook or an interactive session, functions and classes defined there are
    sent by value, which requires cloudpickle (`pip install cloudpickle`). If a rank fails, the others are stopped. No
    rank outlives this call, or the calling process, even if that is killed.

    Args:
        fn: a function defined at the top level of a module, or in an interactive session. Its result must be picklable;
            tensors are returned by value.
        args: arguments, the same for every rank; anything that a spawned `multiprocessing.Process` accepts.
        nproc: number of ranks; "auto" for one per GPU, else one per core.
        timeout: stop all ranks after this time (seconds, or a timedelta); None for no limit.
        env: additional environment variables for the ranks.
        prefix: forward the ranks' output line by line, prefixed with `[rank] `, to `sys.stdout` and `sys.stderr` (in a
            notebook, to the cell). If False, ranks write directly to this process's descriptors.

    Returns:
        The results, by rank.

    Raises:
        InputTypeError: `fn` or `args` cannot be sent, or a result cannot be sent back.
        LaunchError: `nproc` is invalid, a process cannot be started, or this system is not Linux.
        WorkerFailed: a rank was killed, exited with an exit code, raised an exception that cannot be passed on, or was
            not done within `timeout`.
        Exception: the exception of the first failing rank, with its type; its `__cause__` has the traceback.
        KeyboardInterrupt: after Ctrl-C, which all ranks get. If a rank then failed, while saving for example, its
            exception is the `__cause__`.
    """
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if timeout_s is not None and not timeout_s > 0:
        raise InputError(f"timeout is {timeout_s} s; expected more than 0, or None for no limit")
    support.check()
    check_main_is_ready()
    variables = {**snapshot(), **(env or {})}
    num_ranks = resolve_nproc(nproc, variables)
    job = new_job_id()
    with contextlib.ExitStack() as stack:
        call = PackedCall(fn, args)
        stack.callback(call.close)
        reaper = start_reaper(job, variables)
        stack.callback(reaper.dismiss)
        folder = AttemptFolder(reaper.watch_folder)
        stack.callback(folder.remove)
        relay = Relay(_target_of(sys.stdout, 1), _target_of(sys.stderr, 2)) if prefix else None
        if relay is not None:
            stack.callback(relay.end, _DRAIN_TIMEOUT_S)
        port, token = find_free_port(), new_token()
        shared = AttemptEnvironment(variables, job, folder.path, num_ranks, "127.0.0.1", port, token=token)
        for fd in make_status_files(folder.path, range(num_ranks)):
            stack.callback(os.close, fd)
        statuses: dict[int, RankStatus] = {}
        with contextlib.ExitStack() as processes:
            attempt = Attempt(
                folder,
                reaper,
                job=job,
                grace_s=LaunchConfig.grace_s,
                settle_s=LaunchConfig.settle_s,
                stop_grace_s=LaunchConfig.stop_grace_s,
                on_failure=lambda: statuses.update(look(folder.path, attempt.pids)),
            )
            processes.callback(attempt.close)
            _run(attempt, _commands(call, shared, relay), relay, timeout_s, folder.path)
        return _results(attempt, folder.path, statuses)


def _results(attempt: Attempt, folder: Path, statuses: Mapping[int, RankStatus]) -> list[Any]:
    """The ranks' results; or raise the exception of the first failure, or KeyboardInterrupt. See `spawn`."""
    reports = read_reports(folder, attempt.pids)
    failures = find_first_failure(attempt.exits, reports, attempt.failed_ranks, statuses)
    if attempt.interrupted_by == signal.SIGINT:
        own = find_own_errors(failures) if attempt.is_cut_short else failures
        raise KeyboardInterrupt from (_error_of(own[0], folder) if own else None)
    if failures:
        raise _error_of(failures[0], folder)
    return [_load(folder, rank, pid) for rank, pid in sorted(attempt.pids.items())]


def _target_of(stream: TextIO | None, fd: int) -> int | TextIO:
    """The descriptor if Python's stream writes to it, otherwise the stream, such as a notebook's cell."""
    if stream is None:
        return fd
    stream.flush()  # earlier output comes first
    try:
        return fd if stream.fileno() == fd else stream
    except (OSError, AttributeError):
        return stream


def _commands(call: PackedCall, shared: AttemptEnvironment, relay: Relay | None) -> list[RankCommand]:
    argv = (*worker_command_line(), "--call", str(call.call_fd), str(call.tracker_fd))
    commands = []
    for rank in shared.ranks:
        stdout, stderr = (None, None) if relay is None else relay.attach(rank)
        commands.append(RankCommand(rank, argv, shared.of_rank(rank), stdout=stdout, stderr=stderr, pass_fds=call.fds))
    return commands


def _run(
    attempt: Attempt, commands: list[RankCommand], relay: Relay | None, timeout_s: float | None, folder: Path
) -> None:
    """Start the ranks and wait for their end; also returns after Ctrl-C.

    Raises:
        WorkerFailed: the ranks were not done in time.
    """
    try:
        attempt.start(commands)
        if relay is not None:
            relay.close_writers()
        is_over = attempt.wait(timeout_s)
    except KeyboardInterrupt:
        # The ranks are not in the terminal's session: this is the only Ctrl-C they get. A second one ends the wait, and
        # the caller's `close` kills them.
        with contextlib.suppress(KeyboardInterrupt):
            if attempt.is_undisturbed:
                _print_interrupt(attempt.interrupt_grace_s, describe_statuses(look(folder, attempt.pids)))
            attempt.interrupt(signal.SIGINT)
            attempt.wait()
        return
    if is_over:
        return
    late = [command.rank for command in commands if command.rank not in attempt.exits]
    if not attempt.failed_ranks:
        attempt.interrupt(signal.SIGTERM)
    attempt.wait()
    if attempt.is_cut_short:
        raise WorkerFailed(
            f"{name_ranks(late)} {'were' if len(late) > 1 else 'was'} not done after {timeout_s:g} s, so all ranks "
            "were stopped; pass a longer timeout if this is expected",
            rank=late[0],
            exit_code=_TIMEOUT_CODE,
        )


def _print_interrupt(grace_s: float, statuses: str) -> None:
    """Write to Python's own stderr, which in a notebook is that of the cell."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it is None, closed, or has no reader
        text = describe_interrupt(signal.SIGINT, grace_s, statuses)
        sys.stderr.write(("\n" if sys.stderr.isatty() else "") + text)  # a newline after the terminal's ^C
        sys.stderr.flush()


def _error_of(failure: RankFailure, folder: Path) -> BaseException:
    """The rank's exception, with its traceback as the cause; otherwise a WorkerFailed."""
    text = failure.report.traceback if failure.report is not None else ""
    error = load_exception(folder, failure.rank)
    if error is not None:
        error.__cause__ = RankTraceback(f"rank {failure.rank} (pid {failure.ended.pid})\n{text}")
        return error
    message = failure.describe() + (f"\n\n{text}" if text else "")
    return WorkerFailed(message, rank=failure.rank, exit_code=failure.exit_code)


def _load(folder: Path, rank: int, pid: int) -> object:
    try:
        return load_result(folder, rank)
    except FileNotFoundError:
        reason = "left with exit code 0 before the function had returned"
    except Exception as error:
        reason = f"returned something that cannot be read here: {type(error).__name__}: {error}"
    raise WorkerFailed(f"rank {rank} (pid {pid}) {reason}", rank=rank, exit_code=0)
