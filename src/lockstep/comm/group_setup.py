"""Helpers for creating a group: its parameters, its store with signed values, and a check that its ranks are alive."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from lockstep import env
from lockstep.comm.contract import ControlBlocks, PublishedWaits, Team
from lockstep.comm.deadlock import Deadlock, DeadlockDetector
from lockstep.errors import CollectiveMismatch, RankLost, RendezvousError
from lockstep.log import get_logger, warn_once
from lockstep.secret import Refused, Seals, secret_of_ranks
from lockstep.shm.liveness import Watch
from lockstep.shm.sync import PeerState
from lockstep.torch_private.stores import PrefixStore, Store, find, find_all

__all__ = ["BootstrapStore", "LivenessCheck", "NewGroup"]

# Seconds until a foreign value is an error: the rank that wrote the true one rewrites it before that.
_PATIENCE_S = 10.0

_SHORTEST_NAP_S = 0.001
_LONGEST_NAP_S = 0.02
_WRITE_AGAIN_S = 0.5

_SAME_TOKEN = "Do all ranks have the same LOCKSTEP_TOKEN, and the same Lockstep?"


class _RefusedValue(NamedTuple):
    """A rejected value: why, and since when it has been there."""

    text: str
    since_s: float


class BootstrapStore:
    """A torch store with separate keys for each attempt of a job, whose values carry a MAC (`lockstep.secret`).

    A restarted job may find its store as the previous attempt left it. A value without a valid MAC of this job counts
    as absent: each rank rewrites its own values while it waits for others.

    Args:
        store: a torch store in which only this class uses these keys within the attempt.
        scope: names the owner of the keys, such as the group; the same on all ranks.
        nonce: the nonce on which the ranks have agreed (`group_nonce.py`); empty for none.
    """

    def __init__(self, store: Store, *scope: str, nonce: str = "") -> None:
        attempt = env.TORCHELASTIC_RESTART_COUNT.get() or 0
        self._scope = (*scope, f"attempt{attempt}")
        self._nonce = nonce
        self._store = PrefixStore(f"attempt{attempt}", store)
        self._seals = Seals(secret_of_ranks(), *self._scope, nonce)
        self._refused: dict[tuple[str, ...], _RefusedValue] = {}  # by scope and key; shared with stores made by `below`

    def below(self, prefix: str) -> BootstrapStore:
        """A store whose keys all have a further prefix."""
        store = BootstrapStore(PrefixStore(prefix, self._store), *self._scope, prefix, nonce=self._nonce)
        store._refused = self._refused
        return store

    def agreed(self, nonce: str) -> BootstrapStore:
        """The same keys, with the nonce on which the ranks have now agreed."""
        store = copy.copy(self)
        store._nonce, store._seals = nonce, Seals(secret_of_ranks(), *self._scope, nonce)
        return store

    def bare(self, prefix: str) -> Store:
        """The plain torch store under a prefix, without MACs."""
        return PrefixStore(prefix, self._store)

    def find_other_token(self, key: str) -> str | None:
        """The error text if the value was written with another token, or with none; else None."""
        sealed = find(self._store, key)
        try:
            self._seals.open(key, "" if sealed is None else sealed.decode(errors="replace"))
        except Refused as refused:
            return str(refused) if "another token" in str(refused) else None
        return None

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """If ranks do not meet, and a value was rejected until the end, name that in the error as the likelier cause.

        Raises:
            RendezvousError: in place of one without it.
        """
        try:
            yield
        except RendezvousError as error:
            text = next((value.text for value in self._refused.values()), None)
            if text is None or _SAME_TOKEN in str(error):
                raise
            raise RendezvousError(f"{text}. {_SAME_TOKEN} The ranks did not meet: {error}") from None

    def set(self, key: str, value: str) -> None:
        """Publish a value."""
        self._store.set(key, self._seals.seal(key, value))

    def find(self, key: str) -> str | None:
        """The value under a key, or None, by a single query of the store.

        Raises:
            RendezvousError: a value that a process of another job wrote has been there for some time.
        """
        sealed = find(self._store, key)
        return None if sealed is None else self._open(key, sealed)

    def get_all(self, keys: Sequence[str]) -> list[str] | None:
        """The values under these keys, if all are there. Two queries of the store, not one for each key.

        Raises:
            RendezvousError: a value that a process of another job wrote has been there for some time.
        """
        sealed = find_all(self._store, keys)
        if sealed is None:
            return None
        values = [self._open(key, value) for key, value in zip(keys, sealed, strict=True)]
        found = [value for value in values if value is not None]
        return found if len(found) == len(values) else None

    def _open(self, key: str, sealed: bytes) -> str | None:
        """The value, if a rank of this job wrote it; otherwise None."""
        try:
            value = self._seals.open(key, bytes(sealed).decode(errors="replace"))
        except Refused as refused:
            why = str(refused)
        else:
            self._refused.pop((*self._scope, key), None)
            return value
        text = f"the value in the store under {key!r} was not written by a rank of this job: {why}"
        found = self._refused.setdefault((*self._scope, key), _RefusedValue(text, time.monotonic()))
        if time.monotonic() - found.since_s > _PATIENCE_S:
            raise RendezvousError(f"{text}. {_SAME_TOKEN}")
        warn_once(get_logger(__name__), f"{text}. It is ignored, and the job continues")
        return None

    def share(
        self,
        topic: str,
        rank: int,
        world_size: int,
        text: str,
        timeout_s: float,
        watch: Watch | None = None,
        check_peers: Callable[[], None] = lambda: None,
    ) -> list[str] | None:
        """Publish a value of this rank under a topic and read those of all ranks, in order. Collective.

        Args:
            watch: of processes of other ranks; if one ends without having published its value, this stops waiting.
            check_peers: called while waiting; raises if a rank can no longer come.

        Returns:
            None if a rank has not published its value within that time.

        Raises:
            RendezvousError: a value that a process of another job wrote has been there for some time.
            RuntimeError: the store is gone.
        """
        keys = [f"{topic}{peer}" for peer in range(world_size)]
        end_s, write_s, nap_s = time.monotonic() + timeout_s, 0.0, _SHORTEST_NAP_S
        while True:
            now_s = time.monotonic()
            if now_s >= write_s:  # Repeatedly, as others may remove or overwrite it.
                self.set(keys[rank], text)
                write_s = now_s + _WRITE_AGAIN_S
            gone = watch.dead() if watch is not None else set()  # determined before the last read of its value
            found = self.get_all(keys)
            if found is not None or now_s > end_s or any(self.find(keys[peer]) is None for peer in gone):
                return found
            check_peers()
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def delete(self, key: str) -> None:
        """Remove a value, if the store supports that."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(key)


@dataclass(frozen=True)
class NewGroup:
    """What a rank knows about a group before its ranks are connected.

    Attributes:
        store: through which the ranks find each other; only they use its keys.
        rank: this rank in the group.
        ranks: the global rank of each rank of the group.
        timeout_s: default seconds until a missing rank is an error, now and in collectives.
        name: the group's name in errors.
        is_default: whether it is the default group.
        default_waits: where the ranks of the default group publish their waits; None if they cannot, or this is it.
    """

    store: BootstrapStore
    rank: int
    ranks: tuple[int, ...]
    timeout_s: float
    name: str
    is_default: bool
    default_waits: PublishedWaits | None


class LivenessCheck:
    """Checks in the default group for ranks that cannot join a new one: dead, gone, failed, or waiting for this one.

    Without it a wait would only notice at its deadline, because a rank that has not joined the new group yet cannot be
    watched there. Called while waiting; a context manager.

    Args:
        team: of the default group; None if that is not one of ours, and cannot be watched.
        global_ranks: global ranks of the new group.
        timeout_s: seconds until a missing rank is an error.
        detector: finds ranks that are waiting for this one in another call.
    """

    def __init__(
        self, team: Team | None, global_ranks: Sequence[int], timeout_s: float, detector: DeadlockDetector | None
    ) -> None:
        self._team = team
        self._all_ranks, self._timeout_s, self._detector = tuple(global_ranks), timeout_s, detector
        self._start_s = time.monotonic()
        self._ranks = [] if team is None else [rank for rank in global_ranks if rank != team.rank]
        self._watch = Watch({})
        if team is not None and team.shares_memory:
            for rank in self._ranks:
                self._watch.add(rank, team.blocks.identity(rank))

    def __enter__(self) -> LivenessCheck:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()
        if self._detector is not None:
            self._detector.end()

    def __call__(self) -> None:
        """Raise RankLost if one of the ranks cannot join, CollectiveMismatch if it waits for this one elsewhere."""
        team = self._team
        if team is None:
            return
        team.poll()
        dead = self._watch.dead() if team.shares_memory else team.watch.dead()
        for rank in self._ranks:
            story = self._story(team.blocks, rank, rank in dead)
            if story is not None:
                identity = team.blocks.identity(rank)
                raise RankLost(
                    f"rank {rank} ({identity.host}, pid {identity.pid}) {story} while a group of it was being made",
                    (rank,),
                )
        if self._detector is not None:
            self._look(self._detector)

    def _look(self, detector: DeadlockDetector) -> None:
        awaited = [rank for rank in self._ranks if not detector.is_waiting_here(rank)]
        if not awaited:
            detector.end()
            return
        missing = [self._all_ranks.index(rank) for rank in awaited]
        try:
            detector.look(missing, time.monotonic() - self._start_s, self._timeout_s)
        except Deadlock as deadlock:
            raise CollectiveMismatch(deadlock.text, deadlock.culprits) from None

    def _story(self, blocks: ControlBlocks, rank: int, is_dead: bool) -> str | None:
        state = blocks.state(rank)
        if state == PeerState.LEFT:
            return "left the default group"
        if state == PeerState.FAILED:
            failure = blocks.failure(rank)
            # A rank that only gave up waiting for others is still alive, and may create a group without them.
            if failure.kind == "":
                return f"failed: it {failure.message}"
        return "died: its process is gone" if is_dead else None
