"""`scatter` splits nested containers of tensors between devices; `gather` concatenates outputs.

[Note: no lost rows] For 4 devices, a batch of 5 is split into pieces of 2, 2 and 1, because torch splits by size and
not by number. Another input of 4 rows gives 4 pieces. torch zips these lists, up to the length of the shorter, and
drops the rest, so rows of different inputs no longer correspond; here that is an error.

[Note: copies] Pieces for CPU devices are copies, as they would be on devices with their own memory. Views would
share a version counter, and in-place operations of one replica would invalidate tensors that another has saved for its
backward pass.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.errors import InputError, InputTypeError
from lockstep.replicas.devices import Device, are_on_cpu, resolve_device, resolve_devices
from lockstep.torch_private.modules import Gather, Scatter

__all__ = ["gather", "scatter", "scatter_kwargs"]


def _is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


# ---- scatter -------------------------------------------------------------------------------------


def scatter(inputs: Any, target_gpus: Sequence[Device] | int, dim: int = 0) -> Any:
    """Split tensors into one piece per device; share everything else. Local. Mirrors `torch.nn.parallel.scatter`.

    Args:
        inputs: a tensor, or nested tuples, named tuples, lists and dicts with tensors. Tensors must give the
            same number of pieces. See [Note: no lost rows].
        target_gpus: devices, or their number.
        dim: the dimension to split.

    Returns:
        A list with the inputs of each piece (a tuple of tensors for a tensor): one per device, or fewer
        if the batch is too small. Containers are copied, other objects are shared. Pieces are
        differentiable.

    Raises:
        InputError: a tensor cannot be split along `dim`, or tensors give different numbers of pieces.
        InputTypeError: a PackedSequence, which has no batch dimension.
    """
    devices = resolve_devices(target_gpus)
    num_pieces = _count_pieces(inputs, len(devices), dim)
    pieces = _cut(inputs, devices, dim, num_pieces)
    return tuple(pieces) if isinstance(inputs, torch.Tensor) else pieces


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, target_gpus: Sequence[Device] | int, dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """`scatter` of positional and keyword arguments, into the same number of pieces. Local.

    Returns:
        A tuple and a dict per piece; two empty tuples if there are no arguments.

    Raises:
        InputError: see `scatter`.
        InputTypeError: see `scatter`.
    """
    if not inputs and not kwargs:
        return (), ()
    pieces = scatter((tuple(inputs), dict(kwargs or {})), target_gpus, dim)
    return tuple(positional for positional, _ in pieces), tuple(named for _, named in pieces)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, PackedSequence):
        raise InputTypeError(
            "a PackedSequence cannot be split into pieces of a batch; pass padded sequences and their "
            "lengths, and pack them in the module's forward"
        )
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _count_pieces(value: Any, num_devices: int, dim: int) -> int:
    """The number of pieces of all tensors, or the number of devices if there are no tensors."""
    num_of_size: dict[int, int] = {}
    for tensor in _tensors(value):
        if not -tensor.dim() <= dim < tensor.dim():
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be split along dim {dim}; give it one row per sample, "
                "or pass a Python number"
            )
        size = tensor.shape[dim]
        # As in Tensor.chunk.
        num_of_size[size] = num_devices if size == 0 else -(-size // -(-size // num_devices))
    if len(set(num_of_size.values())) > 1:
        found = ", ".join(f"{size} ({pieces} pieces)" for size, pieces in sorted(num_of_size.items()))
        raise InputError(
            f"inputs have different sizes along dim {dim}, which give different numbers of pieces for {num_devices} "
            f"devices: {found}; rows would be lost. Give every tensor one row per sample, and keep what all "
            "samples share in a buffer of the module"
        )
    return next(iter(num_of_size.values()), num_devices)


def _cut(value: Any, devices: list[torch.device], dim: int, num_pieces: int) -> list[Any]:
    """The pieces of nested containers: tensors are split, containers are copied, the rest is shared."""
    if isinstance(value, torch.Tensor):
        return _cut_tensor(value, devices, dim)
    if isinstance(value, dict):
        columns = [_cut(each, devices, dim, num_pieces) for each in value.values()]
        return [_copy_with_values(value, row) for row in _rows_of(columns, num_pieces)]
    if isinstance(value, tuple | list):
        columns = [_cut(each, devices, dim, num_pieces) for each in value]
        return [_sequence_like(value, row) for row in _rows_of(columns, num_pieces)]
    return [value] * num_pieces


def _cut_tensor(tensor: torch.Tensor, devices: list[torch.device], dim: int) -> list[torch.Tensor]:
    if are_on_cpu(devices):
        # See [Note: copies].
        return [piece.to(devices[0], copy=True) for piece in tensor.chunk(len(devices), dim)]
    return list(Scatter.apply(devices, None, dim, tensor))  # type: ignore[no-untyped-call]


def _rows_of(columns: list[list[Any]], num_pieces: int) -> list[list[Any]]:
    """Transpose: one row per piece, with an element of each column; also without columns."""
    return [[column[number] for column in columns] for number in range(num_pieces)]


def _copy_with_values(value: dict[Any, Any], row: list[Any]) -> dict[Any, Any]:
    """A copy of a dict, of the same type, with the values replaced in order."""
    copied = copy.copy(value)
    for key, each in zip(value, row, strict=True):
        copied[key] = each
    return copied


def _sequence_like(value: tuple[Any, ...] | list[Any], row: list[Any]) -> Any:
    """The elements of a row as a list, tuple or named tuple, of the type of `value`."""
    if isinstance(value, list):
        return row
    return type(value)(*row) if _is_namedtuple(value) else tuple(row)


# ---- gather --------------------------------------------------------------------------------------


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Concatenate the outputs of all replicas. Local. Mirrors `torch.nn.parallel.gather`.

    Args:
        outputs: one per replica, with the same structure: a tensor, None, or nested tuples, named tuples, lists
            and dicts of these.
        target_device: device of the result.
        dim: the dimension to concatenate along. Scalars become a vector, one entry per replica, with a warning.

    Returns:
        The same structure, with concatenated tensors; differentiable.

    Raises:
        InputError: the structures differ (also a ValueError, as in torch for dicts).
        InputTypeError: an output cannot be concatenated, such as a number.
    """
    if not outputs:
        raise InputError("there are no outputs to gather")
    return _join(list(outputs), resolve_device(target_device), dim)


def _join(outputs: list[Any], target: torch.device, dim: int) -> Any:
    first = outputs[0]
    _check_alike(outputs)
    if isinstance(first, torch.Tensor):
        return _join_tensors(outputs, target, dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in outputs):
            raise InputError(
                "All dicts must have the same number of keys, and the same keys, but replicas returned "
                f"{' and '.join(sorted({str(list(each)) for each in outputs}))}"
            )
        # From pairs, as in torch: output classes, such as those of transformers, expect them.
        return type(first)((key, _join([each[key] for each in outputs], target, dim)) for key in first)
    if not isinstance(first, tuple | list):
        raise InputTypeError(
            f"the module returned a {type(first).__name__} on each device, and only tensors can be gathered; return "
            "torch.tensor(…) for a number, and leave out anything else"
        )
    if len({len(each) for each in outputs}) > 1:
        raise InputError(f"replicas returned {type(first).__name__}s of lengths {[len(each) for each in outputs]}")
    joined = [_join(list(column), target, dim) for column in zip(*outputs, strict=True)]
    return type(first)(*joined) if _is_namedtuple(first) else type(first)(joined)


def _check_alike(outputs: list[Any]) -> None:
    kinds = {torch.Tensor if isinstance(each, torch.Tensor) else type(each) for each in outputs}
    if len(kinds) > 1:
        raise InputTypeError(
            f"replicas returned different types: {', '.join(sorted(kind.__name__ for kind in kinds))}; forward must "
            "return the same structure for every piece of the batch"
        )


def _join_tensors(outputs: list[torch.Tensor], target: torch.device, dim: int) -> torch.Tensor:
    if any(each.device.type != "cpu" for each in outputs):
        device = "cpu" if target.type == "cpu" else target
        joined: torch.Tensor = Gather.apply(device, dim, *outputs)  # type: ignore[no-untyped-call]
        return joined
    if dim == 0 and all(each.dim() == 0 for each in outputs):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and "
            "return a vector.",
            stacklevel=4,
        )
        outputs = [each.view(1) for each in outputs]
    return torch.cat(outputs, dim).to(target)
