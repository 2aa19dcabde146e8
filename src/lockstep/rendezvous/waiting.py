"""One line of rank 0's while it waits for ranks that do not come: until the deadline there may be half an hour."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from lockstep.log import get_logger
from lockstep.topology import name_each

__all__ = ["SAY_AFTER_S", "say_who_is_awaited"]

SAY_AFTER_S = 20.0
_MOST_NAMED = 16


def say_who_is_awaited(missing: Iterable[int], place: str) -> None:
    """Say that rank 0 still waits, and for whom. Local."""
    named = list(itertools.islice(missing, _MOST_NAMED + 1))
    more = " and others" if len(named) > _MOST_NAMED else ""
    get_logger(__name__).warning(
        "rank 0 waits for %s%s to come to %s. srun, mpirun or `lockstep run --nproc N script.py` starts all ranks of a "
        "job; a script that was started once, in a shell, waits in vain",
        name_each(named[:_MOST_NAMED]),
        more,
        place,
    )
