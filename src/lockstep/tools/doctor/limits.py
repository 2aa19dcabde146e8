"""Cores, memory and descriptors, and what a container's control groups leave of them.

[Note: control groups] A container sees all cores and all memory of its host in most places, and what it may use of them
only in its control groups: version 2 in files such as `cpu.max`, version 1 in `cpu/cpu.cfs_quota_us`. The limits of the
groups above count as well, so the smallest one decides.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path

from lockstep import env
from lockstep.launch.environment import visible_cores
from lockstep.tools.doctor.check_result import CheckResult

__all__ = ["allowed_cores", "available_mib", "look"]

_FEW_FILES = 1024
_FEW_PROCESSES = 512
_MIB_OF_RANK = 700
"""What a rank takes before it has a model: the interpreter, torch and its threads, rounded up."""

_CGROUPS = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_KIB_OF_MIB = 1 << 10
_MIB = 1 << 20
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
    of_container = min((int(value) for value in _settings("pids", "pids.max") if value.isdigit()), default=_UNLIMITED)
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


def allowed_cores() -> float | None:
    """Cores' worth of time that control groups allow; None for no limit. See [Note: control groups]."""
    found = []
    for text in _settings("cpu", "cpu.max"):  # "150000 100000", or "max 100000"
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    for quota, period in zip(_settings("cpu", "cpu.cfs_quota_us"), _settings("cpu", "cpu.cfs_period_us"), strict=False):
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def available_mib() -> int | None:
    """Memory that a new process may still take: of the machine, and of the control groups. None if nobody says."""
    found = []
    with contextlib.suppress(OSError):
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) // _KIB_OF_MIB)
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for most, now in zip(_settings("memory", limit), _settings("memory", used), strict=False):
            if most.isdigit() and now.isdigit():
                found.append(max(int(most) - int(now), 0) // _MIB)
    return min(found, default=None)


def _settings(controller: str, name: str) -> list[str]:
    """What that file says in the control groups of this process, from its own up to the root."""
    texts = []
    for folder in _folders(controller):
        with contextlib.suppress(OSError):
            texts.append((folder / name).read_text().strip())
    return texts


def _folders(controller: str) -> list[Path]:
    """The folders of a controller's groups, the innermost first; of both versions."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in _OF_PROCESS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = _CGROUPS / controllers if controllers else _CGROUPS
            own = root / path.lstrip("/")
            found += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return found
