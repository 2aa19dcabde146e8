"""The private part of `torch.distributed`. May be imported while that is being imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep.errors import SetupError
from lockstep.torch_private.lookup import find

if TYPE_CHECKING:
    from lockstep.torch_private.stores import Store

__all__ = [
    "backend_of",
    "coalescing_manager",
    "default_store",
    "default_timeout",
    "device_types_of",
    "end_coalescing",
    "gloo_device",
    "gloo_group",
    "group_count",
    "is_registered",
    "join_config_of",
    "note_ranks",
    "open_groups",
    "plugin_backends",
    "rendezvous_handlers",
    "sequence_number_of",
    "set_group_count",
    "set_timeout",
    "start_coalescing",
    "tell_join_config",
]

_IS_BUILT_IN = frozenset({"undefined", "gloo", "nccl", "ucc", "mpi", "xccl"})


def plugin_backends() -> list[str]:
    """Names of the backends that have been registered, in lower case."""
    plugins = find("torch.distributed.distributed_c10d.Backend._plugins")
    if plugins is None:
        return [name for name in dist.Backend.backend_list if name not in _IS_BUILT_IN]
    return [name.lower() for name in plugins]


def _world() -> Any:
    """torch's registry of all groups of this process; None if unavailable. Called in every step."""
    world = getattr(distributed_c10d, "_world", None)
    return find("torch.distributed.distributed_c10d._world") if world is None else world


def group_count() -> int | None:
    """The number that the next group's name will be made of; None if unavailable."""
    return getattr(_world(), "group_count", None)


def set_group_count(count: int | None) -> None:
    """Undo the naming of groups by a failed `init_process_group`, so that all ranks count alike."""
    if count is not None:
        world = _world()
        assert world is not None  # it had a count before
        world.group_count = count


def open_groups() -> list[Any]:
    """The groups of this process; empty if unavailable."""
    return list(getattr(_world(), "pg_map", ()))


def is_registered(group: Any) -> bool:
    """Whether torch knows the group, and has not destroyed it."""
    return group in open_groups()


def note_ranks(group: Any, global_ranks: Sequence[int]) -> None:
    """Register with torch which ranks are in a group that it has created for us."""
    known = getattr(_world(), "pg_group_ranks", None)
    if known is not None:
        known[group] = {rank: index for index, rank in enumerate(global_ranks)}


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend that torch's group has for a device type."""
    return group._get_backend(torch.device(device))


def start_coalescing(group: Any, device: torch.device) -> None:
    """Start coalescing the next calls on that device into one. By torch's own method, even if it is overridden."""
    dist.ProcessGroup._start_coalescing(group, device)


def end_coalescing(group: Any, device: torch.device) -> Any:
    """End coalescing. Returns the handle."""
    return dist.ProcessGroup._end_coalescing(group, device)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of later calls of one of torch's groups. By its public method, if this torch has one. Local."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
        return
    set_by_class = find("torch.distributed.distributed_c10d._set_pg_timeout")
    if set_by_class is not None:
        set_by_class(timeout, group)


def sequence_number_of(group: Any) -> int | None:
    """How many collectives one of torch's groups has started; None if it does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def default_store() -> Any:
    """The store through which the default group met; None if unavailable."""
    get = find("torch.distributed.distributed_c10d._get_default_store")
    return None if get is None else get()


def rendezvous_handlers() -> dict[str, Callable[..., Any]] | None:
    """torch's rendezvous function for each scheme of `init_method`; None if unavailable."""
    # `torch.distributed.rendezvous` is also a function, which hides the module.
    importlib.import_module("torch.distributed.rendezvous")
    return find("torch.distributed.rendezvous._rendezvous_handlers")


def default_timeout(group: dist.ProcessGroup) -> timedelta:
    """The default timeout of one of torch's groups."""
    get = find("torch.distributed.distributed_c10d._get_default_timeout")
    timeout: timedelta = (
        distributed_c10d.default_pg_timeout if get is None else get(dist.Backend(dist.get_backend(group)))
    )
    return timeout


def device_types_of(group: dist.ProcessGroup) -> frozenset[str]:
    """The device types whose tensors a group accepts, such as {"cpu", "cuda"}."""
    devices = getattr(group, "_device_types", None)
    if devices is None:
        find("torch._C._distributed_c10d.ProcessGroup._device_types")
        return frozenset({"cuda"} if dist.get_backend(group) == "nccl" else {"cpu"})
    return frozenset(device.type for device in devices)


def join_config_of(engine: Any) -> Any:
    """The settings that `torch.distributed.algorithms.Join` passed to a Joinable: enabled or not, when it raises."""
    return engine._join_config


def tell_join_config(engine: Any, config: Any) -> None:
    """Pass a Joinable the settings that `Join` passes when the context is created, and never resets: `config`."""
    engine._join_config = config


def gloo_device(address: str) -> Any:
    """Gloo's listener at an address of this host, open until it is no longer referenced. Local."""
    gloo: Any = distributed_c10d.ProcessGroupGloo  # whose methods are missing in torch's stubs
    try:
        # Otherwise TORCH_GLOO_LAZY_INIT may make ranks connect at their first transfer.
        return gloo.create_device(hostname=address, lazy_init=False)
    except TypeError:  # torch 2.6 has no lazy devices
        return gloo.create_device(hostname=address)


def gloo_group(store: Store, rank: int, world_size: int, device: Any, timeout: timedelta) -> Any:
    """torch's group over Gloo, on a device of `gloo_device` and with one thread. Collective.

    Raises:
        RuntimeError: the ranks could not connect.
        SetupError: this torch chooses the address in another way.
    """
    gloo: Any = distributed_c10d.ProcessGroupGloo
    make_options = find("torch.distributed.distributed_c10d.ProcessGroupGloo._Options")
    if make_options is None:
        raise SetupError(
            "ranks on several hosts exchange large tensors by Gloo, whose address cannot be chosen with this torch: "
            "lockstep.init(backend='gloo') uses torch's own group"
        )
    options = make_options()
    options._devices = [device]
    options._timeout = timeout
    options._threads = 1
    return gloo(store, rank, world_size, options)


def coalescing_manager(*args: Any, **options: Any) -> Any:
    """torch's context manager that coalesces several collectives into one. See its docstring for the arguments."""
    manager = find("torch.distributed.distributed_c10d._coalescing_manager")
    assert manager is not None, "this torch has no _coalescing_manager"
    return manager(*args, **options)
