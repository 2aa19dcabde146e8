"""Descriptions of requests that ranks exchange, and the comparison of these.

Pure functions over plain data, which is sent as JSON; nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Entry", "Meta", "decode", "encode", "find_mismatch", "tensor_facts"]

TensorFacts = tuple[str, tuple[int, ...], str]

# Operations that work after a rank has joined; all others are refused, as in Horovod.
_JOINABLE = frozenset({"allreduce", "barrier"})
# Operations whose result the zeros of a joined rank would change.
_NOT_NEUTRAL_TO_ZERO = frozenset({"Min", "Max", "Product"})
_SAME_SHAPE = frozenset({"allreduce", "broadcast", "reducescatter"})
_RAGGED = frozenset({"allgather", "alltoall"})


@dataclass(frozen=True)
class Meta:
    """What ranks must agree on, or know of each other, before a request runs.

    Attributes:
        name: matches the requests of different ranks.
        kind: the operation.
        tensors: dtype, shape and device type of each tensor.
        op: name of the reduction, or "".
        prescale: factor before a reduction.
        postscale: factor after it.
        root: global rank that a broadcast starts from, or -1.
        splits: rows for each rank, in an alltoall.
        labels: names of the tensors, if any; or the ranks of a process set to add or remove.
        fused: whether the gradients are in symmetric buckets.
    """

    name: str
    kind: str
    tensors: tuple[TensorFacts, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    fused: bool = False

    @functools.cached_property
    def signature(self) -> bytes:
        """Bytes that are equal on two ranks if and only if the descriptions are."""
        return repr(self.fields()).encode()

    def fields(self) -> tuple[object, ...]:
        """All fields, in order."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclass(frozen=True)
class Entry:
    """A request as described by another rank.

    Attributes:
        meta: the request's metadata.
        site: the line of user code that made it.
    """

    meta: Meta
    site: str


def tensor_facts(tensor: torch.Tensor) -> TensorFacts:
    """dtype, shape and device type of a tensor."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type


def encode(entries: Sequence[Entry]) -> bytes:
    """Encode entries for other ranks."""
    return json.dumps([[*entry.meta.fields(), entry.site] for entry in entries]).encode()


def decode(content: bytes) -> list[Entry]:
    """Decode entries of another rank."""
    return [Entry(Meta(*map(_as_tuples, fields)), site) for *fields, site in json.loads(content)]


def _as_tuples(value: Any) -> Any:
    """Convert JSON's lists back to tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def find_mismatch(entries: Mapping[int, Entry], joined: Collection[int] = ()) -> str | None:
    """Why a request cannot run, in Horovod's words, with ranks and lines; None if it can.

    Args:
        entries: rank -> its description; at least one.
        joined: ranks that have called `join`.

    >>> def entry(*shape):
    ...     return Entry(Meta("x", "allreduce", (("float32", shape, "cpu"),), op="Sum"), "train.py:3")
    >>> find_mismatch({0: entry(2, 3), 1: entry(2, 3)}) is None
    True
    >>> find_mismatch({0: entry(2), 1: entry(3)}).partition(" [rank")[0]
    'Mismatched allreduce tensor shapes: One rank sent a tensor of shape [2], but another rank sent one of shape [3].'
    """
    (first, own), *others = sorted(entries.items())
    problem = _find_join_problem(own.meta, joined) or _find_own_problem(own.meta)
    if problem is not None:
        return f"{problem} [{_describe(first, own)}]"
    for rank, other in others:
        problem = _compare(own.meta, other.meta)
        if problem is not None:
            return f"{problem} [{_describe(first, own)}; {_describe(rank, other)}]"
    return None


def _describe(rank: int, entry: Entry) -> str:
    return f"rank {rank}: {entry.meta.name} at {entry.site}"


def _find_join_problem(meta: Meta, joined: Collection[int]) -> str | None:
    if not joined:
        return None
    who = f"rank(s) {', '.join(map(str, sorted(joined)))} had joined"
    if meta.kind not in _JOINABLE:
        advice = " Specify sparse_as_dense=True if using DistributedOptimizer." if meta.kind == "allgather" else ""
        return f"{meta.kind.capitalize()} is not supported with Join at this time ({who}).{advice}"
    if meta.op in _NOT_NEUTRAL_TO_ZERO:
        return f"Allreduce with op={meta.op} is not supported with Join ({who}, and would contribute zeros)."
    return None


def _find_own_problem(meta: Meta) -> str | None:
    if meta.kind in _RAGGED or meta.kind == "reducescatter":
        for _, shape, _ in meta.tensors:
            if not shape:
                return f"Process-set rank zero tried to {meta.kind} a rank-zero tensor."
    return None


def _compare(one: Meta, two: Meta) -> str | None:
    if one == two:
        return None
    if one.kind != two.kind:
        return f"Mismatched operations: One rank did an {one.kind}, but another rank did an {two.kind}."
    if one.labels != two.labels or len(one.tensors) != len(two.tensors):
        return _compare_labels(one, two)
    for index in range(len(one.tensors)):
        problem = _compare_tensors(one, two, index)
        if problem is not None:
            return problem
    return _compare_settings(one, two)


def _compare_labels(one: Meta, two: Meta) -> str:
    for mine, theirs in zip(one.labels, two.labels, strict=False):
        if mine != theirs:
            return f"Mismatched {one.kind} names: One rank has {mine!r} where another rank has {theirs!r}."
    return (
        f"Mismatched {one.kind} sizes: One rank has {max(len(one.tensors), len(one.labels))} item(s), but another "
        f"rank has {max(len(two.tensors), len(two.labels))}."
    )


def _compare_tensors(one: Meta, two: Meta, index: int) -> str | None:
    (dtype, shape, device), (other_dtype, other_shape, other_device) = one.tensors[index], two.tensors[index]
    if dtype != other_dtype:
        return f"Mismatched data types: One rank had type {dtype}, but another rank had type {other_dtype}."
    start = f"Mismatched {one.kind} tensor shapes: One rank sent a tensor"
    if one.kind in _SAME_SHAPE and shape != other_shape:
        return f"{start} of shape {list(shape)}, but another rank sent one of shape {list(other_shape)}."
    if one.kind in _RAGGED:
        if len(shape) != len(other_shape):
            return f"{start} of rank {len(shape)}, but another rank sent a tensor of rank {len(other_shape)}."
        for dim, (size, other_size) in enumerate(zip(shape, other_shape, strict=True)):
            if dim and size != other_size:
                return (
                    f"{start} with dimension {dim} equal to {size}, but another rank sent a tensor with dimension "
                    f"{dim} equal to {other_size}."
                )
    if device != other_device:
        return (
            f"Mismatched {one.kind} CPU/GPU device selection: One rank specified device {device}, but another rank "
            f"specified device {other_device}."
        )
    return None


def _compare_settings(one: Meta, two: Meta) -> str | None:
    if (one.prescale, one.postscale) != (two.prescale, two.postscale):
        return (
            f"Mismatched prescale and/or postscale factors: One rank sent factors ({one.prescale}, {one.postscale}), "
            f"but another rank sent factors ({two.prescale}, {two.postscale})."
        )
    if one.op != two.op:
        return (
            f"Mismatched reduction operation: One rank sent reduction op {one.op}, but another rank sent reduction "
            f"op {two.op}."
        )
    if one.root != two.root:
        return (
            f"Mismatched {one.kind} root ranks: One rank specified root rank {one.root}, but another rank specified "
            f"root rank {two.root}."
        )
    if one.fused != two.fused:
        return "Mismatched gradients: One rank has only dense gradients on the CPU, but another rank has others."
    return None
