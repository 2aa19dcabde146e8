"""The support of `DistributedDataParallel` for a sharded optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep import agreement
from lockstep.agreement import gather
from lockstep.comm.backend import engine_of
from lockstep.comm.engine import Engine
from lockstep.comm.names import BACKEND_NAME
from lockstep.drift.engines import engines
from lockstep.errors import InputError, SharedMemoryError
from lockstep.parallel.distributed import DistributedDataParallel
from lockstep.parallel.sharded.gradients import ShardedGradient

__all__ = ["find_models", "group_of_host", "shard"]


def find_models(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[DistributedDataParallel]:
    """The engines of these parameters; empty if any of them is in no engine that can shard over the group.

    If there are several engines for a model, the newest: an older one may still exist on some ranks only, depending on
    an earlier optimizer and the garbage collector.

    Raises:
        InputError: an engine ignores one of them, or its gradient is sparse; names it.
    """
    found: list[DistributedDataParallel] = []
    left = {id(each) for each in parameters}
    for engine in reversed(engines()):
        named = {id(each): name for name, each in engine.module.named_parameters()} if engine.number >= 0 else {}
        if not isinstance(engine, DistributedDataParallel) or left.isdisjoint(named):
            continue
        if engine.process_group is not group or engine._hook is not None:
            return []
        _check(engine, {named[key] for key in left.intersection(named)})
        left.difference_update(named)
        found.append(engine)
    return [] if left else found


def _check(engine: DistributedDataParallel, names: set[str]) -> None:
    ignored = names & engine._ignored
    sparse = names & {engine._names[index] for index in engine._sparse}
    for found, why in (
        (ignored, "is each rank's own (_ddp_params_and_buffers_to_ignore)"),
        (sparse, "has sparse gradients"),
    ):
        if found:
            raise InputError(f"{min(found)} {why} and cannot be sharded. Give it an optimizer of its own")


def shard(engine: DistributedDataParallel, stand_ins: Mapping[int, ShardedGradient]) -> Callable[[], None]:
    """Leave averaging of these parameters' gradients to the owners of shares. Collective.

    Args:
        engine: the engine that averages them.
        stand_ins: future `.grad`, by `id` of the parameter.

    Returns:
        A function that undoes it; call it on all ranks or on none. Local.

    Raises:
        SharedMemoryError: on every rank; there is no memory for the gradients. Nothing was changed.
    """
    reducer, sharded = engine._reducer, dict(engine._sharded)

    def take_back() -> None:
        engine._sharded = sharded
        vars(engine)["_reducer"] = reducer
        engine._backward.set_reducer(reducer)

    engine._sharded.update(stand_ins)
    del engine._reducer
    try:
        engine._reducer  # noqa: B018  recreated while all ranks are here
    except SharedMemoryError:
        take_back()
        raise
    return take_back


_of_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = weakref.WeakKeyDictionary()


def group_of_host(group: dist.ProcessGroup, engine: Engine) -> dist.ProcessGroup | None:
    """A group of the default group's ranks on this host, which shares memory or has one rank. Collective.

    Args:
        group: a group on several hosts.
        engine: the engine of that group.

    Returns:
        The group, created once; None if no host has several ranks, or ranks of a host do not share memory. Also None
        for
        any but the default group: in torch all ranks of that must take part in creating a group.
    """
    if group is not dist.group.WORLD:
        return None
    if group not in _of_hosts:
        first = gather(torch.tensor(engine.team.near[0], device="cpu"), group).tolist()  # of each rank's host
        hosts = [[rank for rank, each in enumerate(first) if each == host] for host in sorted(set(first))]
        _of_hosts[group] = _make_groups(hosts, group, engine) if len(hosts) < group.size() else None
    return _of_hosts[group]


def _make_groups(hosts: Sequence[list[int]], group: dist.ProcessGroup, engine: Engine) -> dist.ProcessGroup | None:
    timeout = timedelta(seconds=engine.timeout_s)
    made = [dist.new_group(ranks, timeout, BACKEND_NAME) for ranks in hosts]
    (own,) = (each for each, ranks in zip(made, hosts, strict=True) if group.rank() in ranks)
    near = engine_of(own)
    shares_memory = near is not None and (near.team.shares_memory or own.size() == 1)
    return own if agreement.all(shares_memory, group) else None
