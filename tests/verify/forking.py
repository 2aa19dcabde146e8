"""Starts the processes of a verification by forking, which saves each the seconds that importing torch takes."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo

import lockstep.tools.verify.gradients
import lockstep.tools.verify.loaders  # noqa: F401
from lockstep.testing import limit_s
from lockstep.tools.verify import rank
from lockstep.tools.verify.verification import JobOfRanks

torch.set_num_threads(1)  # threads do not survive a fork


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _become(job: JobOfRanks, number: int, port: int) -> None:
    os.environ.update(
        job.variables,
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(job.nproc),
        LOCAL_WORLD_SIZE=str(job.nproc),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    log = os.open(Path(job.log_dir, f"rank{number}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.alarm(int(limit_s(120)))


def _child(job: JobOfRanks, number: int, port: int) -> None:
    code = 1
    try:
        atexit._clear()
        _become(job, number, port)
        rank.main([*(["-m"] if job.is_module else []), job.target, *job.args])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_forked(job: JobOfRanks) -> int:
    """Start the processes, wait for all of them, and return the exit code of the first that failed."""
    Path(job.log_dir).mkdir(exist_ok=True)
    port, running, code = _free_port(), {}, 0
    sys.stdout.flush()
    for number in range(job.nproc):
        pid = os.fork()
        if pid == 0:
            _child(job, number, port)
        running[pid] = number
    failed_at = None
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                code = code or os.waitstatus_to_exitcode(status)
        if code and failed_at is None:
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > limit_s(10):
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return code
