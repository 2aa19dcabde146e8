"""What this machine has for training, what it lacks for what people do next, and the command that brings it.

General layout:

* `check_result`: one line of the report.
* `versions`: Python, torch, and the packages that only some need.
* `limits`: cores, memory and descriptors, and what a container's control groups leave of them.
* `sharing`: the memory that ranks share, and that loader workers need; `two_ranks`: two ranks that really meet.
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
    """Look at everything, one after the other. Local; imports torch, and starts two processes for a moment."""
    for look in _LOOKS:
        yield from look()
