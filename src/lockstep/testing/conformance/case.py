"""The definition of a conformance case, and the values that cases send and expect.

Every value sent is a small integer, or a power of two if values are multiplied, so that a reduction is exact in every
dtype and in every order, and the expected tensor can be compared bit for bit. Only averages over a number of ranks that
is not a power of two are rounded; they are compared within one rounding of the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import reduce as fold
from typing import Any

import torch
import torch.distributed as dist

from lockstep.torch_private.groups import coalescing_manager

__all__ = [
    "ALL_DTYPES",
    "BITWISE_OPS",
    "COMPLEX_DTYPES",
    "FLOAT_DTYPES",
    "INTEGER_DTYPES",
    "LARGE_NUMEL",
    "OPS_BY_DTYPE",
    "Case",
    "Context",
    "Shape",
    "all_unique",
    "case",
    "coalescing",
    "expect_equal",
    "finish",
    "inputs_of",
    "label",
    "reduced",
    "spread_out",
]

Shape = tuple[int, ...]

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX_DTYPES = (torch.complex64, torch.complex128)
ALL_DTYPES = (*FLOAT_DTYPES, *INTEGER_DTYPES, torch.bool, *COMPLEX_DTYPES)

BITWISE_OPS = ("BAND", "BOR", "BXOR")

# What torch.distributed accepts for each dtype: it refuses PRODUCT, MIN, MAX and the bitwise operations for complex
# numbers itself, and an average of integers is undefined.
OPS_BY_DTYPE: Mapping[torch.dtype, tuple[str, ...]] = {
    **dict.fromkeys(FLOAT_DTYPES, ("SUM", "AVG", "PRODUCT", "MIN", "MAX")),
    **dict.fromkeys((*INTEGER_DTYPES, torch.bool), ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE_OPS)),
    **dict.fromkeys(COMPLEX_DTYPES, ("SUM", "AVG")),
}

# One element more than 3 MiB of float32: more than any chunk that a backend is likely to use, and not a multiple of
# anything.
LARGE_NUMEL = 3 * 2**20 // 4 + 1


@dataclass(frozen=True)
class Context:
    """Where a check runs.

    Attributes:
        rank: this process's rank in `group`.
        world_size: number of ranks in `group`.
        group: the group to call, or None for the default group.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup | None = None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself, even if `group` is None."""
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        return group

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of the group, for arguments such as `src` and `dst`."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@dataclass(frozen=True)
class Case:
    """One check with its arguments.

    Attributes:
        name: unique, such as `all_reduce[op=SUM,dtype=float32,shape=5]`.
        check: called on every rank as `check(context, **arguments)`; raises if the backend
            does not conform.
        arguments: keyword arguments of the check.
        requires: features that a backend must have to pass; see `BACKEND_GAPS`.
        min_world_size: with fewer ranks the case is meaningless and is left out.
    """

    name: str
    check: Callable[..., None]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    requires: frozenset[str] = frozenset()
    min_world_size: int = 1


def case(check: Callable[..., None], *features: str, min_world_size: int = 1, **arguments: Any) -> Case:
    """A case whose name and features are derived from the check's name and arguments.

    The features are the name of the collective and, for each argument, `argument:value`, alone and combined with the
    collective: `all_reduce`, `dtype:int16`, `all_reduce/dtype:int16`; also a reduce operation combined with a dtype:
    `BAND:bool`. `features` adds others.

    >>> def check_all_reduce(context, op, dtype): ...
    >>> one = case(check_all_reduce, op="SUM", dtype=torch.bool)
    >>> one.name
    'all_reduce[op=SUM,dtype=bool]'
    >>> sorted(one.requires)
    ['SUM:bool', 'all_reduce', 'all_reduce/dtype:bool', 'all_reduce/op:SUM', 'dtype:bool', 'op:SUM']
    """
    verb = check.__name__.removeprefix("check_")
    shown = {name: label(value) for name, value in arguments.items()}
    derived = {verb, *features}
    for name, text in shown.items():
        derived |= {f"{name}:{text}", f"{verb}/{name}:{text}"}
    if "op" in shown and "dtype" in shown:
        derived.add(f"{shown['op']}:{shown['dtype']}")
    listed = ",".join(f"{name}={text}" for name, text in shown.items())
    return Case(f"{verb}[{listed}]" if listed else verb, check, arguments, frozenset(derived), min_world_size)


def label(value: object) -> str:
    """A short text for an argument: `float32`, `3x5`, `scalar`.

    >>> label(torch.float32), label((3, 5)), label(()), label(True), label("SUM")
    ('float32', '3x5', 'scalar', 'True', 'SUM')
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return "x".join(map(str, value)) if value else "scalar"
    return str(value)


def inputs_of(rank: int, shape: Shape, dtype: torch.dtype, op: str = "SUM", salt: int = 0) -> torch.Tensor:
    """The tensor that `rank` sends: differs between ranks, positions and salts; every rank can compute it.

    Sums of up to 16 ranks and products of up to 5 are exact in every dtype.

    Args:
        op: for "PRODUCT" the values are 1, 2 and, if the dtype is signed, -1; for the bitwise operations they use all
            of a byte's lower seven bits; otherwise they lie in -3 … 3 (0 … 6).
    """
    numel = math.prod(shape)
    tensor = _values(rank, min(numel, _PERIOD), dtype, op, salt)
    if numel > _PERIOD:
        tensor = tensor.repeat(-(-numel // _PERIOD))[:numel]
    if dtype.is_complex:
        tensor = torch.complex(tensor.real, tensor.real.flip(0) + rank)
    return tensor.reshape(shape)


# A multiple of every period in _values, so that a large input is a copy and needs no arithmetic.
_PERIOD = 3 * 7 * 128


def _values(rank: int, numel: int, dtype: torch.dtype, op: str, salt: int) -> torch.Tensor:
    position = torch.arange(numel, dtype=torch.int64) + 5 * rank + salt
    signed = dtype not in (torch.uint8, torch.bool)
    if dtype is torch.bool:
        values = position * (rank + 2) % 3 % 2
    elif op == "PRODUCT":
        values = torch.tensor([1, 2, -1 if signed else 1])[position * (rank + 1) % 3]
    elif op in BITWISE_OPS:
        values = (position * 37 + 11 * rank) % 128
    else:
        values = position * (2 * rank + 3) % 7 - (3 if signed else 0)
    return values.to(dtype)


def reduced(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction of one tensor per rank, in arithmetic wide enough to be exact."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        # A sum of bools is "or" and a product is "and", as in NCCL.
        op = {"SUM": "MAX", "PRODUCT": "MIN"}.get(op, op)
    wide = [tensor.to(_wide_dtype(dtype)) for tensor in tensors]
    if op == "AVG":
        return (fold(torch.add, wide) / len(wide)).to(dtype)
    return fold(_PAIRWISE[op], wide).to(dtype)


_PAIRWISE: Mapping[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def coalescing(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """torch's context in which calls on `group` are collected and started together at its end.

    It is private in torch, but FSDP and torchrec use it, so a backend must support it.
    """
    manager: AbstractContextManager[Any] = coalescing_manager(group=group, async_ops=True)
    return manager


def finish(work: Any, async_op: bool) -> None:
    """Wait for the result of an asynchronous call."""
    if async_op:
        work.wait()


def spread_out(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory with gaps: every second element of rows twice as long.

    Args:
        tensor: at least 1-D.
    """
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    strided = wide[..., ::2]
    strided.copy_(tensor)
    assert strided.numel() < 2 or not strided.is_contiguous()
    return strided


def expect_equal(actual: torch.Tensor, expected: torch.Tensor, what: str, *, roundings: int = 0) -> None:
    """Raise AssertionError unless shape, dtype and values are equal.

    Args:
        what: names the tensor in the message, such as "output 2".
        roundings: how many relative roundings of the dtype the values may be apart.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what} is {label(actual.dtype)} of shape {tuple(actual.shape)}, "
            f"expected {label(expected.dtype)} of shape {tuple(expected.shape)}"
        )
    if roundings and (expected.is_floating_point() or expected.is_complex()):
        tolerance = roundings * torch.finfo(expected.dtype).eps
        same = torch.isclose(actual, expected, rtol=tolerance, atol=0.0)
    else:
        same = actual == expected
    if not bool(same.all()):
        wrong = same.logical_not().nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what} differs at {len(wrong)} of {expected.numel()} positions, first at {first}: "
            f"got {actual[first].item()}, expected {expected[first].item()}"
        )


def all_unique(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The cases as a tuple, after checking that no two have one name."""
    listed = tuple(cases)
    names = [one.name for one in listed]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"two cases have one name: {twice}"
    return listed
