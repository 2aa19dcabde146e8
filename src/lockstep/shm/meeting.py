"""How the ranks of one host find each other: through a store, into one control segment.

Rank 0 makes the segment and publishes its handle in the store; the others map it. From then on
each writes into its block who it is, and all wait until everybody has.

[Note: stale handles] A store may outlive a group: a script that opens a second group over it must not
be handed the segment of the first. So rank 0 deletes the handle once all have come, and nobody leaves
`Team.connect` before that. Where a killed rank 0 could not delete it, the handle leads nowhere, because a
segment goes with its maker: then wait for the next one to be published, but not for long, because a
container that cannot see the maker looks the same.
"""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Callable
from typing import Protocol

from lockstep.errors import RankLost, RendezvousError, SetupError, SharedMemoryError
from lockstep.shm.board import Board
from lockstep.shm.liveness import Watch, own_identity
from lockstep.shm.segment import Segment
from lockstep.shm.sync import PeerState

__all__ = ["Store", "forget", "meet"]

_SEGMENT = "segment"
_ERROR = "error:"
_STALE = (errno.ENOENT, errno.ESRCH, errno.ESTALE)
_STALE_PATIENCE_S = 10.0
_POLL_S = 0.02
_ASK_STORE_EVERY_S = 0.1


class Store(Protocol):
    """What ranks need of a torch store to meet."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def get(self, key: str) -> str:
        """Read a value, waiting for it up to the group's timeout; RuntimeError after that."""

    def has(self, key: str) -> bool:
        """Whether a value is there."""

    def delete(self, key: str) -> None:
        """Remove a value."""


def meet(
    store: Store, rank: int, world_size: int, size_bytes: int, timeout_s: float, name_of: Callable[[int], str]
) -> Segment:
    """The control segment of a new group, in which all ranks have introduced themselves. Collective.

    Args:
        store: where to meet; nobody else uses its keys.
        rank: this rank, 0 … world_size-1.
        world_size: number of ranks that will come.
        size_bytes: of the segment.
        timeout_s: seconds to wait for the last of them.
        name_of: how to call a rank in an error message.

    Raises:
        RendezvousError: a rank did not come in time, or two came as the same; names it.
        RankLost: a rank came and died.
        SetupError: ranks were given different world sizes.
        SharedMemoryError: the memory cannot be had; on every rank.
    """
    if rank == 0:
        segment, published = _publish(store, world_size, size_bytes)
    else:
        segment, published = _find(store, rank, world_size, timeout_s, name_of)
    try:
        board = Board(segment, rank, world_size)
        if board.state(rank) != PeerState.ABSENT:
            other = board.identity(rank)
            raise RendezvousError(
                f"two processes came as {name_of(rank)}: this one and pid {other.pid} on {other.host}. Give each "
                "process a rank of its own"
            )
        board.introduce(own_identity())
        _await_all(board, store, _failure_key(published), timeout_s, name_of)
    finally:
        segment.release()
    return segment


def forget(store: Store) -> None:
    """Delete the handle. By rank 0, once all have come. See [Note: stale handles]."""
    store.delete(_SEGMENT)


def _publish(store: Store, world_size: int, size_bytes: int) -> tuple[Segment, str]:
    try:
        segment = Segment.create(size_bytes)
    except SharedMemoryError as error:
        store.set(_SEGMENT, f"{_ERROR}{error}")
        raise
    published = f"{world_size} {segment.handle}"
    store.set(_SEGMENT, published)
    return segment, published


def _find(
    store: Store, rank: int, world_size: int, timeout_s: float, name_of: Callable[[int], str]
) -> tuple[Segment, str]:
    start = time.monotonic()
    while True:
        try:
            published = store.get(_SEGMENT)
        except RuntimeError as error:
            waited_s = time.monotonic() - start
            raise RendezvousError(
                f"{name_of(rank)} waited {waited_s:.1f} s for {name_of(0)}, which opens the shared memory, and could "
                f"not learn where it is: {str(error).splitlines()[0]}. Is {name_of(0)} running?"
            ) from None
        if published.startswith(_ERROR):
            raise SharedMemoryError(f"{name_of(0)}: {published.removeprefix(_ERROR)}")
        expected, _, handle = published.partition(" ")
        try:
            segment = Segment.attach(handle)
        except SharedMemoryError as error:
            if error.errno not in _STALE or time.monotonic() - start > min(timeout_s, _STALE_PATIENCE_S):
                store.set(_failure_key(published), f"{name_of(rank)}: {error}")
                raise
            time.sleep(_POLL_S)
            continue
        if int(expected) != world_size:
            segment.release()
            raise SetupError(
                f"{name_of(rank)} was given world_size {world_size}, {name_of(0)} {expected}: give all ranks the same"
            )
        return segment, published


def _failure_key(published: str) -> str:
    """Where ranks that cannot map what was published say so; another one for every segment."""
    return "failure-" + hashlib.blake2b(published.encode(), digest_size=8).hexdigest()


def _await_all(board: Board, store: Store, failure_key: str, timeout_s: float, name_of: Callable[[int], str]) -> None:
    """Wait until every rank has introduced itself."""
    start = time.monotonic()
    ask_store_at_s = _ASK_STORE_EVERY_S
    watch = Watch({})
    known: set[int] = {board.rank}
    try:
        while True:
            for rank in range(board.world_size):
                if rank not in known and board.state(rank) != PeerState.ABSENT:
                    watch.add(rank, board.identity(rank))
                    known.add(rank)
            if len(known) == board.world_size:
                return
            dead = sorted(watch.dead())
            if dead:
                names = ", ".join(map(name_of, dead))
                raise RankLost(f"{names} died while the group was being made", tuple(dead))
            waited_s = time.monotonic() - start
            if waited_s > ask_store_at_s:
                ask_store_at_s = waited_s + _ASK_STORE_EVERY_S
                if store.has(failure_key):
                    raise SharedMemoryError(store.get(failure_key))
            if waited_s > timeout_s:
                missing = ", ".join(name_of(rank) for rank in range(board.world_size) if rank not in known)
                raise RendezvousError(f"{missing} did not come within {timeout_s:g} s of {name_of(board.rank)}")
            time.sleep(min(0.001, waited_s / 10))
    finally:
        watch.close()
