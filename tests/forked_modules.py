"""`python -m MODULE …` in a fork of this process, for a program that starts several such.

`lockstep bench strategies` starts each way to train by the launcher of its users, and that launcher its ranks: nearly
thirty interpreters, which import torch for seconds each. In a process that has torch, `fork_the_ways` has them forked,
and `fork_the_ranks` those of the other benchmarks.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import IO, NoReturn

from lockstep.launch import forked

__all__ = ["fork_the_ranks", "fork_the_ways"]

_PRELOADED = (
    *("accelerate", "lightning_fabric"),
    "sklearn.datasets",
    "torch.distributed.optim",
    "torch.distributed.run",
    "lockstep.bench.strategies.setups",
)


class ForkedModule:
    """As far as `WayJob`, torchrun for its ranks, and `lockstep.bench.ranks` use `subprocess.Popen`.

    Args:
        args: an interpreter, options, `-m`, a module and its arguments.
        env: all variables.
        stdout: None for this process's own; so `stderr`.
        stdin: is ignored, and empty.
        start_new_session: as it must be.
        pass_fds: a descriptor that it keeps, or none.
    """

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        start_new_session: bool = False,
        stdin: int = subprocess.DEVNULL,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        assert start_new_session
        self.args = args
        self.returncode: int | None = None
        streams = (subprocess.DEVNULL, *(stream and stream.fileno() for stream in (stdout, stderr)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        gc.freeze()  # as forked ranks of `lockstep.launch.forked`
        self.pid = os.fork()
        if self.pid == 0:
            _become_module(args[args.index("-m") + 1 :], env, streams, pass_fds)
        self._descriptor = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None and select.select([self._descriptor], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._descriptor)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, in so many seconds.
        """
        if self.returncode is None:
            select.select([self._descriptor], [], [], timeout)
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(list(self.args), timeout)
        return code


def _become_module(
    words: Sequence[str], env: Mapping[str, str], streams: tuple[int | None, ...], kept: tuple[int, ...]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        forked._take(env, streams, kept)
        sys.argv[1:] = words[1:]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        forked._end(code)


def fork_the_ways() -> None:
    """Have what this process and its children start for `lockstep bench strategies` forked, but for what
    `torch.multiprocessing.spawn` starts.
    """
    for name in _PRELOADED:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    jobs = importlib.import_module("lockstep.bench.strategies.jobs")
    jobs.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=ForkedModule, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    importlib.import_module(handler).Popen = ForkedModule  # type: ignore[attr-defined]


def fork_the_ranks() -> None:
    """Have the ranks that `lockstep.bench.ranks` starts forked from this process."""
    ranks = importlib.import_module("lockstep.bench.ranks")
    ranks.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=ForkedModule, DEVNULL=subprocess.DEVNULL
    )
