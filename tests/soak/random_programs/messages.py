"""Point to point in a soak: a set of messages between the ranks of a group, posted in an order of each rank's own.

Messages between two ranks with one tag come in the order sent, so both ends post those in one order; whatever differs
in sender, receiver or tag is shuffled. A set uses tags of its own, so that sets may overlap in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from lockstep.testing.conformance.case import label
from random_programs.operations import COPIED_DTYPES, LAYOUTS, Operation, Place, Started, draw_shape, fresh

__all__ = ["AnySource", "Batch", "Letters", "Messages"]

_NUM_TAGS = 3
_MOST_MESSAGES = 8


@dataclass(frozen=True)
class _Message:
    number: int
    source: int
    target: int
    tag: int
    shape: tuple[int, ...]


class Messages(Operation):
    """isend and irecv, waited for whenever the program comes to it. In groups of two and more."""

    def __init__(self, chance: Random, world_size: int, salt: int) -> None:
        super().__init__(chance, world_size, salt)
        self.dtype = chance.choice(COPIED_DTYPES)
        self.layout = chance.choice(LAYOUTS)
        self._order_seed = chance.random()
        self.messages = [self._draw(chance, number) for number in range(chance.randint(1, _MOST_MESSAGES))]

    def _draw(self, chance: Random, number: int) -> _Message:
        tag = self.salt * _NUM_TAGS + chance.randrange(_NUM_TAGS)
        source, target = chance.sample(range(self.world_size), 2)
        return _Message(number, source, target, tag, draw_shape(chance))

    def _of_message(self, message: _Message) -> torch.Tensor:
        return self.values(message.source, message.number, message.shape)

    def _posted_by(self, rank: int) -> list[tuple[bool, _Message]]:
        """What a rank posts, in order: (whether it sends, message). Lists of one pair and tag keep their order."""
        posts = [(True, one) for one in self.messages if one.source == rank]
        posts += [(False, one) for one in self.messages if one.target == rank]
        slots = [(sends, one.source, one.target, one.tag) for sends, one in posts]
        Random(f"{self._order_seed} {rank}").shuffle(slots)
        lanes: dict[tuple[bool, int, int, int], list[_Message]] = {}
        for sends, one in posts:
            lanes.setdefault((sends, one.source, one.target, one.tag), []).append(one)
        return [(slot[0], lanes[slot].pop(0)) for slot in slots]

    def start(self, place: Place, is_async: bool) -> Started:
        works, received = [], {}
        for sends, message in self._posted_by(place.rank):
            if sends:
                tensor = self.brought(message.source, message.number, message.shape)
                peer = place.members[message.target]
                works.append(dist.isend(tensor, peer, place.group, message.tag))
            else:
                tensor = received[message.number] = fresh(message.shape, self.dtype, self.layout)
                peer = place.members[message.source]
                works.append(dist.irecv(tensor, peer, place.group, message.tag))
        return self._finish(_All(works), received, is_async)

    def _finish(self, work: _All, received: dict[int, torch.Tensor], is_async: bool) -> Started:
        if not is_async:
            work.wait()
        return Started(work if is_async else None, [received[number] for number in sorted(received)])

    def expected(self, rank: int) -> list[Any]:
        return [self._of_message(one) for one in self.messages if one.target == rank]

    def __str__(self) -> str:
        listed = ", ".join(f"{one.source}->{one.target} {label(one.shape)} tag {one.tag}" for one in self.messages)
        return f"{type(self).__name__.lower()}({label(self.dtype)} {self.layout}: {listed})"


class Batch(Messages):
    """The same by `batch_isend_irecv`."""

    def start(self, place: Place, is_async: bool) -> Started:
        operations, received = [], {}
        for sends, message in self._posted_by(place.rank):
            if sends:
                tensor = self.brought(message.source, message.number, message.shape)
                peer = place.members[message.target]
                operations.append(dist.P2POp(dist.isend, tensor, peer, place.group, message.tag))
            else:
                tensor = received[message.number] = fresh(message.shape, self.dtype, self.layout)
                peer = place.members[message.source]
                operations.append(dist.P2POp(dist.irecv, tensor, peer, place.group, message.tag))
        works = dist.batch_isend_irecv(operations) if operations else []
        return self._finish(_All(works), received, is_async)


class AnySource(Operation):
    """One rank receives from all others, from whoever is there, by calls that wait; each value names its sender."""

    has_async = False

    def start(self, place: Place, is_async: bool) -> Started:
        tag = self.salt * _NUM_TAGS
        if place.rank != self.root:
            dist.send(self.brought(place.rank), place.members[self.root], place.group, tag)
            return Started(None, [])
        by_sender: dict[int, torch.Tensor] = {}
        for _ in range(self.world_size - 1):
            tensor = fresh(self.shape, self.dtype, self.layout)
            by_sender[place.members.index(dist.recv(tensor, None, place.group, tag))] = tensor
        return Started(None, [by_sender[rank] for rank in sorted(by_sender)])

    def expected(self, rank: int) -> list[Any]:
        if rank != self.root:
            return []
        return [self.values(sender) for sender in range(self.world_size) if sender != self.root]


class Letters(Operation):
    """Lists of objects from one rank to the next."""

    has_async = False

    def _objects(self, rank: int) -> list[Any]:
        return [{"from": rank, "text": "y" * self.rows[rank][0]}, rank + self.salt]

    @property
    def _target(self) -> int:
        return (self.root + 1) % self.world_size

    def start(self, place: Place, is_async: bool) -> Started:
        if place.rank == self.root:
            dist.send_object_list(self._objects(self.root), place.members[self._target], place.group)
        if place.rank != self._target:
            return Started(None, [])
        objects: list[Any] = [None, None]
        dist.recv_object_list(objects, place.members[self.root], place.group)
        return Started(None, objects)

    def expected(self, rank: int) -> list[Any]:
        return self._objects(self.root) if rank == self._target else []


class _All:
    """The handles of several calls as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
