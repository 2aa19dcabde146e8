"""Runs ranks that a script starts itself in place, in the processes that the verification started for them.

[Note: ranks in place] A script may start its ranks with `torch.multiprocessing.spawn`, `lockstep.spawn`, or as
processes of multiprocessing. It is nevertheless started N times, and each of these processes runs one of the ranks that
the script would start: the function is called directly instead of being passed to a new process. A process of
multiprocessing counts as a rank if its function joins a group, as seen in a first run. The script determines the number
of ranks, by an option or by the number of devices; if it differs from the number that was started, it is noted, and the
verification starts again with that number. To get a single rank, the script is run with a single device, then with
other arguments, and finally with one number replaced by 1, in its ranks' arguments or in its source. Changes are
accepted if the script then creates a group of one and reaches its data.

The ranks meet where their launcher says, whatever the script says: a port that it picks, or a file with a random name,
would be another one in each process.

Writes the fact `starts`: the number of ranks that the script asked for, if it differs; and the file "target".
"""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import current_process, get_start_method
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing.spawn  # in `torch.multiprocessing` the name is the function's
from torch.distributed.launcher.api import elastic_launch

import lockstep
import lockstep.launch.spawn as launch_spawn
from lockstep import env
from lockstep.tools.rehearse.patching import wrap, wrap_everywhere
from lockstep.tools.verify.recorder import StepRecorder, is_of_library
from lockstep.tools.verify.settings import RANKS
from lockstep.tools.verify.waits import watch_waits
from lockstep.torch_private.stores import FileStore, TCPStore

__all__ = ["StartWatch"]

_MEETING = {env.MASTER_ADDR.name, env.MASTER_PORT.name}
_OF_LAUNCHER = {*_MEETING, *(each.name for each in (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE))}
# How long a rank waits for others, which may use another meeting point.
_PATIENCE = timedelta(minutes=5)


class StartWatch:
    """Intercepts this process's starts of other processes. See [Note: ranks in place].

    Args:
        recorder: recorder of this process.
        seed: function that sets the generators to the state of a new process.
    """

    def __init__(self, recorder: StepRecorder, seed: Callable[[int], None]) -> None:
        self._recorder = recorder
        self._settings = recorder.settings
        self._count = self._settings.world_size if self._settings.role == RANKS else 1
        self._seed = seed
        self._pid = os.getpid()
        self._expected: int | None = None
        self._started = 0  # processes that would be ranks
        self._variables = env.snapshot()

    def install(self) -> None:
        """Watch from now on."""
        wrap_everywhere(torch.distributed.distributed_c10d, "init_process_group", self._join)
        wrap_everywhere(torch.multiprocessing, "start_processes", self._start_processes)
        wrap(elastic_launch, "__call__", self._launch)
        for place in (lockstep, launch_spawn):  # which horovod.run takes it from
            wrap(place, "spawn", self._spawn)
        wrap(BaseProcess, "start", self._start)

    def _expect(self, count: int, expected: int) -> None:
        """End the run, with a note, if the script asks for another number of ranks than expected.

        Ranks started after training, such as for a further demonstration, are left out.
        """
        if count != expected:
            if not self._recorder.steps:
                self._recorder.facts["starts"] = count
            self._recorder.end()

    def _restore(self, names: set[str]) -> None:
        """Set these variables as the launcher did."""
        env.replace(env.snapshot() | {name: value for name, value in self._variables.items() if name in names})

    def _expect_started(self, count: int) -> None:
        """`_expect`, where one process may start all ranks, of which it runs one; the first time says which."""
        if self._expected is None:
            self._expected = count if count == self._settings.changes.replaces else self._count
        self._expect(count, self._expected)

    def _join(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._pid:  # a child, which is therefore a rank
                self._settings.file("target").write_text(_name_of(current_process()))
                os._exit(0)
            bound = signature.bind(*args, **kwargs)
            asked = bound.arguments.get("world_size", -1)
            asked = int(asked if asked is not None and int(asked) > 0 else env.WORLD_SIZE.get() or 0)
            if asked > 0:
                self._expect(asked, self._count)
            self._restore(_MEETING)
            bound.arguments.pop("init_method", None)
            if isinstance(bound.arguments.get("store"), FileStore | TCPStore):  # Lockstep's has a prefix
                del bound.arguments["store"]
            bound.arguments.setdefault("timeout", _PATIENCE)
            self._recorder.facts["wants_gpus"] |= "nccl" in str(bound.arguments.get("backend"))
            group = original(*bound.args, **bound.kwargs)
            watch_waits(self._recorder)
            return group

        return init_process_group

    def _numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments for a rank; if the settings say so, with 1 instead of one of the numbers N."""
        number, which = self._settings.changes.replaces, self._settings.changes.argument
        places = [at for at, each in enumerate(args) if number and type(each) is int and each == number]
        if not 0 <= which < len(places):
            return args
        return (*args[: places[which]], 1, *args[places[which] + 1 :])

    def _start_processes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start_processes(
            fn: Callable[..., Any],
            args: tuple[Any, ...] = (),
            nprocs: int = 1,
            join: bool = True,
            daemon: bool = False,
            start_method: str = "spawn",
        ) -> Any:
            self._expect_started(nprocs)
            self._run(start_method, lambda: fn(self._recorder.rank, *self._numbers(args)))
            return None if join else _Joined()

        return start_processes

    def _launch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def launch(launcher: Any, *args: Any) -> dict[int, Any]:
            """`torch.distributed.launcher.api.elastic_launch.__call__`, as of Accelerate's `notebook_launcher`."""
            config, results = launcher._config, list[Any]()
            self._expect_started(config.max_nodes * config.nproc_per_node)
            self._restore(_OF_LAUNCHER)
            self._run(config.start_method, lambda: results.append(launcher._entrypoint(*args)))
            return {self._recorder.rank: results[0]}

        return launch

    def _spawn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def spawn(fn: Callable[..., Any], args: Any = (), nproc: Any = "auto", **options: Any) -> list[Any]:
            env.replace({**env.snapshot(), **(options.get("env") or {})})
            results = list[Any]()
            self._run("spawn", lambda: results.append(fn(*args)))
            return results * self._count  # for any requested number: the ranks get it from lockstep.init()

        return spawn

    def _start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(process: Any) -> None:
            code = getattr(_function_of(process), "__code__", None)
            if code is not None and is_of_library(code.co_filename):  # such as a worker of a loader
                original(process)
            elif self._settings.target != _name_of(process):
                process._Popen = ForkProcess._Popen  # whose child has what is installed here
                original(process)
            else:
                process._popen, process._sentinel = _Ended(), os.open(os.devnull, os.O_RDONLY)
                self._started += 1
                if self._started == self._recorder.rank + 1:
                    process._args = self._numbers(process._args)
                    self._run(process._start_method or get_start_method(), process.run)

        return start

    def _run(self, method: str, call: Callable[[], Any]) -> None:
        if method != "fork":
            self._begin_anew()
        try:
            call()
        except SystemExit as leaving:
            if leaving.code:
                raise

    def _begin_anew(self) -> None:
        """Set generators as in a new process, which imports the script without the seeding under `__main__`."""
        self._seed(self._recorder.rank)
        script = getattr(sys.modules["__main__"], "__file__", None)
        with contextlib.suppress(Exception):  # raised by a script that cannot run twice in one process
            runpy.run_path(script or "", run_name="__mp_main__")


def _function_of(process: BaseProcess) -> Any:
    """The function that a process calls, unwrapped from a functools.partial."""
    target = getattr(process, "_target", None) or type(process).run
    return getattr(target, "func", target)


def _name_of(process: BaseProcess) -> str:
    function = _function_of(process)
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


class _Joined:
    """Returned by `start_processes`, for processes that have ended."""

    processes: tuple[BaseProcess, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Return at once, as nothing is left to wait for."""
        return True

    def pids(self) -> list[int]:
        """No pids, as there are no processes."""
        return []


class _Ended:
    """Stands in for the handle of a process that has ended without an error."""

    returncode = 0

    def poll(self, flag: int = 0) -> int:
        """Its exit code."""
        return 0

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code."""
        return 0

    def terminate(self) -> None:
        """Does nothing, as the process has ended."""

    kill = close = terminate
