"""Element-wise reduction of the parts of all ranks, always in the same pairwise tree.

[Note: tree order] The parts of ranks 0 … n-1 are combined as neighbours in pairs, then pairs of
pairs, and so on: ((0 1) (2 3)) 4 for five. The order depends on n only, so every rank and
every run gets the same bits, whoever does the adding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from lockstep.errors import InputTypeError

__all__ = ["Kernel", "find_kernel", "op_name"]

_Combine = Callable[..., torch.Tensor]
_NARROW_FLOATS = (torch.float16, torch.bfloat16)
_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
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
    """How one reduce operation works on one dtype.

    Attributes:
        name: the operation, as users spell it.
        combine: the element-wise torch function, with `out=`.
        accumulate: dtype to accumulate in, or None for the tensor's own.
        divide: divide the result by the number of parts (AVG).
        factor: multiply this rank's own part first (PREMUL_SUM), or None.
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
            out: same dtype and numel. May be one of two parts, and none of more than two.
        """
        if self.accumulate is None:
            if len(parts) == 2 and not self.divide:
                self.combine(parts[0], parts[1], out=out)
                return
            result = self._tree(parts, out)
            if result is not out:
                out.copy_(result)
            if self.divide and len(parts) > 1:
                out.div_(len(parts))
            return
        wide = [part.to(self.accumulate) for part in parts]
        total = self._tree(wide, wide[0])
        if self.divide and len(parts) > 1:
            total.div_(len(parts))
        out.copy_(total)

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


_cache: dict[tuple[object, torch.dtype], Kernel] = {}


def _kind(op: Any) -> Any:
    # `ReduceOp.SUM` is a plain enum member; options carry it wrapped in a ReduceOp. isinstance says yes to both.
    return op.op if type(op) is ReduceOp else op  # type: ignore[attr-defined]


def op_name(op: Any) -> str:
    """The name of a reduce operation (a `ReduceOp` or one of its members): SUM, AVG, …"""
    return str(_kind(op).name)


def find_kernel(op: Any, dtype: torch.dtype) -> Kernel:
    """The kernel for a reduce operation on a dtype.

    Raises:
        InputTypeError: the operation makes no sense for the dtype; names those that do.
    """
    kind = _kind(op)
    kernel = _cache.get((kind, dtype))
    if kernel is not None:
        return kernel
    name = op_name(op)
    _check_dtype(name, dtype)
    accumulate = torch.float32 if dtype in _NARROW_FLOATS or dtype in _FLOAT8 else None
    if name in ("MIN", "MAX", "BAND", "BOR", "BXOR") and dtype not in _FLOAT8:
        accumulate = None
    if name == "PREMUL_SUM":
        # The factor belongs to this one call.
        return Kernel(name, _COMBINE[name], accumulate, factor=op.factor)
    kernel = Kernel(name, _COMBINE[name], accumulate, divide=name == "AVG")
    _cache[(kind, dtype)] = kernel
    return kernel


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if name not in _COMBINE:
        raise InputTypeError(f"reduce op {name} is not supported; use one of {', '.join(_COMBINE)}")
    is_float = dtype.is_floating_point
    problem = None
    if name in ("BAND", "BOR", "BXOR") and (is_float or dtype.is_complex):
        problem = "bitwise operations need an integer or bool dtype"
    elif name in ("MIN", "MAX") and dtype.is_complex:
        problem = "complex numbers have no order; reduce torch.view_as_real(tensor) if you mean the parts"
    elif name in ("AVG", "PREMUL_SUM") and not (is_float or dtype.is_complex):
        problem = "it needs a floating-point dtype; use SUM and divide as you see fit"
    if problem is not None:
        raise InputTypeError(f"{name} of {str(dtype).removeprefix('torch.')} tensors: {problem}")
