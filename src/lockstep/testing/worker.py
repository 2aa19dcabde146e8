"""The main loop of a test worker: wait for a call, run it as a rank, report, get ready for the next.

A call changes as little as possible in the worker in which it runs: the caller's environment, working directory, module
search path, stdout and stderr are set while it runs; the process group, the ports that it serves, the seeds, the
published batch share and the default dtype are reset after it. A worker is only reused if its call succeeded on every
rank.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from lockstep import batch, env
from lockstep.errors import WorkerFailed

__all__ = ["DUMP_SIGNAL", "RankCall", "Reply", "WorkerDied", "serve"]

# A worker that receives this signal writes the stacks of all its threads to stderr and dies.
DUMP_SIGNAL = signal.SIGUSR1

# The process group's own deadline as a fraction of the call's, so that a rank that waits in vain raises its error
# before the caller considers it hung.
_GROUP_DEADLINE_SHARE = 0.8


@dataclass(frozen=True)
class RankCall:
    """One call of `run_ranks`, as received by one rank.

    Attributes:
        payload: pickled `(fn, args, kwargs)`; a separate field because unpickling imports the caller's module, which
            may fail, and that failure is the rank's.
        backend: name for `init_process_group`.
        init: whether the worker initialises the process group itself.
        timeout_s: the caller's deadline for the whole call.
        folder: a private folder of this call, the same for all ranks, mode 0700.
        environ, cwd, sys_path: those of the caller.
    """

    payload: bytes
    rank: int
    world_size: int
    backend: str
    init: bool
    timeout_s: float
    folder: str
    environ: dict[str, str]
    cwd: str
    sys_path: list[str]


@dataclass(frozen=True)
class Reply:
    """The report of a rank after its function has ended.

    Attributes:
        payload: the pickled result, or the pickled exception.
        failed: whether it is an exception.
        text: the formatted traceback of that exception, else "".
    """

    payload: bytes
    failed: bool
    text: str


@dataclass(frozen=True)
class WorkerDied:
    """The outcome of a rank whose process ended before it returned.

    Attributes:
        rank: the rank that the process was.
        signal_number: the signal that killed it, or None if it exited.
        exit_code: its exit code; 128 + signal number if a signal killed it.
    """

    rank: int
    signal_number: int | None
    exit_code: int

    def __str__(self) -> str:
        if self.signal_number is None:
            return f"its process exited with code {self.exit_code}"
        return f"its process was killed by {signal.Signals(self.signal_number).name}"


def serve(connection: Connection) -> None:
    """Run calls from `connection` until the other end closes it. Local."""
    environ = env.snapshot()
    while True:
        try:
            call: RankCall = pickle.loads(connection.recv_bytes())
            for descriptor in (1, 2):
                received = reduction.recv_handle(connection)
                os.dup2(received, descriptor)
                os.close(received)
        except (EOFError, OSError):
            return
        reply = _attempt(_run, call)
        if reply.failed:
            # Leave the group at once, so that peers waiting for this rank notice.
            _attempt(_clean_up, call)
        connection.send_bytes(pickle.dumps(reply))
        try:
            connection.recv_bytes()  # the caller has every rank's reply: the group is no longer needed
        except (EOFError, OSError):
            return
        reply = _attempt(_clean_up, call)
        env.replace(environ)
        connection.send_bytes(pickle.dumps(reply))


def _attempt(step: Callable[[RankCall], Any], call: RankCall) -> Reply:
    """Run one step of a call and put its result, or the exception that it raised, into a reply."""
    try:
        return Reply(pickle.dumps(step(call)), failed=False, text="")
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return Reply(_pickle_error(error, call.rank), failed=True, text=text)
    finally:
        _flush()


def _pickle_error(error: BaseException, rank: int) -> bytes:
    """The pickled exception; one that cannot be pickled is described in a WorkerFailed."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        described = f"rank {rank} raised {type(error).__name__}, which cannot be pickled: {error}"
        data = pickle.dumps(WorkerFailed(described, rank, 1))
    return data


def _run(call: RankCall) -> Any:
    _take_on_caller(call)
    fn, args, kwargs = pickle.loads(call.payload)
    if call.init:
        _init_process_group(call)
    return fn(*args, **kwargs)


def _init_process_group(call: RankCall) -> None:
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(call.folder, "store"), call.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        call.backend,
        store=store,
        rank=call.rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.timeout_s * _GROUP_DEADLINE_SHARE),
    )


def _clean_up(_: RankCall) -> None:
    """Close what the call left open and reset what it is likely to have changed."""
    import torch
    import torch.distributed as dist

    from lockstep.comm import deadlock
    from lockstep.rendezvous import tcp
    from lockstep.world import current_world

    left_open = current_world()
    if left_open is not None:
        left_open.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    tcp.stop_serving()
    batch.reset()
    deadlock.forget_other_callers()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    # gloo closes its connections when the last reference to the group is dropped.
    gc.collect()


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def _take_on_caller(call: RankCall) -> None:
    """Set the caller's environment and the fixed seeds."""
    import numpy
    import torch

    env.replace(_variables(call))
    sys.path[:] = call.sys_path
    os.chdir(call.cwd)
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    warnings.resetwarnings()
    warnings.filterwarnings("error", module=r"lockstep(\.|$)")


def _variables(call: RankCall) -> dict[str, str]:
    """The caller's variables, with one thread per rank and, without `init`, a launcher's."""
    variables = dict(call.environ)
    env.OMP_NUM_THREADS.set("1", variables)
    for variable in (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE, env.LOCKSTEP_RENDEZVOUS):
        variable.unset(variables)
    if not call.init:
        env.RANK.set(call.rank, variables)
        env.WORLD_SIZE.set(call.world_size, variables)
        env.LOCAL_RANK.set(call.rank, variables)
        env.LOCAL_WORLD_SIZE.set(call.world_size, variables)
        env.LOCKSTEP_RENDEZVOUS.set(call.folder, variables)
    return variables
