"""Broadcasts of whole models, optimizers and objects."""

from __future__ import annotations

import contextlib
import importlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from lockstep.compat.horovod.common.exceptions import HorovodInternalError
from lockstep.compat.horovod.torch.context import rank
from lockstep.compat.horovod.torch.mpi_ops.broadcasts import start_broadcast
from lockstep.compat.horovod.torch.mpi_ops.gathers import start_all_gather
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.errors import InputError

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

_EXTRA_STATE = "_extra_state"  # suffix of the key of a module's `get_extra_state` in a state_dict


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite the parameters of all ranks by those of one. Collective.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`. Entries that are not tensors,
            such as extra state, are left alone.
        root_rank: global rank to copy from.

    Raises:
        InputError: `params` is of another type, or has no tensors to send, such as an optimizer's state.
        HorovodInternalError: ranks have different parameters; names the first.
    """
    if isinstance(params, dict):
        items: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, (str, bytes, torch.Tensor)) or not hasattr(params, "__iter__"):
        raise InputError(f"invalid params of type: {type(params)}")
    else:
        items = [item if isinstance(item, tuple) else (None, item) for item in params]
    _check_tensors(items)
    pending: list[Pending] = []
    for name, tensor in items:
        if isinstance(tensor, torch.Tensor):
            pending.append(start_broadcast(tensor, root_rank, name, global_process_set, True))
        elif name is None:
            raise InputError(f"invalid params: expected tensors, got {type(tensor).__name__}")
    for one in pending:
        one.wait()


def _check_tensors(items: Sequence[tuple[str | None, Any]]) -> None:
    """Raise an error if there are no tensors: nothing would be sent, and each rank would continue with its own."""
    names = [str(name) for name, value in items if name is not None and not isinstance(value, torch.Tensor)]
    strange = [name for name in names if not name.endswith(_EXTRA_STATE)]
    if strange and len(names) == len(items):
        raise InputError(
            f"broadcast_parameters: no tensor among {', '.join(map(repr, strange[:3]))}{', …' if strange[3:] else ''}. "
            "Give it model.state_dict() or model.named_parameters(); for an optimizer use "
            "hvd.broadcast_optimizer_state(optimizer, root_rank)"
        )


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Overwrite the optimizer state and options of all ranks by those of one. Collective.

    Other ranks end up with exactly the root's state, even if theirs had other entries, or none. Horovod first runs a
    step with zero gradients in an optimizer without state, which counts in Adam's bias correction, and decays
    weights; here it does not. As there, its gradients are zero afterwards.

    Args:
        optimizer: a torch optimizer, or one wrapped by `DistributedOptimizer`.
        root_rank: global rank to copy from.
        model: determines which parameters have sparse gradients.

    Raises:
        InputError: an LBFGS optimizer, whose state is not per parameter.
        HorovodInternalError: ranks have different optimizers, or a rank was lost.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("cannot broadcast torch.optim.LBFGS state")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state:
        _zero_gradients(optimizer, _sparse_parameters(model))
    layout = broadcast_object(_describe_state(optimizer, parameters), root_rank, "optimizer_state")
    if len(layout.entries) != len(parameters) or len(layout.options) != len(optimizer.param_groups):
        raise HorovodInternalError(
            f"broadcast_optimizer_state: rank {rank()} has {len(parameters)} parameters in "
            f"{len(optimizer.param_groups)} groups, root rank {root_rank} has {len(layout.entries)} in "
            f"{len(layout.options)}; ranks must create the same optimizer"
        )
    for group, options in zip(optimizer.param_groups, layout.options, strict=True):
        group.update(options)
    pending: list[Pending] = []
    for number, (parameter, entries) in enumerate(zip(parameters, layout.entries, strict=True)):
        if entries is None:
            optimizer.state.pop(parameter, None)
            continue
        state = _adopt(optimizer.state.get(parameter, {}), entries, parameter)
        optimizer.state[parameter] = state
        pending += [
            start_broadcast(state[key], root_rank, f"{key}.{number}", global_process_set, True)
            for key, value in entries.items()
            if isinstance(value, _TensorLayout)
        ]
    for one in pending:
        one.wait()


@dataclass(frozen=True)
class _TensorLayout:
    """Shape and dtype of a tensor in an optimizer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool


@dataclass(frozen=True)
class _StateLayout:
    """An optimizer's options, and the layout of its state for each parameter (None if there is none)."""

    options: list[dict[str, Any]]
    entries: list[dict[Any, Any] | None]


def _describe_state(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> _StateLayout:
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    entries: list[dict[Any, Any] | None] = []
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        if state is None:
            entries.append(None)
            continue
        entries.append(
            {
                key: _TensorLayout(tuple(value.shape), value.dtype, value.is_cpu)
                if isinstance(value, torch.Tensor) and value.is_contiguous()
                else value
                for key, value in state.items()
            }
        )
    return _StateLayout(options, entries)


def _adopt(state: dict[Any, Any], entries: dict[Any, Any], parameter: torch.Tensor) -> dict[Any, Any]:
    """A parameter's state with the root's entries: tensors to overwrite, and other values unchanged."""
    adopted = {}
    for key, value in entries.items():
        own = state.get(key)
        if not isinstance(value, _TensorLayout):
            adopted[key] = value
        elif isinstance(own, torch.Tensor) and (tuple(own.shape), own.dtype) == (value.shape, value.dtype):
            adopted[key] = own.contiguous()
        else:
            device = torch.device("cpu") if value.is_on_cpu else parameter.device
            adopted[key] = torch.empty(value.shape, dtype=value.dtype, device=device)
    return adopted


def _sparse_parameters(model: Any) -> set[int]:
    """Ids of the parameters of embeddings with sparse gradients."""
    if model is None:
        return set()
    sparse = (module for module in model.modules() if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag))
    return {id(parameter) for module in sparse if module.sparse for parameter in module.parameters()}


def _zero_gradients(optimizer: torch.optim.Optimizer, sparse: set[int]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter)
                is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
                parameter.grad = gradient.to_sparse() if is_sparse else gradient


def _pickler() -> ModuleType:
    """cloudpickle if installed, which also supports lambdas and classes of `__main__`; otherwise pickle."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("cloudpickle")
    return pickle


def _dump(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(_pickler().dumps(obj)), dtype=torch.uint8)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send an object of one rank to all, pickled. Collective.

    Args:
        obj: the object to send; ignored on other ranks than the root.
        root_rank: global rank to send from.
        name: matches the requests of ranks. Unlike in Horovod, it does not depend on the type of `obj`, which
            may differ.
        process_set: the ranks that take part.

    Returns:
        The root's object: itself on the root, a copy elsewhere.

    Raises:
        HorovodInternalError: a rank was lost.
    """
    name = "object" if name is None else name
    is_root = rank() == root_rank
    content = _dump(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([content.numel()], device="cpu")
    start_broadcast(length, root_rank, f"{name}.sz", process_set, True).wait()
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    start_broadcast(content, root_rank, f"{name}.t", process_set, True).wait()
    return obj if is_root else pickle.loads(content.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Send an object of every rank to all, pickled. Collective.

    Args:
        obj: the object to send; types may differ between ranks.
        name: matches the requests of ranks.
        process_set: the ranks that take part.

    Returns:
        The objects of all ranks, in order.

    Raises:
        HorovodInternalError: a rank was lost.
    """
    name = "object" if name is None else name
    content = _dump(obj)
    lengths = (
        start_all_gather([torch.tensor([content.numel()], device="cpu")], True, f"{name}.sz", process_set)
        .wait()
        .tolist()
    )
    gathered = start_all_gather([content], True, f"{name}.t", process_set).wait()
    return _load_all(gathered, lengths)


def _load_all(gathered: torch.Tensor, lengths: Sequence[int]) -> list[Any]:
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(gathered, list(lengths))]
