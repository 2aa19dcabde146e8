"""The first processes of test hosts: forked from one that has imported torch, they fork ranks when they are asked to.

    python namespace_host.py PID,STDIN,STDOUT …      a process in the namespaces of each host, and two pipes to talk

A host's process reads pickled requests: a rank, its variables, the module search path, and a file with the pickled
function and its arguments. When a rank has ended it writes its number and exit code. What the function returned or
raised then lies next to the file, as `outcome<rank>`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import sys
from pathlib import Path
from typing import Any

from lockstep import libc

__all__ = ["fork_within", "main"]


def _run_rank(rank: int, variables: dict[str, str], paths: list[str], job: str) -> None:
    import torch

    from lockstep import env

    env.replace(variables)
    sys.path[:] = paths
    torch.set_num_threads(1)  # again, after the fork: see `_become_rank` in launch/forked.py
    torch.manual_seed(0)
    try:
        fn, args = pickle.loads(Path(job).read_bytes())
        outcome: Any = fn(*args)
    except Exception as error:
        outcome = error
    partial = f"{job}.partial{rank}"
    Path(partial).write_bytes(pickle.dumps(outcome))
    os.replace(partial, Path(job).with_name(f"outcome{rank}"))


def _fork_rank(request: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.dup2(2, 1)
        _run_rank(*request)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_within(pid: int) -> int:
    """Enter the namespaces of a process, and fork there: who enters one of process ids is not in it, its children are.

    Args:
        pid: of a process in there.

    Returns:
        As `os.fork`: 0 in the child.

    Raises:
        OSError: they cannot be entered.
    """
    namespaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt", "pid")]
    for namespace in namespaces:
        if libc.call("setns", namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {pid}")
        os.close(namespace)
    return os.fork()


def _serve(pid: int, stdin: int, stdout: int) -> None:
    """In a child of the first process: fork ranks in the namespaces of `pid`, for each request one."""
    child = fork_within(pid)
    if child:
        os.closerange(3, 1 << 16)  # the pipes are the child's
        os.waitpid(child, 0)
        return
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.closerange(3, 1 << 16)
    os.write(1, b"ready\n")
    _fork_ranks()


def _fork_ranks() -> None:
    """Fork a rank for each request, until stdin ends. What ranks have forked ends when the next job begins."""
    ranks: dict[int, tuple[int, int]] = {}  # by pidfd: rank and pid
    jobs: dict[int, str] = {}  # by session, which is the pid of a rank
    while True:
        readable, _, _ = select.select([0, *ranks], [], [])
        for descriptor in readable:
            if descriptor == 0:
                header = os.read(0, 8)
                if len(header) < 8:
                    return
                left, data = int.from_bytes(header, "little"), b""
                while left > len(data):
                    data += os.read(0, left - len(data))
                request = pickle.loads(data)
                for session in [each for each, job in jobs.items() if job != request[3]]:
                    del jobs[session]
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(session, signal.SIGKILL)
                pid = _fork_rank(request)
                jobs[pid] = request[3]
                ranks[os.pidfd_open(pid)] = (request[0], pid)
            else:
                rank, pid = ranks.pop(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(1, f"{rank} {code}\n".encode())


def main() -> None:
    """Import what ranks need, then fork a process for each host, and wait for the end of all."""
    import torch
    import torch.nn.parallel

    import lockstep.comm.hosts.group
    import lockstep.data
    import lockstep.parallel
    import lockstep.testing.conformance
    import lockstep.train  # noqa: F401

    importlib.import_module("torch._dynamo")  # which the first optimizer of a process imports
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a rank then leaves the shared pages alone
    places = [tuple(map(int, place.split(","))) for place in sys.argv[1:]]
    children = []
    for place in places:
        children.append(os.fork())
        if children[-1] == 0:
            code = 1
            try:
                _serve(*place)
                code = 0
            finally:
                os._exit(code)
    os.closerange(3, 1 << 16)  # the pipes are theirs
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
