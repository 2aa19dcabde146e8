"""A store over the new connections of a group, for what its ranks tell each other until the group is made.

Gloo's addresses go this way, too: nobody but the ranks can read or write it, while the store in which they found each
other is open to everybody who reaches its port.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from lockstep.comm.hosts.links import Links
from lockstep.shm.bootstrap import lost_meanwhile
from lockstep.torch_private.stores import Store

__all__ = ["LinkStore"]

_KIND = b"linkstor"  # unlike those of the group's own messages
_HEAD = struct.Struct(f"!{len(_KIND)}sHI")  # with the bytes of the key, and of the whole value
_PIECE_BYTES = 32 << 10  # a value may be longer than a message
_POLL_S = 0.005


class LinkStore(Store):
    """Each rank sets values, which all can read. A torch store, as far as Gloo asks it anything.

    Args:
        links: the connections to the other ranks; messages that are none of these are handed back by `close`.
        rank: this rank in the group.
        ranks: the global rank of each rank of the group.
        timeout_s: until what does not come is an error.
        check_peers: called while waiting; raises if a rank cannot come.
    """

    def __init__(
        self, links: Links, rank: int, ranks: Sequence[int], timeout_s: float, check_peers: Callable[[], None]
    ) -> None:
        super().__init__()
        self._links = links
        self._rank = rank
        self._ranks = tuple(ranks)
        self._peers = frozenset(peer for peer in range(len(ranks)) if peer != rank)
        self._deadline_s = time.monotonic() + timeout_s
        self._look_out = check_peers
        self._values: dict[str, bytes] = {}
        self._pieces: dict[tuple[int, str], bytearray] = {}
        self._others: list[tuple[int, memoryview]] = []

    def share(self, topic: str, value: bytes) -> dict[int, bytes]:
        """Tell all ranks a value, and wait for theirs. Collective.

        Returns:
            The values of the other ranks, by rank.

        Raises:
            RankLost: a rank is gone, or did not tell its value in time.
        """
        self.set(f"{topic} {self._rank}", value)
        keys = {peer: f"{topic} {peer}" for peer in self._peers}
        self._await(lambda: [peer for peer, key in keys.items() if key not in self._values])
        return {peer: self._values[key] for peer, key in keys.items()}

    def _await(self, missing: Callable[[], Sequence[int]]) -> None:
        """Receive until there are no ranks any more of which something is missing."""
        self._receive()
        while awaited := missing():
            gone = sorted(self._links.lost.intersection(awaited))
            if gone or time.monotonic() > self._deadline_s:
                what = "came and was gone again" if gone else "came and did not go on"
                raise lost_meanwhile([self._ranks[peer] for peer in gone or sorted(awaited)], what)
            self._look_out()
            self._links.wait(_POLL_S)
            self._receive()

    def _receive(self) -> None:
        for peer, message in self._links.poll():
            if message[: len(_KIND)] != _KIND or len(message) < _HEAD.size:
                self._others.append((peer, message))
                continue
            _, name_bytes, total = _HEAD.unpack_from(message)
            key = bytes(message[_HEAD.size : _HEAD.size + name_bytes]).decode(errors="replace")
            pieces = self._pieces.setdefault((peer, key), bytearray())
            pieces += message[_HEAD.size + name_bytes :]
            if len(pieces) >= total:
                self._values[key] = bytes(self._pieces.pop((peer, key)))

    def remaining_s(self) -> float:
        """Seconds until the limit."""
        return max(self._deadline_s - time.monotonic(), 0.001)

    def close(self) -> None:
        """Hand back the messages of ranks that are further than this one, for the group."""
        self._links.put_back(self._others)

    # ---- what Gloo asks a store ------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # what torch hands over, whatever it says
        """Tell all ranks a value. Local."""
        self._values[key] = value = bytes(value)
        name = key.encode()
        for start in range(0, max(len(value), 1), _PIECE_BYTES):
            message = _HEAD.pack(_KIND, len(name), len(value)) + name + value[start : start + _PIECE_BYTES]
            for peer in self._peers:
                self._links.send(peer, message)

    def get(self, key: str) -> bytes:
        """A value; waits for it.

        Raises:
            RankLost: a rank is gone, or the value did not come in time.
        """
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there are all of these values now."""
        self._receive()
        return self._values.keys() >= set(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for these values; the limit is that of the group, whatever is asked for.

        Raises:
            RankLost: a rank is gone, or a value did not come in time.
        """
        self._await(lambda: () if self._values.keys() >= set(keys) else sorted(self._peers))
