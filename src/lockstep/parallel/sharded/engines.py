"""What `DistributedDataParallel` does for a sharded optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep import agreement
from lockstep.comm.backend import engine_of
from lockstep.comm.engine import Engine
from lockstep.comm.names import BACKEND_NAME
from lockstep.drift.engines import engines
from lockstep.errors import InputError, SharedMemoryError
from lockstep.parallel.distributed import DistributedDataParallel
from lockstep.parallel.rank_agreement import gather
from lockstep.parallel.sharded.gradients import ShardedGradient

__all__ = ["find_models", "group_of_host", "shard"]


def find_models(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[DistributedDataParallel]:
    """The engines whose parameters these are; none if one of them is in no engine that can shard over the group.

    Of several engines over one model the newest: an older one may live on some ranks alone, as the last phase's
    optimizer and the garbage collector have it.

    Raises:
        InputError: an engine leaves one alone, or its gradient is sparse; names it.
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
            raise InputError(f"{min(found)} {why}, which cannot be sharded: give it an optimizer of its own")


def shard(engine: DistributedDataParallel, stand_ins: Mapping[int, ShardedGradient]) -> Callable[[], None]:
    """Leave the gradients of these parameters to those who have shares of them. Collective.

    Args:
        engine: that averages them.
        stand_ins: what `.grad` becomes, by `id` of the parameter.

    Returns:
        What takes it back, on all ranks or on none. Local.

    Raises:
        SharedMemoryError: on every rank; there is none for the gradients. All is as it was.
    """
    reducer, sharded = engine._reducer, dict(engine._sharded)

    def take_back() -> None:
        engine._sharded = sharded
        vars(engine)["_reducer"] = reducer
        engine._backward.set_reducer(reducer)

    engine._sharded.update(stand_ins)
    del engine._reducer
    try:
        engine._reducer  # noqa: B018  made anew, while all ranks are here
    except SharedMemoryError:
        take_back()
        raise
    return take_back


_of_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = weakref.WeakKeyDictionary()


def group_of_host(group: dist.ProcessGroup, engine: Engine) -> dist.ProcessGroup | None:
    """The ranks of the default group on this host, as a group that shares memory, or of one rank. Collective.

    Args:
        group: on several hosts.
        engine: of that group.

    Returns:
        The group, made once; None where no host has several ranks, or some of one share no memory. None of another
        than the default group, too: torch has all ranks of that take part in making a group.
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
