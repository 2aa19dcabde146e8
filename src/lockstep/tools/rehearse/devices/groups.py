"""`nccl`, and every other backend that a script requests, as groups over shared memory.

The requested backend is remembered: `dist.get_backend()` returns it to the script, and a group that stands for nccl
rejects tensors in host memory, as nccl does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.callsite import is_users
from lockstep.comm.names import BACKEND_NAME
from lockstep.comm.registration import ensure
from lockstep.errors import InputError
from lockstep.tools.rehearse.devices.marks import mark_of
from lockstep.tools.rehearse.devices.mode import placed, tensors_among
from lockstep.tools.rehearse.patching import replace, wrap, wrap_everywhere

__all__ = ["NcclOptions", "ProcessGroupNCCL", "install", "nominal_backend"]

# Backends for which a Lockstep group is created instead.
_REPLACED = frozenset({"nccl", "gloo", "mpi", "ucc", "xccl"})
_WITH_TENSORS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "send", "recv", "isend", "irecv"),
)
_WATCHERS = "lockstep.tools.rehearse.watch"
# Group -> the backend that the script requested.
_nominal: dict[Any, str] = {}
# Groups created without a backend: torch gives these nccl for GPUs and gloo for host memory.
_mixed: set[Any] = set()


def _translate(backend: Any) -> tuple[Any, str]:
    """The backend to create, and the one that the script requested."""
    if backend is None:
        return BACKEND_NAME, "nccl"
    name = str(backend).lower()
    kinds = [part.rpartition(":")[2] for part in name.split(",")]
    nominal = next((kind for kind in kinds if kind == "nccl"), kinds[0])
    # A group with a backend per device type accepts tensors on all of these, unlike nccl alone.
    nominal = nominal if len(kinds) == 1 else name
    return (BACKEND_NAME if all(kind in _REPLACED for kind in kinds) else backend), nominal


def _group(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def nominal_backend(group: Any = None) -> str:
    """The backend that the script requested for this group, else for the default group; empty if there is none."""
    return _nominal.get(_group(group), "") or _nominal.get(dist.group.WORLD, "")


def _check_rank(world_size: Any = -1, rank: Any = -1, **others: Any) -> None:
    """Reject a rank that is not below the world size, which would wait forever."""
    if isinstance(world_size, int) and isinstance(rank, int) and 0 <= world_size <= rank:
        raise InputError(
            f"init_process_group: rank {rank} of world_size {world_size}, but ranks are 0 to world_size - 1. Pass the "
            "number of all processes of the job as world_size"
        )


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        ensure()
        names = ("init_method", "timeout", "world_size", "rank")
        _check_rank(**{**dict(zip(names, args, strict=False)), **kwargs})
        taken, nominal = _translate(backend)
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        result = original(taken, *args, **kwargs)
        _nominal[dist.group.WORLD] = nominal
        if backend is None:
            _mixed.add(dist.group.WORLD)
        return result

    return init_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(*args: Any, **kwargs: Any) -> Any:
        words = list(args)
        backend = words[2] if len(words) > 2 else kwargs.get("backend")
        nominal = nominal_backend()
        if backend is not None:
            taken, nominal = _translate(backend)
            if len(words) > 2:
                words[2] = taken
            else:
                kwargs["backend"] = taken
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        group = original(*words, **kwargs)
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            _nominal[group] = nominal
            if backend is None and dist.group.WORLD in _mixed:
                _mixed.add(group)
        return group

    return new_group


def _get_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_backend(group: Any = None) -> Any:
        actual = original(group)
        if not is_users(sys._getframe(1).f_code):
            return actual
        return nominal_backend(group) or actual

    return get_backend


def _get_backend_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_backend_config(group: Any = None) -> str:
        return "cuda:nccl" if nominal_backend(group) == "nccl" else original(group)

    return get_backend_config


def _is_called_by_user() -> bool:
    """Whether the user's code called the collective, apart from frames of our watchers in between."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_WATCHERS):
        frame = frame.f_back
    return is_users(frame.f_code)


def _like_nccl(original: Callable[..., Any]) -> Callable[..., Any]:
    position = list(inspect.signature(original).parameters).index("group")

    def collective(*args: Any, **kwargs: Any) -> Any:
        # Tensors of torch's own calls are in host memory, as the actual group needs them.
        group = args[position] if len(args) > position else kwargs.get("group")
        if nominal_backend(group) == "nccl" and _group(group) not in _mixed and _is_called_by_user():
            for tensor in tensors_among([*args, *kwargs.values()]):
                if mark_of(tensor) is None:
                    raise RuntimeError(
                        f"No backend type associated with device type cpu: {original.__name__} of a tensor in host "
                        "memory on an nccl group. Move it with .cuda(), or make a gloo group for it"
                    )
        return original(*args, **kwargs)

    return collective


def _on_its_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark DDP's buckets, which C++ creates without naming a device, with the device of the parameters."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self if original.__name__ != "__init__" else args[0] if args else kwargs.get("module")
        parameter = next(module.parameters(), None) if isinstance(module, torch.nn.Module) else None
        index = None if parameter is None else mark_of(parameter)
        if index is None:
            return original(self, *args, **kwargs)
        with placed(index):
            return original(self, *args, **kwargs)

    return method


class NcclOptions:
    """Options for `pg_options`, accepted and ignored.

    Args:
        options: stored as attributes, such as `is_high_priority_stream`.
    """

    def __init__(self, **options: Any) -> None:
        self.config = SimpleNamespace()
        vars(self).update(options)


class ProcessGroupNCCL:
    """`dist.ProcessGroupNCCL`, for a build of torch without nccl."""

    Options = NcclOptions


def install() -> None:
    """Replace the functions of torch.distributed that name a backend or pass tensors to one."""
    makers = {
        "init_process_group": _init,
        "new_group": _new_group,
        "get_backend": _get_backend,
        "get_backend_config": _get_backend_config,
    }
    makers.update(dict.fromkeys(_WITH_TENSORS, _like_nccl))
    for name, make in makers.items():
        wrap_everywhere(distributed_c10d, name, make)
    for name in ("__init__", "_pre_forward"):
        wrap(DistributedDataParallel, name, _on_its_device)
    for owner in (dist, distributed_c10d):
        wrap(owner, "is_nccl_available", lambda original: lambda: True)
        if not hasattr(owner, "ProcessGroupNCCL"):
            replace(owner, "ProcessGroupNCCL", ProcessGroupNCCL)
