"""The private side of `torch.distributed`. May be imported while that is being imported."""

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
    """Names of the backends that somebody has registered, in small letters."""
    plugins = find("torch.distributed.distributed_c10d.Backend._plugins")
    if plugins is None:
        return [name for name in dist.Backend.backend_list if name not in _IS_BUILT_IN]
    return [name.lower() for name in plugins]


def _world() -> Any:
    """What torch knows of all groups of this process; None where it does not tell. Asked in every step."""
    world = getattr(distributed_c10d, "_world", None)
    return find("torch.distributed.distributed_c10d._world") if world is None else world


def group_count() -> int | None:
    """From which number the next group gets its name; None where torch does not tell."""
    return getattr(_world(), "group_count", None)


def set_group_count(count: int | None) -> None:
    """Take back the names that a failed `init_process_group` has given, so that all ranks count alike."""
    if count is not None:
        world = _world()
        assert world is not None  # it had a count before
        world.group_count = count


def open_groups() -> list[Any]:
    """The groups of this process; empty where torch does not tell."""
    return list(getattr(_world(), "pg_map", ()))


def is_registered(group: Any) -> bool:
    """Whether torch knows the group, and has not destroyed it."""
    return group in open_groups()


def note_ranks(group: Any, global_ranks: Sequence[int]) -> None:
    """Have torch know which ranks are in a group that it has made for us."""
    known = getattr(_world(), "pg_group_ranks", None)
    if known is not None:
        known[group] = {rank: index for index, rank in enumerate(global_ranks)}


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend that torch's group has for a kind of device."""
    return group._get_backend(torch.device(device))


def start_coalescing(group: Any, device: torch.device) -> None:
    """What a group is asked for next, on that device, is one call. By torch's own method, whatever overrides it."""
    dist.ProcessGroup._start_coalescing(group, device)


def end_coalescing(group: Any, device: torch.device) -> Any:
    """Those were all. Returns the handle."""
    return dist.ProcessGroup._end_coalescing(group, device)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set how long later calls of a group of torch's wait. By its public method, where this torch has one. Local."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
        return
    set_by_class = find("torch.distributed.distributed_c10d._set_pg_timeout")
    if set_by_class is not None:
        set_by_class(timeout, group)


def sequence_number_of(group: Any) -> int | None:
    """How many collectives a group of torch's has begun; None where it does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def default_store() -> Any:
    """The store through which the default group met; None where torch does not tell."""
    get = find("torch.distributed.distributed_c10d._get_default_store")
    return None if get is None else get()


def rendezvous_handlers() -> dict[str, Callable[..., Any]] | None:
    """By which function torch meets, for each scheme of `init_method`; None where it does not tell."""
    # `torch.distributed.rendezvous` is also a function, which hides the module.
    importlib.import_module("torch.distributed.rendezvous")
    return find("torch.distributed.rendezvous._rendezvous_handlers")


def default_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long a group of torch's waits if nobody says."""
    get = find("torch.distributed.distributed_c10d._get_default_timeout")
    timeout: timedelta = (
        distributed_c10d.default_pg_timeout if get is None else get(dist.Backend(dist.get_backend(group)))
    )
    return timeout


def device_types_of(group: dist.ProcessGroup) -> frozenset[str]:
    """Of which kinds of devices a group takes tensors, such as {"cpu", "cuda"}."""
    devices = getattr(group, "_device_types", None)
    if devices is None:
        find("torch._C._distributed_c10d.ProcessGroup._device_types")
        return frozenset({"cuda"} if dist.get_backend(group) == "nccl" else {"cpu"})
    return frozenset(device.type for device in devices)


def join_config_of(engine: Any) -> Any:
    """What `torch.distributed.algorithms.Join` has told a Joinable: whether it is enabled, and when it raises."""
    return engine._join_config


def tell_join_config(engine: Any, config: Any) -> None:
    """Tell a Joinable what `Join` tells it when the context is made, and never takes back: `config`."""
    engine._join_config = config


def gloo_device(address: str) -> Any:
    """What Gloo listens by, at an address of this host, from now until nobody holds it. Local."""
    gloo: Any = distributed_c10d.ProcessGroupGloo  # whose methods torch's stubs leave out
    try:
        # Else TORCH_GLOO_LAZY_INIT may have ranks connect at their first transfer.
        return gloo.create_device(hostname=address, lazy_init=False)
    except TypeError:  # torch 2.6 does not know lazy ones
        return gloo.create_device(hostname=address)


def gloo_group(store: Store, rank: int, world_size: int, device: Any, timeout: timedelta) -> Any:
    """torch's group over Gloo, on a device of `gloo_device` and with one thread. Collective.

    Raises:
        RuntimeError: the ranks could not connect.
        SetupError: this torch has another way to choose the address.
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
    """torch's context manager for several collectives in one. See its docstring for the arguments."""
    manager = find("torch.distributed.distributed_c10d._coalescing_manager")
    assert manager is not None, "this torch has no _coalescing_manager"
    return manager(*args, **options)
