"""One collective of a soak: what each rank brings, the call, and what one process says must come out.

An operation is drawn from a `random.Random` and is the same object on every rank. Its model is `expected`: plain torch
on the inputs of all ranks, which every rank can compute (`conformance.case.inputs_of`). Sums of these are exact in
every dtype and order, so results are compared bit for bit, averages within their rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lockstep.testing.conformance.case import (
    ALL_DTYPES,
    OPS_BY_DTYPE,
    Shape,
    expect_equal,
    inputs_of,
    label,
    reduced,
    spread_out,
)

__all__ = [
    "COLLECTIVES",
    "COPIED_DTYPES",
    "LAYOUTS",
    "AllGather",
    "AllGatherIntoTensor",
    "AllReduce",
    "AllReduceInPlace",
    "AllToAll",
    "AllToAllSingle",
    "Barrier",
    "Broadcast",
    "Gather",
    "Objects",
    "Operation",
    "Place",
    "Reduce",
    "ReduceScatter",
    "ReduceScatterTensor",
    "Scatter",
    "Started",
    "compare",
    "draw_shape",
    "fresh",
    "laid_out",
]

# Copied like any other, and compared as float32, since torch cannot compare them.
_FLOAT8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))
COPIED_DTYPES = (*ALL_DTYPES, *_FLOAT8)
LAYOUTS = ("plain", "plain", "gaps", "transposed", "slice")

# Below and above the sizes at which algorithms change; the largest goes through slots in several rounds.
_NUMELS = (0, 1, 2, 31, 300, 301, 4_096, 20_000, 70_001)
_RARE_NUMEL = 600_011


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the group that it calls.

    Attributes:
        rank: rank in the group.
        members: global rank of each rank of the group.
        group: the group; None is the default one.
    """

    rank: int
    members: tuple[int, ...]
    group: dist.ProcessGroup | None


@dataclass
class Started:
    """A call under way on one rank.

    Attributes:
        work: its handle; None if it has finished.
        results: what it writes: tensors, or objects.
    """

    work: Any
    results: list[Any]


def draw_shape(chance: Random, dims: Sequence[int] = (0, 1, 1, 1, 2, 3)) -> Shape:
    """A shape of small, middling or, rarely, large tensors; 0-dim and zero-size ones too."""
    numel = _RARE_NUMEL if chance.random() < 0.01 else chance.choice(_NUMELS)
    match chance.choice(dims):
        case 0:
            return ()
        case 2:
            return numel // 4, 4
        case 3:
            return 2, numel // 6, 3
        case _:
            return (numel,)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, in memory of another layout."""
    if layout == "gaps" and tensor.dim():
        return spread_out(tensor)
    if layout == "transposed":
        return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.clone()
    if layout == "slice":
        whole = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
        part = whole[1 : 1 + tensor.numel()].view(tensor.shape)
        return part.copy_(tensor)
    return tensor.clone()


def fresh(shape: Shape, dtype: torch.dtype, layout: str = "plain") -> torch.Tensor:
    """A tensor for results, full of ones."""
    return laid_out(torch.ones(shape, dtype=torch.uint8).to(dtype), layout)


def compare(actual: Any, expected: Any, what: str, roundings: int = 0) -> None:
    """Raise AssertionError unless both are the same."""
    if isinstance(expected, torch.Tensor):
        if expected.dtype in _FLOAT8 and isinstance(actual, torch.Tensor) and actual.dtype is expected.dtype:
            actual, expected = actual.float(), expected.float()
        expect_equal(actual, expected, what, roundings=roundings)
    elif actual != expected:
        raise AssertionError(f"{what} is {actual!r:.200}, expected {expected!r:.200}")


class Operation(ABC):
    """One call of one verb in one group.

    Args:
        chance: decides everything that is open.
        world_size: ranks of the group.
        salt: makes its values differ from those of other operations.
    """

    dtypes: ClassVar[Sequence[torch.dtype]] = COPIED_DTYPES
    dims: ClassVar[Sequence[int]] = (0, 1, 1, 1, 2, 3)
    has_async = True

    def __init__(self, chance: Random, world_size: int, salt: int) -> None:
        self.world_size = world_size
        self.salt = salt
        self.dtype = chance.choice(self.dtypes)
        self.shape = draw_shape(chance, self.dims)
        self.layout = chance.choice(LAYOUTS)
        self.root = chance.randrange(world_size)
        self.op = chance.choice(OPS_BY_DTYPE.get(self.dtype, ("MAX",)))
        # Rows for each pair of ranks, for the verbs that have uneven ones.
        self.rows = [[chance.choice((0, 1, 2, 3, 50, 900)) for _ in range(world_size)] for _ in range(world_size)]

    @abstractmethod
    def start(self, place: Place, is_async: bool) -> Started:
        """Make the call on one rank."""

    @abstractmethod
    def expected(self, rank: int) -> list[Any]:
        """What `Started.results` must be on `rank` of the group, by one process."""

    def check(self, rank: int, results: Sequence[Any]) -> None:
        """Raise AssertionError unless the results are what one process says."""
        roundings = 4 if self.op == "AVG" and isinstance(self, _Reduction) else 0
        for number, (actual, expected) in enumerate(zip(results, self.expected(rank), strict=True)):
            compare(actual, expected, f"result {number}", roundings)

    def __str__(self) -> str:
        name = "".join("_" + letter.lower() if letter.isupper() else letter for letter in type(self).__name__)[1:]
        op = f", {self.op}" if isinstance(self, _Reduction) else ""
        return f"{name}({label(self.dtype)}[{label(self.shape)}] {self.layout}{op}, root={self.root})"

    # ---- pieces ------------------------------------------------------------------------------------

    def values(self, rank: int, peer: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """What `rank` brings, to `peer` if that matters."""
        op = self.op if isinstance(self, _Reduction) else "SUM"
        wide = self.dtype if self.dtype not in _FLOAT8 else torch.float32
        shape = self.shape if shape is None else shape
        return inputs_of(rank, shape, wide, op, salt=self.salt + 3 * peer).to(self.dtype)

    def brought(self, rank: int, peer: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """The same in this operation's layout."""
        return laid_out(self.values(rank, peer, shape), self.layout)

    def everybodys(self, peer: int = 0) -> list[torch.Tensor]:
        """What each rank brings."""
        return [self.values(rank, peer) for rank in range(self.world_size)]


class _Reduction(Operation):
    dtypes = ALL_DTYPES

    @property
    def reduce_op(self) -> Any:
        """torch's."""
        return getattr(dist.ReduceOp, self.op)


class AllReduce(_Reduction):
    """In place."""

    def start(self, place: Place, is_async: bool) -> Started:
        tensor = self.brought(place.rank)
        return Started(dist.all_reduce(tensor, self.reduce_op, place.group, is_async), [tensor])

    def expected(self, rank: int) -> list[Any]:
        return [reduced(self.op, self.everybodys())]


class AllReduceInPlace(AllReduce):
    """In symmetric memory, where the group has any."""

    def start(self, place: Place, is_async: bool) -> Started:
        values = self.values(place.rank)
        allocate = getattr(place.group or dist.group.WORLD, "symmetric_empty", torch.empty)
        tensor = allocate(values.shape, dtype=values.dtype).copy_(values)
        return Started(dist.all_reduce(tensor, self.reduce_op, place.group, is_async), [tensor])


class Reduce(_Reduction):
    """To one rank. What the others end with is open."""

    def start(self, place: Place, is_async: bool) -> Started:
        tensor = self.brought(place.rank)
        work = dist.reduce(tensor, place.members[self.root], self.reduce_op, place.group, is_async)
        return Started(work, [tensor] if place.rank == self.root else [])

    def expected(self, rank: int) -> list[Any]:
        return [reduced(self.op, self.everybodys())] if rank == self.root else []


class ReduceScatter(_Reduction):
    """From lists."""

    def start(self, place: Place, is_async: bool) -> Started:
        output = fresh(self.shape, self.dtype, self.layout)
        inputs = [self.brought(place.rank, peer) for peer in range(self.world_size)]
        return Started(dist.reduce_scatter(output, inputs, self.reduce_op, place.group, is_async), [output])

    def expected(self, rank: int) -> list[Any]:
        return [reduced(self.op, self.everybodys(rank))]


class ReduceScatterTensor(_Reduction):
    """From one tensor."""

    dims = (1, 2, 3)

    def start(self, place: Place, is_async: bool) -> Started:
        output = fresh(self.shape, self.dtype)
        whole = torch.cat([self.values(place.rank, peer) for peer in range(self.world_size)])
        return Started(dist.reduce_scatter_tensor(output, whole, self.reduce_op, place.group, is_async), [output])

    def expected(self, rank: int) -> list[Any]:
        return [reduced(self.op, self.everybodys(rank))]


class Broadcast(Operation):
    """From any root."""

    def start(self, place: Place, is_async: bool) -> Started:
        tensor = self.brought(place.rank)
        return Started(dist.broadcast(tensor, place.members[self.root], place.group, is_async), [tensor])

    def expected(self, rank: int) -> list[Any]:
        return [self.values(self.root)]


class AllGather(Operation):
    """Into lists, whose first dimension differs from rank to rank."""

    dims = (1, 2)

    def _shape_of(self, rank: int) -> Shape:
        return self.rows[0][rank], *self.shape[1:]

    def start(self, place: Place, is_async: bool) -> Started:
        outputs = [fresh(self._shape_of(rank), self.dtype, self.layout) for rank in range(self.world_size)]
        mine = self.brought(place.rank, shape=self._shape_of(place.rank))
        return Started(dist.all_gather(outputs, mine, place.group, is_async), list(outputs))

    def expected(self, rank: int) -> list[Any]:
        return [self.values(peer, shape=self._shape_of(peer)) for peer in range(self.world_size)]


class AllGatherIntoTensor(Operation):
    """Into one tensor."""

    dims = (1, 2, 3)

    def start(self, place: Place, is_async: bool) -> Started:
        output = fresh((self.shape[0] * self.world_size, *self.shape[1:]), self.dtype)
        return Started(
            dist.all_gather_into_tensor(output, self.brought(place.rank), place.group, is_async),
            list(output.chunk(self.world_size)) if self.shape[0] else [],
        )

    def expected(self, rank: int) -> list[Any]:
        return list(self.everybodys()) if self.shape[0] else []


class Gather(Operation):
    """To any root."""

    def start(self, place: Place, is_async: bool) -> Started:
        is_root = place.rank == self.root
        outputs = [fresh(self.shape, self.dtype, self.layout) for _ in range(self.world_size)] if is_root else None
        mine = self.brought(place.rank)
        return Started(dist.gather(mine, outputs, place.members[self.root], place.group, is_async), list(outputs or ()))

    def expected(self, rank: int) -> list[Any]:
        return list(self.everybodys()) if rank == self.root else []


class Scatter(Operation):
    """From any root."""

    def start(self, place: Place, is_async: bool) -> Started:
        output = fresh(self.shape, self.dtype, self.layout)
        inputs = None
        if place.rank == self.root:
            inputs = [self.brought(self.root, peer) for peer in range(self.world_size)]
        return Started(dist.scatter(output, inputs, place.members[self.root], place.group, is_async), [output])

    def expected(self, rank: int) -> list[Any]:
        return [self.values(self.root, rank)]


class AllToAll(Operation):
    """Lists, each pair of ranks with a size of its own."""

    def start(self, place: Place, is_async: bool) -> Started:
        ranks = range(self.world_size)
        inputs = [self.brought(place.rank, peer, (self.rows[place.rank][peer],)) for peer in ranks]
        outputs = [fresh((self.rows[peer][place.rank],), self.dtype, self.layout) for peer in ranks]
        return Started(dist.all_to_all(outputs, inputs, place.group, is_async), list(outputs))

    def expected(self, rank: int) -> list[Any]:
        return [self.values(peer, rank, (self.rows[peer][rank],)) for peer in range(self.world_size)]


class AllToAllSingle(Operation):
    """One tensor, uneven splits."""

    def start(self, place: Place, is_async: bool) -> Started:
        ranks = range(self.world_size)
        sent = self.rows[place.rank]
        received = [self.rows[peer][place.rank] for peer in ranks]
        whole = torch.cat([self.values(place.rank, peer, (sent[peer], 3)) for peer in ranks])
        output = fresh((sum(received), 3), self.dtype)
        work = dist.all_to_all_single(output, whole, received, sent, group=place.group, async_op=is_async)
        return Started(work, list(torch.split(output, received)))

    def expected(self, rank: int) -> list[Any]:
        return [self.values(peer, rank, (self.rows[peer][rank], 3)) for peer in range(self.world_size)]


class Barrier(Operation):
    """Nothing to compare: who comes too early or not at all is found out by the others."""

    def start(self, place: Place, is_async: bool) -> Started:
        if not is_async and self.salt % 4 == 0:
            dist.monitored_barrier(place.group)
            return Started(None, [])
        return Started(dist.barrier(place.group, is_async), [])

    def expected(self, rank: int) -> list[Any]:
        return []


class Objects(Operation):
    """The verbs that send pickles, of lengths that differ from rank to rank."""

    has_async = False

    def thing(self, rank: int, peer: int = 0) -> dict[str, Any]:
        """An object of `rank`."""
        return {"from": rank, "to": peer, "text": "x" * (self.rows[rank][peer] * 7 + self.salt % 5)}

    @property
    def _form(self) -> Callable[[Place], list[Any]]:
        return (self._all_gather, self._broadcast, self._gather, self._scatter)[self.salt % 4]

    def _all_gather(self, place: Place) -> list[Any]:
        outputs: list[Any] = [None] * self.world_size
        dist.all_gather_object(outputs, self.thing(place.rank), place.group)
        return outputs

    def _broadcast(self, place: Place) -> list[Any]:
        objects = [self.thing(place.rank), self.thing(place.rank)]
        dist.broadcast_object_list(objects, place.members[self.root], place.group)
        return objects

    def _gather(self, place: Place) -> list[Any]:
        outputs: list[Any] | None = [None] * self.world_size if place.rank == self.root else None
        dist.gather_object(self.thing(place.rank), outputs, place.members[self.root], place.group)
        return outputs or []

    def _scatter(self, place: Place) -> list[Any]:
        output: list[Any] = [None]
        inputs = [self.thing(self.root, peer) for peer in range(self.world_size)] if place.rank == self.root else None
        dist.scatter_object_list(output, inputs, place.members[self.root], place.group)
        return output

    def start(self, place: Place, is_async: bool) -> Started:
        return Started(None, self._form(place))

    def expected(self, rank: int) -> list[Any]:
        match self.salt % 4:
            case 0:
                return [self.thing(peer) for peer in range(self.world_size)]
            case 1:
                return [self.thing(self.root)] * 2
            case 2:
                return [self.thing(peer) for peer in range(self.world_size)] if rank == self.root else []
            case _:
                return [self.thing(self.root, rank)]


COLLECTIVES: tuple[type[Operation], ...] = (
    AllReduce, AllReduce, AllReduceInPlace, Reduce, ReduceScatter, ReduceScatterTensor, Broadcast, AllGather,
    AllGatherIntoTensor, Gather, Scatter, AllToAll, AllToAllSingle, Barrier, Objects,
)  # fmt: skip
