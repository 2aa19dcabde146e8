"""Operators computed in two halves, which shows the effect of rounding.

One process repeats each step, with every product, convolution and sum cut in two. Changes of that size are rounding; if
more changes, the script does not determine it. Computations before the samples of a step, such as the data, are left
unchanged: samples are identified by content. (Summing in reverse order instead would give the same bits with some
kernels, and miss the noise.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CUTS"]

_ATEN = torch.ops.aten


def _mm(a: Tensor, b: Tensor) -> Tensor | None:
    half = a.size(1) // 2
    return None if half == 0 else _ATEN.mm(a[:, :half], b[:half]) + _ATEN.mm(a[:, half:], b[half:])


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    product = _mm(a, b) if beta == alpha == 1 else None
    return None if product is None else bias + product


def _bmm(a: Tensor, b: Tensor) -> Tensor | None:
    half = a.size(2) // 2
    return None if half == 0 else _ATEN.bmm(a[..., :half], b[:, :half]) + _ATEN.bmm(a[..., half:], b[:, half:])


def _sum(tensor: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
    reduced = range(tensor.ndim) if not dim else [each % max(tensor.ndim, 1) for each in dim]
    place = next((each for each in reduced if tensor.size(each) > 1), None)
    if place is None or not tensor.is_floating_point():
        return None
    parts = torch.tensor_split(tensor, 2, place)
    first, second = (_ATEN.sum.dim_IntList(each, dim, keepdim, dtype=dtype) for each in parts)
    total: Tensor = first + second
    return total


def _sum_all(tensor: Tensor, *, dtype: Any = None) -> Tensor | None:
    return _sum(tensor, list(range(tensor.ndim)), dtype=dtype)


def _convolution(tensor: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor | None:
    half, (transposed, _, groups) = weight.size(1) // 2, rest[3:]
    if transposed or groups != 1 or half == 0:
        return None
    first = _ATEN.convolution(tensor[:, :half], weight[:, :half], None, *rest)
    total: Tensor = first + _ATEN.convolution(tensor[:, half:], weight[:, half:], bias, *rest)
    return total


def _convolution_backward(gradient: Tensor, tensor: Tensor, *rest: Any) -> Any:
    if gradient.size(0) < 2:
        return None
    halves = zip(torch.tensor_split(gradient, 2), torch.tensor_split(tensor, 2), strict=True)
    first, second = (_ATEN.convolution_backward(*each, *rest) for each in halves)
    of_inputs = None if first[0] is None else torch.cat([first[0], second[0]])
    return of_inputs, *(None if a is None else a + b for a, b in zip(first[1:], second[1:], strict=True))


CUTS: dict[Any, Callable[..., Any]] = {
    _ATEN.mm.default: _mm,
    _ATEN.addmm.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.sum.default: _sum_all,
    _ATEN.convolution.default: _convolution,
    _ATEN.convolution_backward.default: _convolution_backward,
}
"""Operator -> the function that computes it in two halves; that returns None if it cannot."""
