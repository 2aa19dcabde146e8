"""Tensors that go to another process by `torch.multiprocessing`: on a stand-in there, too, and the same memory.

A tensor's storage is handed on by a descriptor, which knows nothing of marks; so the mark goes beside it. It is not
counted again there: with CUDA, too, the memory is that of the process that has made it.
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
    """Let storages take their marks along."""
    wrap(reductions, "reduce_storage", _with_mark)
    ForkingPickler.register(torch.UntypedStorage, reductions.reduce_storage)
