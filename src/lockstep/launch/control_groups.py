"""The cores and memory that a container's control groups allow to a process.

[Note: control groups] A container usually sees all cores and memory of its host; how much of them it may use is only
stated in its control groups: version 2 in files such as `cpu.max`, version 1 in `cpu/cpu.cfs_quota_us`. The limits of
parent groups apply as well, so the smallest one counts.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["allowed_cores", "available_mib", "settings_of"]

_CGROUPS = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_KIB_OF_MIB = 1 << 10
_MIB = 1 << 20


def allowed_cores() -> float | None:
    """CPU time, in cores, that control groups allow; None for no limit. See [Note: control groups]."""
    found = []
    for text in settings_of("cpu", "cpu.max"):  # "150000 100000", or "max 100000"
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    old = settings_of("cpu", "cpu.cfs_quota_us"), settings_of("cpu", "cpu.cfs_period_us")
    for quota, period in zip(*old, strict=False):
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def available_mib() -> int | None:
    """MiB that a new process may still allocate, on the machine and in the control groups. None if unknown."""
    found = []
    with contextlib.suppress(OSError):
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) // _KIB_OF_MIB)
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for most, now in zip(settings_of("memory", limit), settings_of("memory", used), strict=False):
            if most.isdigit() and now.isdigit():
                found.append(max(int(most) - int(now), 0) // _MIB)
    return min(found, default=None)


def settings_of(controller: str, name: str) -> list[str]:
    """The contents of that file in the control groups of this process, from its own up to the root."""
    texts = []
    for folder in _folders(controller):
        with contextlib.suppress(OSError):
            texts.append((folder / name).read_text().strip())
    return texts


def _folders(controller: str) -> list[Path]:
    """The folders of a controller's groups, innermost first; of both versions."""
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
