"""The state of `hvd.init()` in this process: the world, the process sets and their channels."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.backend import engine_of
from lockstep.comm.names import BACKEND_NAME
from lockstep.compat.horovod.common.exceptions import NotInitializedError
from lockstep.compat.horovod.torch.channel import Channel
from lockstep.compat.horovod.torch.execution import gather_equal
from lockstep.compat.horovod.torch.meta import Meta
from lockstep.compat.horovod.torch.request import Request
from lockstep.compat.horovod.torch.timeline import Timeline
from lockstep.errors import InputError
from lockstep.torch_private.groups import default_timeout
from lockstep.world import World

__all__ = ["Runtime", "close", "current", "is_open", "open_runtime"]

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_runtime: Runtime | None = None


class _Groups(NamedTuple):
    """The groups of a process set.

    Attributes:
        control: group for CPU tensors; None on ranks outside the set.
        accelerator: group for tensors on GPUs, or None.
        timeout_s: timeout of their operations.
    """

    control: dist.ProcessGroup | None
    accelerator: dist.ProcessGroup | None
    timeout_s: float


class Runtime:
    """Horovod's state in this process. Its constructor is collective.

    Args:
        world: the open world.
        owns_world: whether to close the world at the end.

    Attributes:
        timeline: rank 0's trace.
        hosts: global ranks of each host.
        local_sizes: number of ranks on each rank's host.
    """

    def __init__(self, world: World, owns_world: bool) -> None:
        self.world = world
        self._owns_world = owns_world
        self.timeline = Timeline()
        self._ids = itertools.count()
        self._channels: dict[int, Channel] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}
        ranks = tuple(range(world.world_size))
        groups = self._make_groups(ranks)
        assert groups.control is not None
        self.local_sizes, self.hosts = self._gather_hosts(groups.control)
        self._open_channel(ranks, groups)

    def _gather_hosts(self, control: dist.ProcessGroup) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
        """Compute `local_sizes` and `hosts`."""
        own = torch.tensor([self.world.local_world_size, self.world.node_rank], device="cpu")
        table = torch.empty(self.world.world_size, 2, dtype=own.dtype, device="cpu")
        gather_equal(table.view(-1), own, control)
        sizes, numbers = table.t().tolist()
        hosts: dict[int, list[int]] = {}
        for rank, number in enumerate(numbers):
            hosts.setdefault(number, []).append(rank)
        return sizes, tuple(map(tuple, hosts.values()))

    def add_set(self, ranks: tuple[int, ...]) -> int:
        """Create the groups of a process set. Collective over all ranks, also those outside.

        Returns:
            The set's number.
        """
        return self._open_channel(ranks, self._make_groups(ranks))

    def _make_groups(self, ranks: tuple[int, ...]) -> _Groups:
        has_gpus = "nccl" in self.world.backend
        control_backend = (BACKEND_NAME if self._is_one_host() else "gloo") if has_gpus else None
        engine = engine_of(dist.group.WORLD)
        timeout = None if engine is None else timedelta(seconds=engine.timeout_s)
        control = dist.new_group(list(ranks), backend=control_backend, timeout=timeout)
        accelerator = dist.new_group(list(ranks), backend="nccl") if has_gpus else None
        if not isinstance(control, dist.ProcessGroup):
            return _Groups(None, None, 0.0)
        return _Groups(control, accelerator, (timeout or default_timeout(control)).total_seconds())

    def _open_channel(self, ranks: tuple[int, ...], groups: _Groups) -> int:
        set_id = next(self._ids)
        self._ranks[set_id] = ranks
        if groups.control is not None:
            self._channels[set_id] = Channel(
                set_id,
                ranks,
                self.world.rank,
                groups.control,
                groups.accelerator,
                self.timeline,
                groups.timeout_s,
                self.hosts,
            )
        return set_id

    def _is_one_host(self) -> bool:
        return self.world.local_world_size == self.world.world_size

    def remove_set(self, set_id: int) -> None:
        """Remove a process set, and leave its groups. Local."""
        del self._ranks[set_id]
        channel = self._channels.pop(set_id, None)
        if channel is not None:
            channel.close(dist.destroy_process_group)

    def sets(self) -> dict[int, tuple[int, ...]]:
        """The ranks of every process set, by number."""
        return dict(self._ranks)

    def channel(self, set_id: int, operation: str = "Operation") -> Channel:
        """This rank's channel of a set.

        Raises:
            InputError: the set does not exist, or this rank is not in it.
        """
        channel = self._channels.get(set_id)
        if channel is not None:
            return channel
        if set_id not in self._ranks:
            raise InputError(f"{operation}: Process set provided does not exist, or has not been registered.")
        raise InputError(
            f"{operation}: Rank {self.world.rank} is not a member of the provided process set, which has ranks "
            f"{list(self._ranks[set_id])}."
        )

    def agree(self, what: str, labels: tuple[str, ...]) -> None:
        """Check that all ranks are about to do the same. Collective.

        Raises:
            HorovodInternalError: they are not; names the ranks and what each does.
        """
        channel = self.channel(0)
        request = channel.submit(Request(Meta(f"process_set.{what}", "process_set", labels=labels)))
        channel.wait(request)
        request.take()

    def close(self) -> None:
        """Leave all groups. Local."""
        self.timeline.stop()
        for channel in self._channels.values():
            channel.close(dist.destroy_process_group)
        self._channels.clear()
        self._ranks.clear()
        if self._owns_world:
            self.world.shutdown()


def open_runtime(world: World, owns_world: bool) -> Runtime:
    """Create the runtime that `current` returns. Collective."""
    global _runtime
    _runtime = Runtime(world, owns_world)
    return _runtime


def is_open() -> bool:
    """Whether `hvd.init()` was called, and `hvd.shutdown()` was not."""
    return _runtime is not None


def current() -> Runtime:
    """The open runtime.

    Raises:
        NotInitializedError: there is none.
    """
    if _runtime is None:
        raise NotInitializedError(_NOT_INITIALIZED)
    return _runtime


def close() -> None:
    """Close the open runtime, if there is one. Local."""
    global _runtime
    closing, _runtime = _runtime, None
    if closing is not None:
        closing.close()
