"""Messages of a rank that is waiting for others: the deadline may be half an hour away."""

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
    """Log that rank 0 is still waiting, and for which ranks. Local."""
    named = list(itertools.islice(missing, _MOST_NAMED + 1))
    more = " and others" if len(named) > _MOST_NAMED else ""
    get_logger(__name__).warning(
        "rank 0 is waiting for %s%s to connect to %s. srun, mpirun or `lockstep run --nproc N script.py` starts all "
        "ranks of a job; a script that was started only once waits in vain",
        name_each(named[:_MOST_NAMED]),
        more,
        place,
    )


def explain_host(address: str) -> str:
    """A sentence, after a full stop, if the name `address` cannot be resolved here; else empty. Local."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        return f". No host is known by the name {address} here: {error}"
    return ""


@contextlib.contextmanager
def looking_for_rank_0(rank: int, address: str, place: str) -> Iterator[None]:
    """Context manager for connecting to rank 0: logs after a while that it takes long, and why if known. Local.

    A name that cannot be resolved may become valid, as when pods of a cluster start in any order; so it is no error
    yet.
    """

    def say() -> None:
        get_logger(__name__).warning("rank %d cannot reach rank 0 yet, at %s%s", rank, place, explain_host(address))

    timer = threading.Timer(SAY_AFTER_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
