"""Checks what this machine has for training and what it lacks, with the command that installs or fixes it.

General layout:

* `check_result`: a line of the report.
* `versions`: Python, torch, and optional packages.
* `limits`: cores, memory and file descriptors, within the limits of a container's control groups.
* `sharing`: shared memory for ranks and loader workers, and a job of two ranks; `two_ranks`: their function.
* `cluster`: GPUs, the host's name, MPI, Slurm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from lockstep.tools.doctor import cluster, limits, sharing, versions
from lockstep.tools.doctor.check_result import CheckResult

__all__ = ["CheckResult", "examine"]

_LOOKS: tuple[Callable[[], Iterable[CheckResult]], ...] = (
    versions.look,
    limits.look,
    sharing.look,
    cluster.look,
    versions.look_at_extras,
)


def examine() -> Iterator[CheckResult]:
    """Run all checks, one after the other. Local; imports torch, and starts two processes for a moment."""
    for look in _LOOKS:
        yield from look()
