"""Starts Python programs under a real mpirun, and cleans up after it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.bench.comm.mpi import clean_environment
from lockstep.testing import limit_s

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")

_RANK_PROGRAM = str(Path(__file__).with_name("mpi_rank.py"))


def _reason_to_skip() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if shutil.which("mpirun") is None:
        return "there is no mpirun (apt install openmpi-bin libopenmpi-dev)"
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=limit_s(60)).stdout
    return "" if "Open MPI" in said else f"mpirun is not Open MPI's: {said.splitlines()[:1]}"


_REASON = _reason_to_skip()
needs_mpi = pytest.mark.skipif(bool(_REASON), reason=_REASON)


def mpirun(
    num_ranks: int, program: Sequence[str], *, timeout_s: float = 60.0, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python program…` on that many ranks; everything is killed at the deadline.

    Raises:
        TimeoutError: with what was printed until then.
    """
    process = subprocess.Popen(
        [*MPIRUN, "-np", str(num_ranks), sys.executable, *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment() | (variables or {}),
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s(timeout_s))
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun then stops its ranks
        try:
            output, errors = process.communicate(timeout=limit_s(10))
        except subprocess.TimeoutExpired:
            _kill_session(process.pid)
            output, errors = process.communicate()
        raise TimeoutError(f"mpirun was not done after {timeout_s:g} s:\n{output}\n{errors}") from None
    finally:
        _kill_session(process.pid)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def _kill_session(session: int) -> None:
    """Kill mpirun and its ranks: they have process groups of their own, and its session."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            if os.getsid(int(entry)) == session:
                os.kill(int(entry), signal.SIGKILL)


def launch(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **_: Any) -> list[Any]:
    """As `run_ranks` with `init=False` and `expect_errors=True`: what `fn` returned on each rank, or its exception.

    A rank whose process ended before it said anything has what mpirun printed.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-mpi-") as folder:
        Path(folder, "job").write_bytes(pickle.dumps((fn, args, list(sys.path))))
        done = mpirun(world_size, [_RANK_PROGRAM, folder], timeout_s=timeout)
        said = f"mpirun ended with {done.returncode}: {done.stdout}\n{done.stderr}"
        paths = [Path(folder, f"outcome{rank}") for rank in range(world_size)]
        return [pickle.loads(path.read_bytes()) if path.exists() else said for path in paths]
