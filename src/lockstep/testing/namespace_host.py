"""The first process of a test host: has imported torch, and forks a rank whenever it is asked to.

It reads pickled requests from stdin: a rank, its variables, the module search path, and a file with the pickled
function and its arguments. When a rank has ended it writes its number and exit code to stdout. What the function
returned or raised lies then beside the file, as `outcome<rank>`.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]


def _run_rank(rank: int, variables: dict[str, str], paths: list[str], job: str) -> None:
    import torch

    from lockstep import env

    env.replace(variables)
    sys.path[:] = paths
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


def main() -> None:
    """Import what ranks need, then fork one for each request, until stdin ends."""
    import torch
    import torch.nn.parallel

    import lockstep.comm.hosts.group
    import lockstep.testing.conformance
    import lockstep.train  # noqa: F401

    torch.set_num_threads(1)
    os.write(1, b"ready\n")
    ranks: dict[int, tuple[int, int]] = {}  # by pidfd: rank and pid
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
                pid = _fork_rank(request)
                ranks[os.pidfd_open(pid)] = (request[0], pid)
            else:
                rank, pid = ranks.pop(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(1, f"{rank} {code}\n".encode())


if __name__ == "__main__":
    main()
