"""startup: from the launcher's command line to the first finished all_reduce, 2 ranks.

Contestants, taking turns:

- `lockstep_run`: `lockstep run --nproc 2` of a script with plain `init_process_group("gloo")`.
- `torchrun`: `torchrun --nproc-per-node 2` of the same script.
- `lockstep_run_init`: `lockstep run --nproc 2` of the script that uses `lockstep.init()` instead.

A sample is the time from just before the launcher is started until the last rank has finished its
all_reduce, read by the ranks from CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import REPOSITORY
from lockstep import env
from lockstep.bench import stats
from lockstep.bench.results import Environment, Result, Series
from lockstep.launch.free_port import find_free_port

__all__ = ["FULL", "QUICK", "LaunchFailed", "Plan", "run"]

SCRIPTS = REPOSITORY / "benchmarks" / "startup_scripts"
_MARK = re.compile(r"first_all_reduce_finished=([0-9.]+)")


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        nproc: number of ranks.
        seconds: no round starts after this many seconds, once `min_rounds` are done.
        min_rounds: rounds that are measured in any case; each starts every contestant once.
        max_rounds: rounds that are enough even if time is left.
    """

    nproc: int = 2
    seconds: float = 50
    min_rounds: int = 5
    max_rounds: int = 12


FULL = Plan()
QUICK = Plan(seconds=0, min_rounds=1, max_rounds=1)
_TIMEOUT_S = 120
_GRACE_S = 35  # torchrun gives its ranks 30 s


class LaunchFailed(RuntimeError):
    """A launcher failed, hung, or not all of its ranks finished; quotes their output."""


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Measure a plan.

    Raises:
        LaunchFailed: a launcher failed or did not finish in time.
    """
    environment = Environment.read()
    samples: dict[str, list[float]] = {name: [] for name in _CONTESTANTS}
    started = time.monotonic()
    for number in range(plan.max_rounds + 1):
        for name, command in _CONTESTANTS.items():
            seconds = _time_launch(command(plan.nproc), plan.nproc)
            if number > 0:  # the first round read the files from disk
                samples[name].append(seconds)
        if number >= plan.min_rounds and time.monotonic() - started >= plan.seconds:
            break
    times = ", ".join(f"{name} {stats.median(values):.3g}" for name, values in samples.items())
    print(f"  nproc {plan.nproc}: {times} s", file=sys.stderr, flush=True)
    series = [Series({"nproc": plan.nproc}, name, 1, values) for name, values in samples.items()]
    return Result("startup", quick, environment, {"threads_per_rank": 1}, series)


def _lockstep_run(script: str) -> Callable[[int], list[str]]:
    return lambda nproc: [_program("lockstep"), "run", "--nproc", str(nproc), str(SCRIPTS / script)]


def _torchrun(script: str) -> Callable[[int], list[str]]:
    # A port of its own: torchrun's default is one fixed port, which another job may hold.
    return lambda nproc: [
        *(_program("torchrun"), "--nproc-per-node", str(nproc)),
        *("--master-port", str(find_free_port()), str(SCRIPTS / script)),
    ]


_CONTESTANTS: dict[str, Callable[[int], list[str]]] = {
    "lockstep_run": _lockstep_run("env_rendezvous.py"),
    "torchrun": _torchrun("env_rendezvous.py"),
    "lockstep_run_init": _lockstep_run("lockstep_init.py"),
}


def _time_launch(command: list[str], nproc: int) -> float:
    """Seconds until the last rank's first all_reduce was done.

    Raises:
        LaunchFailed: the command failed, hung, or not every rank reported.
    """
    variables = env.snapshot()
    env.OMP_NUM_THREADS.set("1", variables)
    started = time.clock_gettime(time.CLOCK_MONOTONIC)
    process = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a Ctrl-C reaches it once, through `_stop`
    )
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise LaunchFailed(f"{' '.join(command)} did not finish within {_TIMEOUT_S} s") from None
    finally:
        _stop(process)
    finished = [float(text) for text in _MARK.findall(output)]
    if process.returncode != 0 or len(finished) != nproc:
        raise LaunchFailed(
            f"{' '.join(command)} exited with code {process.returncode}; "
            f"{len(finished)} of {nproc} ranks finished their all_reduce:\n{output}"
        )
    return max(finished) - started


def _stop(process: subprocess.Popen[str]) -> None:
    """End a launcher that still runs: politely, since its ranks may have left its process group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _program(name: str) -> str:
    """A console script of this very environment, whatever PATH says.

    Raises:
        LaunchFailed: it is not installed.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise LaunchFailed(f"{path} does not exist: install the package into this environment (pip install -e .)")
    return str(path)
