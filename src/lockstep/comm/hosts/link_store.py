"""A store over the new connections of a group, for the values that its ranks exchange until the group is ready.

Gloo's addresses are exchanged here as well: only the ranks can read or write it, while the store in which they found
each other is open to anyone who reaches its port.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

from lockstep.comm.hosts.links import Links
from lockstep.errors import LockstepError, RankLost
from lockstep.shm.bootstrap import lost_meanwhile, not_come, peer_error
from lockstep.torch_private.stores import Store

__all__ = ["LinkStore"]

_KIND = b"linkstor"  # unlike those of the group's own messages
_HEAD = struct.Struct(f"!{len(_KIND)}sHI")  # and the number of bytes of the key, and of the whole value
_PIECE_BYTES = 32 << 10  # a value may be longer than a message
_POLL_S = 0.005
_FAILURE = "failure"


def _read_failure(data: bytes, name: str) -> tuple[str, str, tuple[int, ...]]:
    """Parse why a rank gave up: the class of its error, the text, and the ranks that it blames."""
    try:
        kind, text, culprits = json.loads(data)
        ranks = tuple(culprits)
        is_typed = isinstance(kind, str) and isinstance(text, str) and all(type(rank) is int for rank in ranks)
    except (ValueError, TypeError, RecursionError):
        is_typed = False
    if not is_typed:
        return "", f"{name} could not join, and sent an invalid reason: {data[:60]!r}", ()
    return kind, text, ranks


class LinkStore(Store):
    """Each rank sets values that all can read. A torch store, as far as Gloo needs one. Thread-safe.

    Args:
        links: the connections to the other ranks; messages that do not belong to the store are put back by `close`.
        rank: this rank in the group.
        ranks: the global rank of each rank of the group.
        timeout_s: seconds until a missing value is an error.
        check_peers: called while waiting; raises if a rank can no longer come.
    """

    def __init__(
        self, links: Links, rank: int, ranks: Sequence[int], timeout_s: float, check_peers: Callable[[], None]
    ) -> None:
        super().__init__()
        self._links = links
        self._rank = rank
        self._ranks = tuple(ranks)
        self._peers = frozenset(peer for peer in range(len(ranks)) if peer != rank)
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._check_awaited = check_peers
        self._values: dict[str, bytes] = {}
        self._pieces: dict[tuple[int, str], bytearray] = {}
        self._num_received = dict.fromkeys(self._peers, 0)  # number of values, by rank
        self._others: list[tuple[int, memoryview]] = []
        self._lock = threading.RLock()
        self._is_closed = False
        self._peer_gave_up = False

    def share(self, topic: str, value: bytes) -> dict[int, bytes]:
        """Send a value to all ranks, and wait for theirs. Collective.

        Returns:
            The values of the other ranks, by rank.

        Raises:
            RendezvousError: a rank did not come in time; names it.
            SetupError: a rank gave up; says why.
            RankLost: a rank is gone, or did not send its value in time.
        """
        self.set(f"{topic} {self._rank}", value)
        keys = {peer: f"{topic} {peer}" for peer in self._peers}
        self._await(lambda: [peer for peer, key in keys.items() if key not in self._values])
        return {peer: self._values[key] for peer, key in keys.items()}

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this rank cannot join, unless one of them gave up first; then close. Local."""
        name = f"rank {self._ranks[self._rank]}"
        text = str(error) or type(error).__name__
        culprits = error.culprits if isinstance(error, RankLost) else ()
        if not culprits:
            text = f"{name} could not join: {text.splitlines()[0]}"
        if not self._peer_gave_up:
            self.set(f"{_FAILURE} {self._rank}", json.dumps([type(error).__name__, text, culprits]).encode())
        self._is_closed = True

    def check_peers(self) -> None:
        """Raise if a rank is gone, or has given up. Local.

        Raises:
            SetupError: a rank gave up; says why.
            RankLost: a rank is gone.
        """
        self._receive()
        self._check(self._peers)

    def _await(self, missing: Callable[[], Collection[int]]) -> None:
        """Receive until `missing` returns no ranks."""
        self._receive()
        while awaited := missing():
            self._check(awaited)
            if time.monotonic() > self._deadline_s:
                silent = sorted(peer for peer in awaited if not self._num_received[peer])
                if silent:
                    raise not_come(silent, self._rank, self._ranks, self._timeout_s)
                raise lost_meanwhile([self._ranks[peer] for peer in sorted(awaited)], "connected and then went silent")
            self._links.wait(_POLL_S)
            self._receive()

    def _check(self, awaited: Collection[int]) -> None:
        for peer in sorted(self._peers):
            failure = self._values.get(f"{_FAILURE} {peer}")
            if failure is not None:
                self._peer_gave_up = True
                kind, text, culprits = _read_failure(failure, f"rank {self._ranks[peer]}")
                raise RankLost(text, culprits) if culprits else peer_error(kind, text)
        if self._is_closed:
            raise LockstepError("the group is not being made any more")  # raised in a thread of Gloo's
        self._check_awaited()  # more specific than a lost connection
        gone = sorted(self._links.lost.intersection(awaited))
        if gone:
            raise lost_meanwhile([self._ranks[peer] for peer in gone], "connected and then ended")

    def _receive(self) -> None:
        with self._lock:
            self._take_messages()

    def _take_messages(self) -> None:
        for peer, message in () if self._is_closed else self._links.poll():
            if message[: len(_KIND)] != _KIND or len(message) < _HEAD.size:
                self._others.append((peer, message))
                continue
            _, name_bytes, total = _HEAD.unpack_from(message)
            key = bytes(message[_HEAD.size : _HEAD.size + name_bytes]).decode(errors="replace")
            pieces = self._pieces.setdefault((peer, key), bytearray())
            pieces += message[_HEAD.size + name_bytes :]
            if len(pieces) >= total:
                self._values[key] = bytes(self._pieces.pop((peer, key)))
                self._num_received[peer] += 1

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline_s - time.monotonic(), 0.001)

    def close(self) -> None:
        """Put back messages for the group, from ranks that are already using it."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._links.put_back(self._others)

    # ---- what Gloo asks a store ------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # what torch hands over, whatever it says
        """Send a value to all ranks. Local."""
        self._values[key] = value = bytes(value)
        name = key.encode()
        for start in range(0, max(len(value), 1), _PIECE_BYTES):
            message = _HEAD.pack(_KIND, len(name), len(value)) + name + value[start : start + _PIECE_BYTES]
            for peer in self._peers:
                self._links.send(peer, message)

    def get(self, key: str) -> bytes:
        """A value; waits until it is there.

        Raises:
            RankLost: a rank is gone, or the value did not come in time.
        """
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these values are there now."""
        self._receive()
        return self._values.keys() >= set(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for these values; the timeout is that of the group, `timeout` is ignored.

        Raises:
            RankLost: a rank is gone, or a value did not come in time.
        """
        self._await(lambda: () if self._values.keys() >= set(keys) else self._furthest_behind())

    def _furthest_behind(self) -> list[int]:
        """The ranks from which the fewest values have come: Gloo's keys do not tell whose they are."""
        fewest = min(self._num_received.values(), default=0)
        return [peer for peer, number in self._num_received.items() if number == fewest]
