"""How a process determines its rank: the variables it reads, the device it chooses, how many ranks it starts.

Records `variable` (`name`, `value`; `asks`: read by the script or a library, rather than by torch or Lockstep),
`device` (the script chose one), `count` (the user's code called `device_count`), `option` (`name`: the script
declares an option for its local rank), `spawn` (`nprocs`) and `peers` (`modules`: imported libraries through which
copies of a script may communicate).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.accelerator
import torch.multiprocessing

from lockstep import env
from lockstep.comm.callsite import is_users
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.rehearse.sites import chain, is_own
from lockstep.tools.rehearse.watch.recorder import recorder

__all__ = ["NAMES", "install"]

NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NPROCS", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK"}
    | {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"}
)
# Libraries for communication without torch.distributed.
_PEERS = ("mpi4py", "ray")
_OPTIONS = frozenset({"--local_rank", "--local-rank"})
_ENVIRONMENT_FILES = ("<frozen ", "/os.py", "/_collections_abc.py")

_seen: set[Any] = set()


def _asks(frame: FrameType | None) -> bool:
    """Whether the code that reads a variable, through any function of `os`, is neither torch's nor Lockstep's."""
    while frame is not None and any(part in frame.f_code.co_filename for part in _ENVIRONMENT_FILES):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code)


def _lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def getitem(self: Any, key: str) -> str:
        if key not in NAMES:
            return str(original(self, key))
        value = ""
        try:
            value = str(original(self, key))
            return value
        finally:
            asks, sites = _asks(sys._getframe(1)), chain()
            if sites and (key, asks, sites) not in _seen:
                _seen.add((key, asks, sites))
                recorder.note("variable", sites, name=key, value=value, asks=asks)

    return getitem


def _set_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_device(device: Any) -> None:
        if is_users(sys._getframe(1).f_code):
            recorder.note("device", chain())
        original(device)

    return set_device


def _count(original: Callable[..., Any]) -> Callable[..., Any]:
    def device_count() -> int:
        if is_own(sys._getframe(1)):
            sites = chain()
            if ("", sites) not in _seen:
                _seen.add(("", sites))
                recorder.note("count", sites)
        number: int = original()
        return number

    return device_count


def _declare(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_argument(self: Any, *names: Any, **options: Any) -> Any:
        for name in _OPTIONS.intersection(name for name in names if isinstance(name, str)):
            recorder.note("option", chain(), name=name)
        return original(self, *names, **options)

    return add_argument


def _finish() -> None:
    recorder.note("peers", (), modules=[name for name in _PEERS if name in sys.modules])


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **options: Any) -> Any:
        recorder.note("spawn", chain(), nprocs=nprocs)
        return original(fn, args, nprocs, *rest, **options)

    return start


def install() -> None:
    """Watch the environment, argparse, the choice and number of devices, and torch.multiprocessing.spawn."""
    wrap(env.class_of_environment(), "__getitem__", _lookup)
    wrap(torch.cuda, "set_device", _set_device)
    for name in ("set_device_index", "set_device_idx"):
        wrap(torch.accelerator, name, _set_device)
    for module in (torch.cuda, torch.accelerator):
        wrap(module, "device_count", _count)
    # The class from which parsers and argument groups inherit it.
    owner = next(kind for kind in argparse.ArgumentParser.__mro__ if "add_argument" in vars(kind))
    wrap(owner, "add_argument", _declare)
    for name in ("spawn", "start_processes"):
        wrap(torch.multiprocessing, name, _start)
    recorder.finishers.append(_finish)
