"""Who a process takes itself for: which variables it reads, which device it chooses, how many ranks it starts.

Notes `variable` (`name`, `value`), `device` (`index`) and `spawn` (`nprocs`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from lockstep import env
from lockstep.comm.callsite import is_users
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.rehearse.sites import chain
from lockstep.tools.rehearse.watch.recorder import recorder

__all__ = ["NAMES", "install"]

NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NPROCS", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK"}
    | {"PMI_RANK", "PMIX_RANK"}
)

_seen: set[Any] = set()


def _lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def getitem(self: Any, key: str) -> str:
        value: str = original(self, key)
        if key in NAMES:
            sites = chain()
            if sites and (key, sites) not in _seen:
                _seen.add((key, sites))
                recorder.note("variable", sites, name=key, value=value)
        return value

    return getitem


def _set_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_device(device: Any) -> None:
        if is_users(sys._getframe(1).f_code):
            recorder.note("device", chain(), index=str(device))
        original(device)

    return set_device


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **options: Any) -> Any:
        recorder.note("spawn", chain(), nprocs=nprocs)
        return original(fn, args, nprocs, *rest, **options)

    return start


def install() -> None:
    """Watch the environment, torch.cuda.set_device and torch.multiprocessing.spawn."""
    wrap(env.class_of_environment(), "__getitem__", _lookup)
    wrap(torch.cuda, "set_device", _set_device)
    for name in ("spawn", "start_processes"):
        wrap(torch.multiprocessing, name, _start)
