"""The verbs of torch.distributed: how to call, count and check each. Pure tables and functions, without a group.

[Note: exact] Values are integers, small enough that every sum of them is exact in the dtype. So each result has one
right value, in whatever order a backend adds, and a check compares for equality. Values differ between elements,
ranks and checks, so that misplaced, swapped or stale values are found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.bench.results import Parameters

__all__ = [
    "DTYPES",
    "OPS",
    "ROOT",
    "VERBS",
    "Piece",
    "Verb",
    "VerbContext",
    "count_wrong",
    "fill_inputs",
    "parameters_of",
]

ROOT = 0
OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8")
}
# Up to this number, the dtype represents all integers.
_EXACT_UP_TO = {torch.bfloat16: 256, torch.float16: 2048, torch.int8: 127, torch.uint8: 255}
_MOST_VALUES = 100
_BLOCK = 1 << 20  # elements to check at a time


@dataclass(frozen=True)
class VerbContext:
    """The calling rank and its group.

    Attributes:
        group: the group, with all ranks of the job.
        rank: rank in the group.
        world_size: number of ranks.
        op: name of the reduction, one of `OPS`.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    op: str


@dataclass(frozen=True)
class Piece:
    """A part of a result: the reduction of the same part of some ranks' inputs.

    Attributes:
        start: its first element in the result.
        sources: the ranks whose inputs are reduced; one for a copy.
        source_start: its first element in their inputs.
    """

    start: int
    sources: Sequence[int]
    source_start: int


_Call = Callable[[], object]

# Newer torch has other names for these, and every call by an old name warns, which takes time.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Verb:
    """A verb.

    Attributes:
        name: torch's name; `send_recv` for the ping-pong.
        bind: returns the call, from a context and two buffers.
        pieces: the pieces of the result, from world size, rank and count; empty if the rank has no result.
        sends_parts, receives_parts: whether that buffer has a part per rank, of `count` elements each.
        in_place: whether the result replaces the input.
        reduces: whether it has a reduction op.
        messages: number of messages that a call sends one after the other; its time is divided by this.
    """

    name: str
    bind: Callable[[VerbContext, torch.Tensor, torch.Tensor], _Call]
    pieces: Callable[[int, int, int], list[Piece]]
    sends_parts: bool = False
    receives_parts: bool = False
    in_place: bool = False
    reduces: bool = False
    messages: int = 1

    def count(self, size_bytes: int, itemsize: int, world_size: int) -> int:
        """Number of elements of a call with buffers of about that size, at least 1; 0 for a barrier."""
        if self.name == "barrier":
            return 0
        return max(1, size_bytes // (itemsize * self._parts(world_size)))

    def size_bytes(self, count: int, itemsize: int, world_size: int) -> int:
        """Bytes of the larger buffer of a call with `count` elements."""
        return count * itemsize * self._parts(world_size)

    def _parts(self, world_size: int) -> int:
        return world_size if self.sends_parts or self.receives_parts else 1


def _parts_of(buffer: torch.Tensor, context: VerbContext) -> list[torch.Tensor]:
    return list(buffer.chunk(context.world_size))


def _all_reduce(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    return lambda: dist.all_reduce(recv, OPS[to.op], to.group)


def _reduce(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    return lambda: dist.reduce(recv, ROOT, OPS[to.op], to.group)


def _broadcast(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    return lambda: dist.broadcast(recv, ROOT, to.group)


def _all_gather(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    parts = _parts_of(recv, to)
    return lambda: dist.all_gather(parts, send, to.group)


def _all_gather_into_tensor(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    return lambda: _all_gather_flat(recv, send, to.group)


def _gather(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    parts = _parts_of(recv, to) if to.rank == ROOT else None
    return lambda: dist.gather(send, parts, ROOT, to.group)


def _scatter(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    parts = _parts_of(send, to) if to.rank == ROOT else None
    return lambda: dist.scatter(recv, parts, ROOT, to.group)


def _reduce_scatter(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    parts = _parts_of(send, to)
    return lambda: dist.reduce_scatter(recv, parts, OPS[to.op], to.group)


def _reduce_scatter_tensor(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    return lambda: _reduce_scatter_flat(recv, send, OPS[to.op], to.group)


def _all_to_all(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    outputs, inputs = _parts_of(recv, to), _parts_of(send, to)
    return lambda: dist.all_to_all(outputs, inputs, to.group)


def _all_to_all_single(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    return lambda: dist.all_to_all_single(recv, send, group=to.group)


def _barrier(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    return lambda: dist.barrier(to.group)


def _send_recv(to: VerbContext, send: torch.Tensor, recv: torch.Tensor) -> _Call:
    """Rank 0 sends, and rank 1 sends the same back."""

    def first() -> None:
        dist.send(send, 1, to.group)
        dist.recv(recv, 1, to.group)

    def second() -> None:
        dist.recv(recv, 0, to.group)
        dist.send(recv, 0, to.group)

    def idle() -> None:
        """Other ranks do nothing."""

    return first if to.rank == 0 else second if to.rank == 1 else idle


def _of_all(n: int, rank: int, count: int) -> list[Piece]:
    return [Piece(0, range(n), 0)]


def _own_part_of_all(n: int, rank: int, count: int) -> list[Piece]:
    return [Piece(0, range(n), rank * count)]


def _of_each(n: int, rank: int, count: int) -> list[Piece]:
    return [Piece(peer * count, (peer,), 0) for peer in range(n)]


def _own_part_of_each(n: int, rank: int, count: int) -> list[Piece]:
    return [Piece(peer * count, (peer,), rank * count) for peer in range(n)]


def _at_root(pieces: Callable[[int, int, int], list[Piece]]) -> Callable[[int, int, int], list[Piece]]:
    return lambda n, rank, count: pieces(n, rank, count) if rank == ROOT else []


_gathering = functools.partial(Verb, receives_parts=True)
_scattering = functools.partial(Verb, sends_parts=True)
_exchanging = functools.partial(Verb, sends_parts=True, receives_parts=True)

VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("all_reduce", _all_reduce, _of_all, in_place=True, reduces=True),
        Verb("reduce", _reduce, _at_root(_of_all), in_place=True, reduces=True),
        Verb("broadcast", _broadcast, lambda n, rank, count: [Piece(0, (ROOT,), 0)], in_place=True),
        _gathering("all_gather", _all_gather, _of_each),
        _gathering("all_gather_into_tensor", _all_gather_into_tensor, _of_each),
        _gathering("gather", _gather, _at_root(_of_each)),
        _scattering("scatter", _scatter, lambda n, rank, count: [Piece(0, (ROOT,), rank * count)]),
        _scattering("reduce_scatter", _reduce_scatter, _own_part_of_all, reduces=True),
        _scattering("reduce_scatter_tensor", _reduce_scatter_tensor, _own_part_of_all, reduces=True),
        _exchanging("all_to_all", _all_to_all, _own_part_of_each),
        _exchanging("all_to_all_single", _all_to_all_single, _own_part_of_each),
        Verb("send_recv", _send_recv, lambda n, rank, count: [Piece(0, (0,), 0)] if rank < 2 else [], messages=2),
        Verb("barrier", _barrier, lambda n, rank, count: []),
    )
}
"""Verbs by name."""


def parameters_of(verb: Verb, count: int, dtype: str, op: str, world_size: int) -> Parameters:
    """The parameters of a row of the table.

    Args:
        count: number of elements. See [Note: sizes and bandwidths] in `columns.py`.
        dtype: name of the dtype.
        op: name of the reduction, if the verb has one.
        world_size: number of ranks.
    """
    has_bytes = verb.name != "barrier"
    return {
        "verb": verb.name,
        "world_size": world_size,
        "bytes": verb.size_bytes(count, DTYPES[dtype].itemsize, world_size),
        "count": count,
        "dtype": dtype if has_bytes else "none",
        "op": op if verb.reduces else "none",
    }


def fill_inputs(buffer: torch.Tensor, rank: int, world_size: int, seed: int) -> None:
    """Write a rank's input of a check. Local.

    Args:
        buffer: flat tensor to fill.
        rank: whose input it is.
        world_size: number of ranks whose inputs may be added.
        seed: seed of the check.
    """
    for start in range(0, buffer.numel(), _BLOCK):
        block = buffer[start : start + _BLOCK]
        block.copy_(_values(rank, start, block.numel(), world_size, seed, buffer.dtype))


def count_wrong(result: torch.Tensor, pieces: Sequence[Piece], count: int, op: str, world_size: int, seed: int) -> int:
    """Count the elements of a result that differ from those of one process. Local.

    Args:
        result: flat tensor, on any device.
        pieces: its pieces.
        count: number of elements of each piece.
        op: name of the reduction of the pieces.
        world_size: as in `fill_inputs`.
        seed: as in `fill_inputs`.
    """
    wrong = 0
    for piece in pieces:
        for start in range(0, count, _BLOCK):
            numel = min(_BLOCK, count - start)
            inputs = (
                _values(rank, piece.source_start + start, numel, world_size, seed, result.dtype)
                for rank in piece.sources
            )
            expected = _combine(op, inputs).to(result.dtype)
            first = piece.start + start
            wrong += int((result[first : first + numel].cpu() != expected).sum())
    return wrong


def _values(rank: int, start: int, numel: int, world_size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's input at these elements, as int64. See [Note: exact]."""
    num_values = min(_MOST_VALUES, _EXACT_UP_TO.get(dtype, 1 << 24) // world_size)
    place = torch.arange(start, start + numel, dtype=torch.int64)
    mixed = (place + 1) * 2654435761 + rank * 40503 + seed * 7919
    return 1 + ((mixed ^ (mixed >> 13)) & 0xFFFFFF) % max(1, num_values - 1)


def _combine(op: str, inputs: Iterable[torch.Tensor]) -> torch.Tensor:
    total, *others = inputs
    for other in others:
        match op:
            case "sum":
                total = total + other
            case "min":
                total = torch.minimum(total, other)
            case _:
                total = torch.maximum(total, other)
    return total
