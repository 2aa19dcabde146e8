"""Tensors sent to another process by `torch.multiprocessing`, which share memory and stay on their stand-in.

A storage is sent as a file descriptor, which has no mark; so the mark is sent along with it. The memory is not counted
again in the receiver: with CUDA, too, it belongs to the process that allocated it.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from lockstep.tools.rehearse.devices.marks import _MARK, note_on
from lockstep.tools.rehearse.patching import wrap

__all__ = ["install"]


def _rebuild(index: int, rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    storage = rebuild(*arguments)
    if getattr(storage, _MARK, None) is None:
        note_on(storage, _MARK, index)
    return storage


def _with_mark(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_storage(storage: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        rebuild, arguments = original(storage)
        index = getattr(storage, _MARK, None)
        return (rebuild, arguments) if index is None else (_rebuild, (index, rebuild, arguments))

    return reduce_storage


def install() -> None:
    """Send marks along with storages."""
    wrap(reductions, "reduce_storage", _with_mark)
    ForkingPickler.register(torch.UntypedStorage, reductions.reduce_storage)
