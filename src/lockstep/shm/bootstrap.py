"""The bootstrap of a group on one host: its ranks find each other through a store, and map one control segment.

Rank 0 creates the segment and publishes its handle in the store; the others map it. Each then writes its identity into
its block, and all wait until every rank has.

[Note: stale handles] A store may outlive a group: a script that opens a second group over it must not get the segment
of the first. So rank 0 deletes the handle once all have come, and no rank leaves `SharedMemoryTeam.connect` before
that. If rank 0 was killed, its handle remains, but leads nowhere, because a segment ends with the process that created
it. A rank that finds a handle older than its own process takes it for one of an earlier attempt of the job, and waits
for the next one. The same goes for the failure that rank 0 publishes when it gives up.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, Protocol

from lockstep.errors import LockstepError, RankLost, RendezvousError, SetupError, SharedMemoryError
from lockstep.json_records import record_of
from lockstep.shm import descriptors
from lockstep.shm.control_blocks import SharedControlBlocks
from lockstep.shm.liveness import (
    PeerIdentity,
    Watch,
    is_running,
    own_identity,
    pid_namespace,
    seconds_since_boot,
    started_at_s,
)
from lockstep.shm.segment import Segment, boot_id
from lockstep.shm.sentry import sentry
from lockstep.shm.sync import FailureKind, PeerFailure, PeerState
from lockstep.shm.terms import Terms, disagreement
from lockstep.topology import name_each

__all__ = [
    "FIRST_KEY",
    "Bootstrap",
    "SeveralHosts",
    "Store",
    "lost_meanwhile",
    "lost_store",
    "not_come",
    "peer_error",
]

FIRST_KEY = "segment"  # every rank reads it first
_SEVERAL_HOSTS = "several hosts"
_STALE = (errno.ENOENT, errno.ESRCH, errno.ESTALE)
_EARLIER_LIFE_PATIENCE_S = 10.0
_SAME_LIFE_PATIENCE_S = 0.5
_LONGEST_NAP_S = 0.02
# A segment, the pidfds of the peers, the file of the store, and files opened meanwhile.
_DESCRIPTORS = 4
_ASK_STORE_EVERY_S = 0.1


class SeveralHosts(Exception):  # never leaves the package: the group is then created in another way
    """The ranks of the new group do not share memory: they are on several hosts."""


class Store(Protocol):
    """The part of a torch store that ranks need to meet."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def find(self, key: str) -> str | None:
        """Read a value by a single query; None if there is none."""

    def delete(self, key: str) -> None:
        """Remove a value."""


def lost_meanwhile(global_ranks: Sequence[int], what: str) -> RankLost:
    """The error for ranks that `what` while the group was being created."""
    return RankLost(f"{name_each(global_ranks)} {what} while the group was being made", tuple(global_ranks))


def lost_store(global_rank: int, error: RuntimeError) -> RendezvousError:
    """The error of a rank whose store is gone, because the rank that hosted it is."""
    return RendezvousError(
        f"rank {global_rank} lost the store in which the ranks meet: {str(error).splitlines()[0]}. Usually it lives in "
        "the process of rank 0: once that has ended, no group can be created, so make it wait for the others first "
        "(dist.barrier())"
    )


def not_come(missing: Sequence[int], rank: int, global_ranks: Sequence[int], timeout_s: float) -> RendezvousError:
    """The error of a rank for the missing ranks of its new group."""
    return RendezvousError(
        f"{name_each(global_ranks[peer] for peer in missing)} did not come within {timeout_s:g} s of rank "
        f"{global_ranks[rank]}. Is every rank running, with the same world size of {len(global_ranks)}, and does "
        "each make the same groups in the same order?"
    )


class Bootstrap:
    """One rank's bootstrap into a group on one host.

    Args:
        store: through which the ranks find each other; only they use its keys.
        rank: this rank in the group.
        global_ranks: the global rank of each rank of the group.
        timeout_s: seconds to wait for the last of them.
        check_peers: called while waiting; raises if an awaited rank can no longer come.
        terms: the handshake parameters, in addition to the layout of the segment.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        global_ranks: Sequence[int],
        timeout_s: float,
        check_peers: Callable[[], None] = lambda: None,
        terms: Terms | None = None,
    ) -> None:
        self._store = store
        self._terms = dict(terms or {})
        self.rank = rank
        self.global_ranks = tuple(global_ranks)
        self.timeout_s = timeout_s
        self._check_peers = check_peers
        self._start_s = time.monotonic()

    @property
    def world_size(self) -> int:
        """Number of ranks in the new group."""
        return len(self.global_ranks)

    def name(self, rank: int) -> str:
        """The name of a rank in errors."""
        return f"rank {self.global_ranks[rank]}"

    def _lost(self, ranks: Sequence[int], what: str) -> RankLost:
        return lost_meanwhile([self.global_ranks[rank] for rank in ranks], what)

    def explain(self, failure: PeerFailure, blocks: SharedControlBlocks) -> RankLost | RendezvousError:
        """The error for ranks that connected and then stopped responding."""
        gone = failure.ranks(FailureKind.DEAD) + failure.ranks(FailureKind.LEFT)
        if gone:
            return self._lost(gone, "connected and then ended")
        failures = [blocks.failure(rank) for rank in failure.ranks(FailureKind.FAILED)]
        for reported in failures:
            if reported.kind == RankLost.__name__:
                return RankLost(reported.message, reported.culprits)
        if failures:
            return RendezvousError(failures[0].message)
        names = ", ".join(map(self.name, failure.ranks(FailureKind.LATE)))
        return RendezvousError(f"{names} connected and then stopped responding for {self.timeout_s:g} s")

    def open_segment(self, size_bytes: int, layout: Terms) -> Segment:
        """Create or map the control segment of the new group, and wait until all ranks have done so. Collective.

        Args:
            size_bytes: size of the segment.
            layout: parameters that determine the layout of the segment; compared between ranks.

        Raises:
            RendezvousError: a rank did not come in time, or two have the same number; names it.
            RankLost: a rank came and died.
            SetupError: world sizes or handshake parameters differ; on every rank.
            SharedMemoryError: memory cannot be allocated; on every rank.
            SeveralHosts: the ranks are not all on one host; on every rank.
        """
        self._require_descriptors()
        terms = self._terms | dict(layout)
        if self.rank != 0:
            return self._introduce(*self._find(size_bytes, terms))
        try:
            return self._introduce(*self._publish(size_bytes, terms))
        except LockstepError as error:
            self._give_up(error)
            raise

    def _require_descriptors(self) -> None:
        """Raise, on all ranks, if this process has too few descriptors left for a group."""
        try:
            descriptors.require(_DESCRIPTORS, self.name(self.rank))
        except SetupError as error:
            if self.rank == 0:
                self._give_up(error)
                raise
            with sentry().lend():
                failure = json.dumps([SetupError.__name__, str(error)])
                self._store.set(_failure_key(self._await_published()), failure)
            raise

    def _give_up(self, error: LockstepError) -> None:
        """Publish why there is no segment, so that later ranks do not wait for it. By rank 0."""
        failure = {
            "error": type(error).__name__,
            "message": str(error),
            "culprits": error.culprits if isinstance(error, RankLost) else (),
            "boot_id": boot_id(),
            "published_at_s": seconds_since_boot(),
        }
        with sentry().lend():
            self._store.set(FIRST_KEY, json.dumps(failure))

    def _introduce(self, segment: Segment, published: str) -> Segment:
        try:
            blocks = SharedControlBlocks(segment, self.rank, self.world_size)
            if blocks.state(self.rank) != PeerState.ABSENT:
                other = blocks.identity(self.rank)
                raise RendezvousError(
                    f"two processes claim to be {self.name(self.rank)}: this one and pid {other.pid} on {other.host}. "
                    "Give each process a different rank"
                )
            blocks.introduce(own_identity())
            self._await_all(blocks, published)
        finally:
            segment.release()
        return segment

    def forget_segment(self) -> None:
        """Delete the handle. By rank 0, once all ranks have come. See [Note: stale handles]."""
        self._store.delete(FIRST_KEY)

    def forget_several_hosts(self) -> None:
        """Delete the message that the ranks are on several hosts. By rank 0, once all have read it."""
        self.forget_segment()
        self._store.delete(_SEVERAL_HOSTS)

    def _publish(self, size_bytes: int, terms: Terms) -> tuple[Segment, str]:
        # Sparse, since most of it is rings and texts, which most groups never use.
        segment = Segment.create(size_bytes, is_sparse=True)
        published = json.dumps(
            {
                "handle": segment.handle,
                "world_size": self.world_size,
                "terms": terms,
                "maker": asdict(own_identity()),
                "published_at_s": seconds_since_boot(),
            }
        )
        self._store.set(FIRST_KEY, published)
        return segment, published

    def _find(self, size_bytes: int, terms: Terms) -> tuple[Segment, str]:
        while True:
            published = self._await_published()
            found = self._read(published)
            if "error" in found:
                if found["boot_id"] == boot_id() and found["published_at_s"] < started_at_s():
                    self._nap([0])
                    continue
                text = f"{self.name(0)} gave up: {found['message']}"
                if found["error"] == RankLost.__name__:
                    raise RankLost(text, found["culprits"])
                raise peer_error(str(found["error"]), text)
            if found["boot_id"] != boot_id():
                self._publish_several_hosts()
            different = self._different(found, terms)
            if different is not None and is_running(found["maker"]):
                self._store.set(_failure_key(published), json.dumps([type(different).__name__, str(different)]))
                raise different
            try:
                segment = Segment.attach(found["handle"], size_bytes=None if different else size_bytes)
            except SharedMemoryError as error:
                self._explain_unmapped(error, found, published)
                time.sleep(_LONGEST_NAP_S)
                continue
            if different is not None:
                segment.release()
                raise different
            return segment, published

    def _read(self, published: str) -> dict[str, Any]:
        """Parse the store's value for the segment, as written by rank 0.

        Raises:
            RendezvousError: rank 0 did not write that.
        """
        try:
            found = json.loads(published)
            if "error" in found:
                _ = found["boot_id"], found["message"]
                found["culprits"] = tuple(map(int, found["culprits"]))
            else:
                found["boot_id"] = json.loads(found["handle"])["boot_id"]
                found["maker"] = record_of(PeerIdentity, found["maker"])
                _ = found["world_size"]
            found["published_at_s"] = float(found["published_at_s"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RendezvousError(
                f"{self.name(self.rank)} found a value in the store that {self.name(0)} did not write: "
                f"{published[:60]!r}. Does another program use the same store?"
            ) from None
        return dict(found)

    def _different(self, found: dict[str, Any], terms: Terms) -> SetupError | None:
        """The error if the handshake parameters of rank 0 differ from this rank's."""
        if found["world_size"] != self.world_size:
            return SetupError(
                f"{self.name(self.rank)} was given world_size {self.world_size}, {self.name(0)} {found['world_size']}: "
                "give all ranks the same"
            )
        return disagreement(self.name(self.rank), terms, self.name(0), found.get("terms"))

    def _explain_unmapped(self, error: SharedMemoryError, found: dict[str, Any], published: str) -> None:
        """Raise why the segment cannot be mapped here, unless it may be replaced soon."""
        if self._store.find(_SEVERAL_HOSTS) is not None:
            raise SeveralHosts from None  # Another rank noticed first, and rank 0 closed the segment.
        if found["maker"].pid_namespace != pid_namespace() and error.errno not in (errno.ENOMEM, errno.EINVAL):
            # Two containers on one machine that share neither processes nor a folder are two hosts.
            self._publish_several_hosts()
        if error.errno not in _STALE or not self._may_be_replaced(found):
            text = f"{self.name(self.rank)}: {error}"
            self._store.set(_failure_key(published), json.dumps([SharedMemoryError.__name__, text]))
            raise SharedMemoryError(error.errno, text) from None

    def _publish_several_hosts(self) -> NoReturn:
        self._store.set(_SEVERAL_HOSTS, self.name(self.rank))
        raise SeveralHosts

    def _may_be_replaced(self, found: dict[str, Any]) -> bool:
        """Whether a handle that leads nowhere may soon be replaced by another. See [Note: stale handles]."""
        waited_s = self._waited_s()
        if found["published_at_s"] < started_at_s():
            return waited_s < min(self.timeout_s, _EARLIER_LIFE_PATIENCE_S)
        if not is_running(found["maker"]):
            raise self._lost([0], "died")
        return waited_s < min(self.timeout_s, _SAME_LIFE_PATIENCE_S)

    def _await_published(self) -> str:
        while True:
            try:
                published = self._store.find(FIRST_KEY)
            except RuntimeError as error:
                raise lost_store(self.global_ranks[self.rank], error) from None
            if published is not None:
                return published
            self._nap([0])

    def _await_all(self, blocks: SharedControlBlocks, published: str) -> None:
        """Wait until every rank has written its identity."""
        failure_key = _failure_key(published)
        ask_store_at_s = self._waited_s() + _ASK_STORE_EVERY_S
        watch = Watch({})
        known: set[int] = {blocks.rank}
        try:
            while True:
                for rank in range(blocks.world_size):
                    if rank not in known and blocks.state(rank) != PeerState.ABSENT:
                        watch.add(rank, blocks.identity(rank))
                        known.add(rank)
                if len(known) == blocks.world_size:
                    return
                dead = sorted(watch.dead())
                if dead:
                    raise self._lost(dead, "died")
                if self._waited_s() > ask_store_at_s:
                    ask_store_at_s = self._waited_s() + _ASK_STORE_EVERY_S
                    if self.rank == 0 and self._store.find(FIRST_KEY) is None:
                        self._store.set(FIRST_KEY, published)  # another process has overwritten it
                    failure = self._store.find(failure_key)
                    if failure is not None:
                        raise _read_failure(failure)
                    if self._store.find(_SEVERAL_HOSTS) is not None:
                        raise SeveralHosts
                self._nap([rank for rank in range(blocks.world_size) if rank not in known])
        finally:
            watch.close()

    def _waited_s(self) -> float:
        return time.monotonic() - self._start_s

    def _nap(self, missing: Sequence[int]) -> None:
        """Wait a little for missing ranks; raise if they cannot come, or the time is up."""
        self._check_peers()
        waited_s = self._waited_s()
        if waited_s > self.timeout_s:
            raise not_come(missing, self.rank, self.global_ranks, self.timeout_s)
        time.sleep(min(_LONGEST_NAP_S, waited_s / 10))


def peer_error(kind: str, message: str) -> SetupError:
    """The error that another rank published by its class and text."""
    kinds = {one.__name__: one for one in (SharedMemoryError, RendezvousError, SetupError)}
    return kinds.get(kind, RendezvousError)(message)


def _read_failure(text: str) -> SetupError:
    """The error of a rank that could not map the segment, from its text in the store."""
    try:
        kind, message = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        kind, message = "", f"a rank could not use the segment: {text[:200]!r}"
    return peer_error(str(kind), str(message))


def _failure_key(published: str) -> str:
    """The key under which ranks report that they cannot map the segment; different for every segment."""
    return "failure-" + hashlib.blake2b(published.encode(), digest_size=8).hexdigest()
