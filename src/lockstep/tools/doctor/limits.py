"""Cores, memory and descriptors, and what a container's control groups leave of them."""

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
"""What a rank takes before it has a model: the interpreter, torch and its threads, rounded up."""

_UNLIMITED = 1 << 60


def look() -> Iterator[CheckResult]:
    """Cores, memory, open files, processes."""
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
            f"{text}; the container may use {allowed:g}",
            "a rank for each core, which is what --nproc auto starts, would wait for each other's turn",
            f"lockstep run --nproc {ranks} train.py",
        )
    if threads and threads.isdigit() and int(threads) > cores:
        remedy = f"more threads than cores: unset OMP_NUM_THREADS, or set it to {cores} divided by the number of ranks"
        return CheckResult("cores", text, remedy, "unset OMP_NUM_THREADS")
    return CheckResult("cores", text)


def _memory() -> CheckResult:
    free = available_mib()
    if free is None:
        return CheckResult("memory", "this system does not say how much is free")
    ranks, fit = visible_cores(), free // _MIB_OF_RANK
    text = f"{free} MiB free, room for {fit} ranks before their models"
    if fit < 1:
        return CheckResult("memory", text, "one rank may already be killed: free some, or give the container more")
    if fit < ranks:
        remedy = f"--nproc auto starts {ranks}, for which it does not suffice"
        return CheckResult("memory", text, remedy, f"lockstep run --nproc {fit} train.py")
    return CheckResult("memory", text)


def _open_files() -> CheckResult:
    limit = _soft_and_hard("RLIMIT_NOFILE")
    if limit is None:
        return CheckResult("open files", "this system does not say how many")
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
        remedy = "threads count too, and a rank has several for each core"
        if of_container <= soft:
            command = f"docker run --pids-limit={wanted} IMAGE"
            return CheckResult("processes", f"at most {smallest}", f"{remedy}; the container's limit", command)
        reason, command = _way_to_more("-u", "nproc", hard if hard > soft else None, wanted)
        return CheckResult("processes", f"at most {smallest}", remedy + reason, command)
    return CheckResult("processes", "no limit" if smallest >= _UNLIMITED else f"at most {smallest}")


def _way_to_more(option: str, name: str, hard: int | None, wanted: int) -> tuple[str, str]:
    """Why it takes more than `ulimit`, and the command; a hard limit of None leaves no room."""
    if hard is not None:
        return "", f"ulimit {option} {min(hard, wanted)}"
    return "; the hard limit is no higher, so root must raise it", f"sudo prlimit --pid $$ --{name}={wanted}:{wanted}"


def _soft_and_hard(name: str) -> tuple[int, int] | None:
    """A limit of this process; what is unlimited counts as a very large number. None on Windows."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:
        return None
    soft, hard = (
        _UNLIMITED if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(getattr(resource, name))
    )
    return soft, hard
