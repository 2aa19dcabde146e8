"""What a group needs while it is being made: torch's store in the form that ranks meet in, and an eye on the others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from lockstep import env
from lockstep.comm.message_team import MessageTeam
from lockstep.comm.mpi.board import MpiBoard
from lockstep.errors import RankLost
from lockstep.shm.board import Board
from lockstep.shm.liveness import Watch
from lockstep.shm.sync import PeerState
from lockstep.shm.team import Team
from lockstep.torch_private.stores import PrefixStore, Store

__all__ = ["Lookout", "MeetingStore"]


class MeetingStore:
    """A torch store with keys of its own for each attempt of a job.

    A restarted job may find its store as the attempt before it left it.

    Args:
        store: whose keys nobody else uses within the attempt.
    """

    def __init__(self, store: Store) -> None:
        attempt = env.TORCHELASTIC_RESTART_COUNT.get() or 0
        self._store = PrefixStore(f"attempt{attempt}", store)

    @property
    def torch_store(self) -> Store:
        """The same keys, for torch itself."""
        return self._store

    def below(self, prefix: str) -> MeetingStore:
        """A store for keys of its own."""
        return MeetingStore(PrefixStore(prefix, self._store))

    def set(self, key: str, value: str) -> None:
        """Publish a value."""
        self._store.set(key, value)

    def get(self, key: str) -> str:
        """Read a value that is there."""
        return bytes(self._store.get(key)).decode()

    def has(self, key: str) -> bool:
        """Whether a value is there."""
        return bool(self._store.check([key]))

    def delete(self, key: str) -> None:
        """Remove a value, from a store that can."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(key)


class Lookout:
    """Sees in the default group that a rank cannot come to a new one: it has died, left or raised.

    Without it nobody would know before the deadline, because a rank that has not come yet has
    nothing to be watched by. Called while waiting; a context manager.

    Args:
        default_group: the default group; watched only if it is one of ours.
        global_ranks: of the new group.
    """

    def __init__(self, default_group: Any, global_ranks: Sequence[int]) -> None:
        team = getattr(getattr(default_group, "engine", None), "team", None)
        self._team: Team | MessageTeam | None = team if isinstance(team, (Team, MessageTeam)) else None
        self._ranks = [] if self._team is None else [rank for rank in global_ranks if rank != self._team.rank]
        self._watch = Watch({})
        if isinstance(self._team, Team):
            for rank in self._ranks:
                self._watch.add(rank, self._team.board.identity(rank))

    def __enter__(self) -> Lookout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()

    def __call__(self) -> None:
        """Raise RankLost if one of the ranks cannot come."""
        team = self._team
        if team is None:
            return
        if isinstance(team, MessageTeam):
            team.listen()
            dead = team.watch.dead()
        else:
            dead = self._watch.dead()
        for rank in self._ranks:
            story = self._story(team.board, rank, rank in dead)
            if story is not None:
                identity = team.board.identity(rank)
                raise RankLost(
                    f"rank {rank} ({identity.host}, pid {identity.pid}) {story} while a group of it was being made",
                    (rank,),
                )

    def _story(self, board: Board | MpiBoard, rank: int, is_dead: bool) -> str | None:
        state = board.state(rank)
        if state == PeerState.LEFT:
            return "left the default group"
        if state == PeerState.FAILED:
            failure = board.failure(rank)
            # Who only gave up waiting for others lives on, and may found a group without them.
            if failure.kind == "":
                return f"failed: it {failure.message}"
        return "died: its process is gone" if is_dead else None
