"""Finds MPI libraries on this machine: the command that starts ranks, and a Python whose mpi4py uses that library."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep import env

__all__ = ["Mpi", "clean_environment", "find_mpis", "launcher_arguments", "probe"]

_COMMANDS = ("mpirun", "mpiexec", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra")
_PROBE_S = 60.0
_PROBE = (
    "from mpi4py import MPI\n"
    "version = MPI.Get_library_version().split(chr(10))[0]\n"
    "if MPI.COMM_WORLD.Get_rank() == 0: print('found', MPI.COMM_WORLD.Get_size(), version, flush=True)"
)


@dataclass(frozen=True)
class Mpi:
    """An MPI library that can start ranks.

    Attributes:
        name: name and version, such as `Open MPI 4.1.4`.
        mpiexec: path of the command.
        python: an interpreter whose mpi4py uses this library.
    """

    name: str
    mpiexec: str
    python: str

    def command(self, num_ranks: int) -> list[str]:
        """The command line before the program."""
        return [self.mpiexec, *launcher_arguments(self.mpiexec, self.name), "-n", str(num_ranks)]


def launcher_arguments(mpiexec: str, name: str) -> list[str]:
    """Options with which a library starts more ranks than cores, also for root, without binding them.

    Args:
        mpiexec: path of the command.
        name: name of the library.
    """
    return ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if "Open MPI" in name else []


def clean_environment() -> dict[str, str]:
    """This process's environment, without the variables of other launchers, and with one thread per rank."""
    variables = env.snapshot()
    for variable in (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE, env.LOCKSTEP_RENDEZVOUS):
        variable.unset(variables)
    env.OMP_NUM_THREADS.set("1", variables)
    return variables


def find_mpis(num_ranks: int, more: Sequence[str] = ()) -> tuple[list[Mpi], dict[str, str]]:
    """The libraries that can start this number of ranks, each once; and why others cannot.

    Args:
        num_ranks: number of ranks of a job.
        more: paths of further commands; a Python with mpi4py may be in the same folder.

    Returns:
        Libraries; and command -> why its library does not work.
    """
    found: dict[str, Mpi] = {}
    reasons: dict[str, str] = {}
    commands = [*filter(None, map(shutil.which, _COMMANDS)), *more]
    for command in {str(Path(command).resolve()): command for command in reversed(commands)}.values():
        mpi, reason = probe(command, num_ranks)
        if mpi is None:
            reasons[command] = reason
        else:
            found.setdefault(mpi.name, mpi)
    return list(found.values()), reasons


def probe(mpiexec: str, num_ranks: int) -> tuple[Mpi | None, str]:
    """Start a job of mpi4py; returns None and a reason if it does not have that number of ranks."""
    beside = Path(mpiexec).parent / "python"
    reason = ""
    for python in dict.fromkeys([str(beside), sys.executable] if beside.exists() else [sys.executable]):
        mpi, reason = _probe_with(mpiexec, python, num_ranks)
        if mpi is not None:
            return mpi, ""
    return None, reason


def _probe_with(mpiexec: str, python: str, num_ranks: int) -> tuple[Mpi | None, str]:
    try:
        kind = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=_PROBE_S).stdout
        command = [mpiexec, *launcher_arguments(mpiexec, kind), "-n", str(num_ranks), python, "-c", _PROBE]
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_S, env=clean_environment(), stdin=subprocess.DEVNULL
        )
    except OSError as error:
        return None, f"it cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return None, f"{mpiexec} did not start {num_ranks} ranks within {_PROBE_S:g} s"
    match = re.search(r"^found (\d+) (.*)$", said.stdout, re.MULTILINE)
    if match is None and "No module named 'mpi4py'" in said.stderr:
        return None, "mpi4py is not installed: pip install mpi4py"
    if match is None:
        lines = [line for line in (said.stderr + said.stdout).splitlines() if "Error" in line or "error" in line]
        return None, f"mpi4py does not run under it: {(lines or ['no output'])[-1].strip()[:160]}"
    if int(match[1]) != num_ranks:
        return None, f"mpi4py of {python} uses another MPI library: it sees {match[1]} rank, not {num_ranks}"
    return Mpi(_short_name(match[2]), mpiexec, python), ""


def _short_name(version: str) -> str:
    """Name and version from a library's version string.

    >>> _short_name("Open MPI v4.1.4, package: Debian OpenMPI"), _short_name("MPICH Version:      5.0.2")
    ('Open MPI 4.1.4', 'MPICH 5.0.2')
    >>> _short_name("Intel(R) MPI Library 2021.18 for Linux* OS")
    'Intel MPI 2021.18'
    """
    number = re.search(r"\d+(\.\d+)+", version)
    for sign, name in (("Open MPI", "Open MPI"), ("Intel", "Intel MPI"), ("MPICH", "MPICH"), ("MVAPICH", "MVAPICH")):
        if sign in version:
            return f"{name} {number[0]}" if number else name
    return version.strip()[:40]
