"""One line of a rank's while it waits for others that do not come: until the deadline there may be half an hour."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterable, Iterator

from lockstep.log import get_logger
from lockstep.topology import name_each

__all__ = ["SAY_AFTER_S", "explain_host", "looking_for_rank_0", "say_who_is_awaited"]

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


def explain_host(address: str) -> str:
    """A sentence, after a full stop, if no host is known by that name here; else empty. Local."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        return f". No host is known by the name {address} here: {error}"
    return ""


@contextlib.contextmanager
def looking_for_rank_0(rank: int, address: str, place: str) -> Iterator[None]:
    """A context in which a rank connects to rank 0: says so after a while, and whether the name means no host. Local.

    The name may come to mean one, as where pods of a cluster start in any order; so it is no error yet.
    """

    def say() -> None:
        get_logger(__name__).warning("rank %d does not reach rank 0 yet, at %s%s", rank, place, explain_host(address))

    timer = threading.Timer(SAY_AFTER_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
