"""The private part of torch's DataLoader, for `lockstep.DataLoader`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.torch_private.lookup import find, need

__all__ = ["end_workers_with", "iterator_of", "set_guarded", "stack_into", "stacks_as_torch"]

_get_iterator = need("torch.utils.data.DataLoader._get_iterator")


def iterator_of(loader: DataLoader[Any]) -> Any:
    """torch's own iterator over a loader, even if its class overrides `__iter__`."""
    # torch draws the workers' seed on the default device from `loader.generator`, which is on the CPU. Workers inherit
    # the mode by fork, so it is only entered if the default is another device.
    default = torch.empty(0).device.type
    with torch.device("cpu") if default != "cpu" else nullcontext():
        # Looked up at each call: others replace it, too.
        return getattr(DataLoader, "_get_iterator", _get_iterator)(loader)


def end_workers_with(iterator: Any) -> None:
    """Make the workers of one of torch's iterators end when it is collected as part of a reference cycle. Local.

    An error of a worker creates such a cycle, by torch's frames in its traceback. multiprocessing closes the queues in
    it before torch's `__del__` tells the workers through them to end, and torch then waits several seconds for each of
    them. Objects held by a finalizer are not part of the cycle.
    """
    ended, queues = getattr(iterator, "_workers_done_event", None), getattr(iterator, "_index_queues", None)
    if ended is not None and queues:
        weakref.finalize(iterator, _end_workers, ended, list(queues), os.getpid()).atexit = False


def _end_workers(ended: Any, queues: Sequence[Any], pid: int) -> None:
    if os.getpid() == pid and not ended.is_set():
        ended.set()
        for queue in queues:
            queue.put(None)


def set_guarded(loader: Any, name: str, value: object) -> None:
    """Set an attribute that one of torch's classes protects after construction: `dataset`, `batch_size`, ….

    Args:
        loader: a DataLoader, or the frozen information of a worker.
        name: name of the attribute.
        value: its new value.
    """
    object.__setattr__(loader, name, value)


_COLLATE_FUNCTIONS = "torch.utils.data._utils.collate.default_collate_fn_map"


def stacks_as_torch() -> bool:
    """Whether torch's default collate function stacks tensors in the original way. Local.

    torch's documentation suggests that users replace it by a function of their own.
    """
    functions = find(_COLLATE_FUNCTIONS) or {}
    return getattr(functions.get(torch.Tensor), "__module__", None) == _COLLATE_FUNCTIONS.rpartition(".")[0]


def stack_into(new_memory: Callable[[int], torch.Tensor | None], at_least_bytes: int) -> None:
    """Make torch's default collate function stack tensors in our memory, in this worker process.

    Args:
        new_memory: takes a size in bytes; returns a uint8 tensor of that size, or None.
        at_least_bytes: smaller stacks are created in torch's memory, which is not shared.
    """
    functions = find(_COLLATE_FUNCTIONS)
    if functions is None or not stacks_as_torch():
        return
    stack_in_torchs: Callable[..., torch.Tensor] = functions[torch.Tensor]

    def stack(samples: Sequence[torch.Tensor], **options: Any) -> torch.Tensor:
        first = samples[0]
        is_plain = type(first) is torch.Tensor and first.device.type == "cpu" and first.layout is torch.strided
        if not is_plain or first.is_nested or first.is_quantized or first.requires_grad:
            return stack_in_torchs(samples, **options)
        size_bytes = len(samples) * first.numel() * first.element_size()
        if size_bytes < at_least_bytes:
            small = torch.empty((len(samples), *first.shape), dtype=first.dtype, device="cpu")
            return torch.stack(list(samples), out=small)
        memory = new_memory(size_bytes)
        if memory is None:
            return stack_in_torchs(samples, **options)
        return torch.stack(list(samples), out=memory.view(first.dtype).view(len(samples), *first.shape))

    functions[torch.Tensor] = stack
