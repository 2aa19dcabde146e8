"""`copy.deepcopy` of an engine, as `AveragedModel` makes one: an engine of its own around a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["copy_engine"]

_REDUCER = "_reducer"  # made anew when the copy trains: it holds memory and connections


def copy_engine(engine: Any, memo: dict[int, Any], construct: Callable[..., None]) -> Any:
    """A copy of an engine with what users have put on it: attributes, hooks, modules, buffers. Local.

    What a subclass has in its constructor is not run, but copied.

    Args:
        engine: of any subclass.
        memo: of `copy.deepcopy`.
        construct: the constructor of `DistributedDataParallel`.
    """
    kind: Any = type(engine)
    twin = memo[id(engine)] = kind.__new__(kind)
    # Groups are of the process, and cannot be copied.
    memo.update((id(each), each) for each in vars(engine).values() if isinstance(each, dist.ProcessGroup))
    twin._averages_at_once = False
    construct(
        twin,
        copy.deepcopy(engine.module, memo),
        engine.device_ids,
        broadcast_buffers=engine.broadcast_buffers,
        init_sync=False,
        process_group=engine.process_group,
        bucket_cap_mb=engine._cap_mib,
        find_unused_parameters=engine.find_unused_parameters,
        gradient_as_bucket_view=engine._always_views,
        static_graph=engine.static_graph,
    )
    twin._hook, twin._num_hooks = engine._hook, engine._num_hooks
    _carry_over(engine, twin, memo)
    return twin


def _carry_over(engine: torch.nn.Module, twin: torch.nn.Module, memo: dict[int, Any]) -> None:
    """What the constructor has not made."""
    of_modules = set(vars(torch.nn.Module()))  # with submodules, parameters, buffers and hooks, in dicts
    for name, value in torch.nn.Module.__getstate__(engine).items():  # type: ignore[no-untyped-call]
        if name in of_modules or (name not in vars(twin) and name != _REDUCER):
            vars(twin)[name] = copy.deepcopy(value, memo)
