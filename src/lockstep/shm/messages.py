"""Messages between two ranks, and the matching of messages and receives.

A receive names a tag and a source, or any source. It gets the first matching message that arrived; a message goes to
the first matching receive that was posted. So messages of one source and tag are received in the order in which they
were sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from lockstep.shm.ring import Payload

__all__ = ["ANY_SOURCE", "Incoming", "Label", "Matcher", "Receive", "Send"]

ANY_SOURCE = -1

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Label:
    """Describes one side of a message, except for its tag. Compared by `fits`, hashed by identity.

    Attributes:
        dtype: name of the dtype.
        shape: the shape of the tensor.
        site: where the user called send or receive.
    """

    dtype: str
    shape: tuple[int, ...]
    site: str

    def fits(self, other: Label) -> bool:
        """Whether a message with this label can be received with the other.

        Dtypes must be equal, and shapes too, except for dimensions of size 1; a flat tensor matches every shape with as
        many elements.
        """
        if self.dtype != other.dtype:
            return False
        if self.shape == other.shape:
            return True
        mine, yours = ([size for size in label.shape if size != 1] for label in (self, other))
        return mine == yours or (min(len(mine), len(yours)) <= 1 and self.numel == other.numel)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def encode(self) -> bytes:
        """Encode as bytes, for `decode`."""
        return f"{self.dtype}|{','.join(map(str, self.shape))}|{self.site}".encode(errors="replace")

    @classmethod
    def decode(cls, data: bytes) -> Label:
        """Decode from bytes, which may be truncated.

        Raises:
            ValueError: the bytes are not a label.
        """
        dtype, shape, site = data.decode(errors="replace").split("|", 2)
        return cls(dtype, tuple(int(size) for size in shape.split(",") if size), site)


@dataclass(eq=False)
class _Operation:
    """One side of a message.

    Attributes:
        tag: the tag that the user gave.
        label: the label of this side.
        flat: the memory, uint8, shape (n,).
        done: whether the operation has finished on this rank.
        conflict: the label of the other side, if the two do not agree.
    """

    tag: int
    label: Label
    flat: torch.Tensor
    done: bool = False
    conflict: Label | None = None


@dataclass(eq=False)
class Send(_Operation):
    """A message being sent.

    Attributes:
        peer: rank of the receiver.
        number: its number among all messages to that peer.
        num_sent: bytes written to shared memory so far.
    """

    peer: int = 0
    number: int = 0
    num_sent: int = 0

    @property
    def awaited(self) -> int:
        """The rank that it waits for."""
        return self.peer


@dataclass(eq=False)
class Receive(_Operation):
    """A message to be received.

    Attributes:
        source: the rank to receive from, or `ANY_SOURCE`.
        order: its number among all receives of this rank.
        peer: the rank that sent the message, once matched.
        num_received: bytes copied so far.
    """

    source: int = ANY_SOURCE
    order: int = 0
    peer: int | None = None
    num_received: int = 0

    @property
    def awaited(self) -> int:
        """The rank that it waits for, or `ANY_SOURCE`."""
        return self.source if self.peer is None else self.peer


@dataclass(eq=False)
class Incoming:
    """A message that has arrived, or been announced.

    Attributes:
        peer: rank of the sender.
        tag: the tag that the sender gave.
        label: the label of the sender.
        num_bytes: size of the whole message in bytes.
        number: its number among all messages from that peer.
        data: the part that has arrived: all, the first chunk, or nothing.
        chunk: the chunk of the sender's pool that holds `data`, if any.
        announced: whether it has to be granted before the rest is sent.
        own: the send, if this rank sends to itself.
        order: its number among all arrivals here.
    """

    peer: int
    tag: int
    label: Label
    num_bytes: int
    number: int = 0
    data: torch.Tensor | Payload | None = None
    chunk: int | None = None
    announced: bool = False
    own: Send | None = None
    order: int = 0


class Matcher:
    """One rank's receives that wait for messages, and messages that wait for receives."""

    def __init__(self) -> None:
        self._num_seen = 0
        # Empty queues are removed.
        self._receives: dict[tuple[int, int], deque[Receive]] = {}  # by source or ANY_SOURCE, and tag
        self._arrivals: dict[tuple[int, int], deque[Incoming]] = {}  # by source and tag

    def arrival_for(self, receive: Receive) -> Incoming | None:
        """Take the message that matches a new receive; if there is none, the receive waits."""
        self._num_seen += 1
        receive.order = self._num_seen
        if receive.source == ANY_SOURCE:
            keys = [key for key in self._arrivals if key[1] == receive.tag]
        else:
            keys = [key for key in ((receive.source, receive.tag),) if key in self._arrivals]
        if keys:
            return _take(self._arrivals, min(keys, key=lambda key: self._arrivals[key][0].order))
        self._receives.setdefault((receive.source, receive.tag), deque()).append(receive)
        return None

    def receive_for(self, arrival: Incoming) -> Receive | None:
        """Take the receive that matches a new message; if there is none, the caller may `keep` the message."""
        receives = self._receives
        key, any_key = (arrival.peer, arrival.tag), (ANY_SOURCE, arrival.tag)
        if any_key in receives and (key not in receives or receives[any_key][0].order < receives[key][0].order):
            key = any_key
        return _take(receives, key) if key in receives else None

    def keep(self, arrival: Incoming) -> None:
        """Make a message wait for its receive."""
        self._num_seen += 1
        arrival.order = self._num_seen
        self._arrivals.setdefault((arrival.peer, arrival.tag), deque()).append(arrival)

    def withdraw(self, receive: Receive) -> None:
        """Remove a receive, if it is waiting."""
        key = receive.source, receive.tag
        queue = self._receives.get(key)
        if queue is not None and receive in queue:
            queue.remove(receive)
            if not queue:
                del self._receives[key]

    def kept_from(self, peer: int) -> Iterator[Incoming]:
        """The messages from a peer that wait for a receive, in order of arrival."""
        found = [arrival for queue in self._arrivals.values() for arrival in queue if arrival.peer == peer]
        return iter(sorted(found, key=lambda arrival: arrival.order))


def _take(queues: dict[tuple[int, int], deque[_T]], key: tuple[int, int]) -> _T:
    queue = queues[key]
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first
