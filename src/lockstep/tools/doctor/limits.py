"""Cores, memory and file descriptors, within the limits of a container's control groups."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from lockstep import env
from lockstep.launch.control_groups import allowed_cores, available_mib, settings_of
from lockstep.launch.environment import visible_cores
from lockstep.tools.doctor.check_result import CheckResult

__all__ = ["look"]

_FEW_FILES = 1024
_FEW_PROCESSES = 512
_MIB_OF_RANK = 700
"""Memory of a rank without a model: the interpreter, torch and its threads, rounded up."""

_UNLIMITED = 1 << 60


def look() -> Iterator[CheckResult]:
    """Check cores, memory, open files and processes."""
    yield _cores()
    yield _memory()
    yield _open_files()
    yield _processes()


def _cores() -> CheckResult:
    cores, allowed, threads = visible_cores(), allowed_cores(), env.OMP_NUM_THREADS.get()
    text = f"{cores} for this process" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    if allowed is not None and allowed < cores:
        ranks = max(1, int(allowed))
        return CheckResult(
            "cores",
            f"{text}; the container is limited to {allowed:g}",
            "--nproc auto starts a rank per core, and these would wait for each other's turn",
            f"lockstep run --nproc {ranks} train.py",
        )
    if threads and threads.isdigit() and int(threads) > cores:
        remedy = f"more threads than cores: unset OMP_NUM_THREADS, or set it to {cores} divided by the number of ranks"
        return CheckResult("cores", text, remedy, "unset OMP_NUM_THREADS")
    return CheckResult("cores", text)


def _memory() -> CheckResult:
    free = available_mib()
    if free is None:
        return CheckResult("memory", "cannot be determined on this system")
    ranks, fit = visible_cores(), free // _MIB_OF_RANK
    text = f"{free} MiB free, enough for {fit} ranks without their models"
    if fit < 1:
        return CheckResult("memory", text, "even one rank may be killed: free some, or give the container more")
    if fit < ranks:
        remedy = f"not enough for --nproc auto, which starts {ranks}"
        return CheckResult("memory", text, remedy, f"lockstep run --nproc {fit} train.py")
    return CheckResult("memory", text)


def _open_files() -> CheckResult:
    limit = _soft_and_hard("RLIMIT_NOFILE")
    if limit is None:
        return CheckResult("open files", "cannot be determined on this system")
    soft, hard = limit
    if soft < _FEW_FILES:
        reason, command = _way_to_more("-n", "nofile", hard if hard > soft else None, 65536)
        return CheckResult("open files", f"at most {soft}", f"many ranks and loader workers need more{reason}", command)
    return CheckResult("open files", f"at most {soft}")


def _processes() -> CheckResult:
    soft, hard = _soft_and_hard("RLIMIT_NPROC") or (_UNLIMITED, _UNLIMITED)
    of_container = min((int(value) for value in settings_of("pids", "pids.max") if value.isdigit()), default=_UNLIMITED)
    smallest, wanted = min(soft, of_container), 8 * _FEW_PROCESSES
    if smallest < _FEW_PROCESSES:
        remedy = "threads count too, and a rank has several per core"
        if of_container <= soft:
            command = f"docker run --pids-limit={wanted} IMAGE"
            return CheckResult("processes", f"at most {smallest}", f"{remedy}; this is the container's limit", command)
        reason, command = _way_to_more("-u", "nproc", hard if hard > soft else None, wanted)
        return CheckResult("processes", f"at most {smallest}", remedy + reason, command)
    return CheckResult("processes", "no limit" if smallest >= _UNLIMITED else f"at most {smallest}")


def _way_to_more(option: str, name: str, hard: int | None, wanted: int) -> tuple[str, str]:
    """Why `ulimit` is not enough (empty if it is), and the command; a hard limit of None cannot be raised."""
    if hard is not None:
        return "", f"ulimit {option} {min(hard, wanted)}"
    return (
        "; the hard limit is no higher, so only root can raise it",
        f"sudo prlimit --pid $$ --{name}={wanted}:{wanted}",
    )


def _soft_and_hard(name: str) -> tuple[int, int] | None:
    """Soft and hard limit of this process; unlimited is a very large number. None on Windows."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:
        return None
    soft, hard = (
        _UNLIMITED if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(getattr(resource, name))
    )
    return soft, hard
