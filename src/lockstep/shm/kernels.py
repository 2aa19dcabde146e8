"""Element-wise reduction of the parts of all ranks, always in the same pairwise tree.

[Note: tree order] The parts of ranks 0 … n-1 are combined as neighbours in pairs, then pairs of pairs, and so on: ((0
1) (2 3)) 4 for five. The order only depends on n, so every rank and every run gets the same bits, whichever rank does
the addition.

[Note: dtypes without arithmetic] torch stores unsigned integers of more than 8 bits, but has few operations for them.
Their bits can be added as signed numbers, because both wrap around; and compared as such with the highest bit flipped.
8-bit floats have no arithmetic at all and, like 16-bit ones, accumulate in float32.

[Note: means of integers] torch.distributed leaves them to the backend. Gloo has no AVG; NCCL divides the sum and
truncates, and some frameworks rely on it: Lightning's `self.log(…, sync_dist=True)` averages numbers of samples. AVG
does as NCCL does, with two differences. The sum is computed in int64, so that 200 and 100 of uint8 have the mean 150.
And losing a nonzero fraction is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from lockstep.errors import InputTypeError
from lockstep.log import get_logger, warn_once

__all__ = ["Kernel", "divide", "find_kernel", "op_name"]

_logger = get_logger(__name__)

_Combine = Callable[..., torch.Tensor]


def _dtypes(*names: str) -> tuple[torch.dtype, ...]:
    """The dtypes of these names that this torch has."""
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


_FLOAT8 = _dtypes("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_ACCUMULATE: dict[torch.dtype, torch.dtype] = {
    **dict.fromkeys((torch.float16, torch.bfloat16, *_FLOAT8), torch.float32),
    torch.complex32: torch.complex64,
}
_SIGNED = dict(zip(_dtypes("uint16", "uint32", "uint64"), (torch.int16, torch.int32, torch.int64), strict=False))
# At most this many parts of this many bytes are first copied into a matrix: fewer calls of torch, but more bytes to
# move.
_MANY_PARTS, _SMALL_PART_BYTES = 16, 4096
_INTEGERS = _dtypes("uint8", "int8", "int16", "int32", "int64")
_BITWISE = ("BAND", "BOR", "BXOR")
_NUMBERS = frozenset(
    (
        *_dtypes("float64", "float32", "bool", "complex64", "complex128"),
        *_INTEGERS,
        *_ACCUMULATE,
        *_SIGNED,
    )
)
_COMBINE: dict[str, _Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@dataclass(frozen=True)
class Kernel:
    """The implementation of one reduce operation for one dtype.

    Attributes:
        name: the operation, as users spell it.
        combine: the element-wise torch function, with `out=`.
        accumulate: dtype to accumulate in, or None for the tensor's own.
        divide: whether to divide the result by the number of parts (AVG).
        factor: number by which this rank's part is multiplied first (PREMUL_SUM), or None.
    """

    name: str
    combine: _Combine
    accumulate: torch.dtype | None = None
    divide: bool = False
    factor: float | torch.Tensor | None = None

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine `parts` into `out`. Local. See [Note: tree order].

        Args:
            parts: one flat tensor per rank, same dtype and numel.
            out: same dtype and numel. May be one of the parts if there are two, but not if there are more.
        """
        if len(parts) >= _MANY_PARTS and out.numel() * out.element_size() <= _SMALL_PART_BYTES:
            rows = torch.stack(tuple(parts))
            total = self.reduce_rows(rows if self.accumulate is None else rows.to(self.accumulate))
            if self.divide:
                divide(total, len(parts))
            out.copy_(total)
            return
        if self.accumulate is None:
            if len(parts) == 2 and not self.divide:
                self.combine(parts[0], parts[1], out=out)
                return
            result = self._tree(parts, out)
            if result is not out:
                out.copy_(result)
            if self.divide and len(parts) > 1:
                divide(out, len(parts))
            return
        wide = [part.to(self.accumulate) for part in parts]
        total = self._tree(wide, wide[0])
        if self.divide and len(parts) > 1:
            divide(total, len(parts))
        out.copy_(total)

    def reduce_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Combine the rows of a matrix in the same tree, ignoring `divide` and `accumulate`; overwrites it. Local.

        Args:
            rows: of shape (parts, numel), each row contiguous.

        Returns:
            The result, of shape (numel,), in the memory of the first row.
        """
        while (count := rows.shape[0]) > 1:  # faster than len()
            left, right = rows[: count - 1 : 2], rows[1::2]
            self.combine(left, right, out=left)
            if count & 1:  # a part without a partner is passed up unchanged
                left = torch.cat((left, rows[-1:]))
            rows = left
        return rows[0]

    def _tree(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        count = len(parts)
        if count == 1:
            return parts[0]
        if count == 2:
            return self.combine(parts[0], parts[1], out=out)
        middle = 1 << (count - 1).bit_length() - 1
        left = self._tree(parts[:middle], out)
        right_parts = parts[middle:]
        right = right_parts[0] if len(right_parts) == 1 else self._tree(right_parts, torch.empty_like(out))
        return self.combine(left, right, out=out)


def divide(total: torch.Tensor, count: int) -> None:
    """Turn a sum into a mean, in place, for AVG. Local.

    Args:
        total: any shape; the sum of `count` parts. Integers are truncated: see [Note: means of integers].
        count: number of parts.
    """
    if total.is_floating_point() or total.is_complex():
        if count.bit_count() == 1:  # the same bits, in half the time
            total.mul_(1 / count)
        else:
            total.div_(count)
        return
    mean = total.div(count, rounding_mode="trunc")
    if not torch.equal(mean * count, total):
        warn_once(
            _logger,
            f"AVG of integers over {count} ranks: means were truncated to whole numbers, as NCCL does; reduce a "
            "tensor of floats, or use SUM and divide, for exact ones",
        )
    total.copy_(mean)


def _as_signed(combine: _Combine, signed: torch.dtype) -> _Combine:
    """`combine` for unsigned integers, on the same bits as signed ones, which wrap around in the same way."""

    def wrapped(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        combine(left.view(signed), right.view(signed), out=out.view(signed))
        return out

    return wrapped


def _in_order(combine: _Combine, signed: torch.dtype) -> _Combine:
    """A comparing `combine` for unsigned integers. See [Note: dtypes without arithmetic]."""
    high_bit = torch.iinfo(signed).min

    def ordered(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        result = combine(left.view(signed) ^ high_bit, right.view(signed) ^ high_bit)
        torch.bitwise_xor(result, high_bit, out=out.view(signed))
        return out

    return ordered


def _find_combine(name: str, dtype: torch.dtype) -> _Combine:
    signed = _SIGNED.get(dtype)
    if signed is not None and name == "SUM":
        return _as_signed(torch.add, signed)
    if signed is not None and name in ("MIN", "MAX"):
        return _in_order(_COMBINE[name], signed)
    return _COMBINE[name]


_cache: dict[tuple[object, torch.dtype], Kernel] = {}


def _kind(op: Any) -> Any:
    # `ReduceOp.SUM` is a plain enum member; options carry it wrapped in a ReduceOp. isinstance is true for both.
    return op.op if type(op) is ReduceOp else op  # type: ignore[attr-defined]


def op_name(op: Any) -> str:
    """The name of a reduce operation (a `ReduceOp` or one of its members): SUM, AVG, …"""
    return str(_kind(op).name)


def find_kernel(op: Any, dtype: torch.dtype) -> Kernel:
    """The kernel for a reduce operation on a dtype.

    Raises:
        InputTypeError: the operation is undefined for the dtype; says which dtypes it needs.
    """
    kind = _kind(op)
    kernel = _cache.get((kind, dtype))
    if kernel is not None:
        return kernel
    name = op_name(op)
    _check_dtype(name, dtype)
    accumulate = _ACCUMULATE.get(dtype)
    if name in ("MIN", "MAX") and dtype not in _FLOAT8:
        accumulate = None
    if name == "AVG" and dtype in _INTEGERS and dtype is not torch.int64:
        accumulate = torch.int64
    if name == "PREMUL_SUM":
        # The factor is part of this call only; before torch 2.13 it can only be read by pickling.
        return Kernel(name, _COMBINE[name], accumulate, factor=op.__getstate__()[1])
    kernel = Kernel(name, _find_combine(name, dtype), accumulate, divide=name == "AVG")
    _cache[(kind, dtype)] = kernel
    return kernel


def _can_scale(name: str, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or (name == "AVG" and dtype in _INTEGERS)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if name not in _COMBINE:
        raise InputTypeError(f"reduce op {name} is not supported; use one of {', '.join(_COMBINE)}")
    is_float = dtype.is_floating_point
    problem = None
    if dtype not in _NUMBERS:
        problem = "torch has no arithmetic for them; they can be copied (broadcast, all_gather, send, …)"
    elif name == "PREMUL_SUM" and dtype in _FLOAT8:
        problem = "it needs a floating-point dtype of at least 16 bits"
    elif name in _BITWISE and (is_float or dtype.is_complex):
        problem = "bitwise operations need an integer or bool dtype"
    elif name in ("MIN", "MAX") and dtype.is_complex:
        problem = "complex numbers have no order; reduce torch.view_as_real(tensor) if you mean the parts"
    elif name in ("AVG", "PREMUL_SUM") and not _can_scale(name, dtype):
        problem = "it needs numbers that can be divided; use SUM and divide as you see fit"
    if problem is not None:
        raise InputTypeError(f"{name} of {str(dtype).removeprefix('torch.')} tensors: {problem}")
