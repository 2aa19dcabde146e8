"""`scatter` splits nested containers of tensors among devices; `gather` joins outputs again.

[Note: no lost rows] A batch of 5 makes pieces of 2, 2 and 1 for 4 devices, because torch cuts by size and not by
number. Another input of 4 rows makes 4 pieces. torch pairs them up as far as the shorter list goes and drops the
rest, so rows of one input meet those of another, or none; here that is an error.

[Note: copies] Pieces for CPU devices are copies, as they would be on devices with memory of their own. As views they
would share one version counter, and a replica that works in place would spoil what another has saved for its
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
    """Cut tensors into one piece per device; everything else is shared. Local. Mirrors `torch.nn.parallel.scatter`.

    Args:
        inputs: a tensor, or a nesting of tuples, named tuples, lists and dicts with tensors in them. Tensors need the
            same number of pieces. See [Note: no lost rows].
        target_gpus: devices, or how many.
        dim: the dimension to cut along.

    Returns:
        One nesting per piece, in a list (a tuple of tensors for a tensor): no more than there are devices, fewer
        where the batch is too small. Containers are copied, other objects are the same in each. Pieces are
        differentiable.

    Raises:
        InputError: tensors that cannot be cut along `dim`, or not into the same number of pieces.
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
        One tuple and one dict per piece; two empty tuples where there are no arguments.

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
            "a PackedSequence cannot be cut into pieces of a batch; hand the module padded sequences and their "
            "lengths, and pack them in its forward"
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
    """How many pieces all tensors make, or the number of devices if there are none."""
    num_of_size: dict[int, int] = {}
    for tensor in _tensors(value):
        if not -tensor.dim() <= dim < tensor.dim():
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be cut along dim {dim}; give it one row per sample, "
                "or pass a Python number"
            )
        size = tensor.shape[dim]
        # As Tensor.chunk counts.
        num_of_size[size] = num_devices if size == 0 else -(-size // -(-size // num_devices))
    if len(set(num_of_size.values())) > 1:
        found = ", ".join(f"{size} (makes {pieces})" for size, pieces in sorted(num_of_size.items()))
        raise InputError(
            f"inputs have different sizes along dim {dim}, which make different numbers of pieces for {num_devices} "
            f"devices: {found}; rows would be lost. Give every tensor one row per sample, and keep what all "
            "samples share in a buffer of the module"
        )
    return next(iter(num_of_size.values()), num_devices)


def _cut(value: Any, devices: list[torch.device], dim: int, num_pieces: int) -> list[Any]:
    """The pieces of a nesting of containers: tensors are cut, containers are copied, the rest is the same in each."""
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
    """One row per piece, an element of each column in it; also where there are no columns."""
    return [[column[number] for column in columns] for number in range(num_pieces)]


def _copy_with_values(value: dict[Any, Any], row: list[Any]) -> dict[Any, Any]:
    """A copy of a dict, of the same type, with other values for its keys in their order."""
    copied = copy.copy(value)
    for key, each in zip(value, row, strict=True):
        copied[key] = each
    return copied


def _sequence_like(value: tuple[Any, ...] | list[Any], row: list[Any]) -> Any:
    """A list, tuple or named tuple of the elements of a row, as `value` is one."""
    if isinstance(value, list):
        return row
    return type(value)(*row) if _is_namedtuple(value) else tuple(row)


# ---- gather --------------------------------------------------------------------------------------


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Put the outputs of all replicas together. Local. Mirrors `torch.nn.parallel.gather`.

    Args:
        outputs: one per replica, of the same structure: a tensor, None, or a nesting of tuples, named tuples, lists
            and dicts of these.
        target_device: where the result goes.
        dim: the dimension to join tensors along. Scalars become a vector, one entry per replica, with a warning.

    Returns:
        The same structure with joined tensors; differentiable.

    Raises:
        InputError: the structures differ (also a ValueError, as torch's for dicts).
        InputTypeError: something that cannot be joined, such as a number.
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
        # From pairs, as torch does: classes of outputs, such as those of transformers, expect them.
        return type(first)((key, _join([each[key] for each in outputs], target, dim)) for key in first)
    if not isinstance(first, tuple | list):
        raise InputTypeError(
            f"the module returned a {type(first).__name__} on each device, and only tensors can be gathered; return "
            "torch.tensor(…) for a number, and leave out what is no tensor"
        )
    if len({len(each) for each in outputs}) > 1:
        raise InputError(f"replicas returned {type(first).__name__}s of lengths {[len(each) for each in outputs]}")
    joined = [_join(list(column), target, dim) for column in zip(*outputs, strict=True)]
    return type(first)(*joined) if _is_namedtuple(first) else type(first)(joined)


def _check_alike(outputs: list[Any]) -> None:
    kinds = {torch.Tensor if isinstance(each, torch.Tensor) else type(each) for each in outputs}
    if len(kinds) > 1:
        raise InputTypeError(
            f"replicas returned different things: {', '.join(sorted(kind.__name__ for kind in kinds))}; forward must "
            "return the same structure whatever its piece of the batch is"
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
