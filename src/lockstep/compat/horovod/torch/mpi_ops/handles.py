"""Handles: numbers that stand for operations under way; and what every operation checks first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.compat.horovod.torch import runtime
from lockstep.compat.horovod.torch.channel import Channel
from lockstep.compat.horovod.torch.meta import Meta
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.compat.horovod.torch.request import Request
from lockstep.errors import InputError

__all__ = ["Pending", "barrier", "channel_of", "check_tensors", "issue", "join", "poll", "synchronize"]


class Pending:
    """An operation under way. Local to make: it submits the request.

    Args:
        channel: that of the process set which the operation runs on.
        request: what this rank asks for.
        finish: makes what `synchronize` returns from the request's result; None for the result itself.

    Raises:
        InputError: a request of that name is under way.
    """

    def __init__(self, channel: Channel, request: Request, finish: Callable[[Any], Any] | None = None) -> None:
        self.channel = channel
        self.request = channel.submit(request)
        self.finish = finish

    def wait(self) -> Any:
        """The result. Raises HorovodInternalError if it failed."""
        self.channel.wait(self.request)
        result = self.request.take()
        return result if self.finish is None else self.finish(result)


_numbers = itertools.count()
_pending: dict[int, Pending] = {}


def channel_of(process_set: ProcessSet, operation: str) -> Channel:
    """The channel of a process set.

    Raises:
        NotInitializedError: before `init`.
        InputError: the set is not in use, or this rank is not in it.
    """
    opened = runtime.current()
    set_id = process_set.process_set_id
    return opened.channel(-1 if set_id is None else set_id, operation.capitalize())


def check_tensors(tensors: Sequence[torch.Tensor], operation: str) -> list[torch.Tensor]:
    """The tensors without their history, if the operation can take them.

    Raises:
        InputError: no tensor at all, one of a type that cannot travel, or one with gaps between its elements.
    """
    if len(tensors) == 0:
        raise InputError(f"{operation}: an empty list of tensors; give at least one")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{operation}: expected a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise InputError(f"Tensor type {tensor.type()} is not supported by {operation}.")
        if not tensor.is_contiguous():
            raise InputError(
                f"Tensor is required to be contiguous: {operation} got one of shape {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}; call .contiguous() on it"
            )
    return [tensor.detach() for tensor in tensors]


def issue(pending: Pending) -> int:
    """A handle for an operation under way."""
    pending.channel.rouse()
    handle = next(_numbers)
    _pending[handle] = pending
    return handle


def poll(handle: int) -> bool:
    """Whether an operation is done; `synchronize` then returns at once.

    Raises:
        InputError: no operation has that handle, or not any more.
    """
    pending = _pending.get(handle)
    if pending is None:
        raise InputError(f"Handle {handle} was not created or has been cleared.")
    return pending.request.done


def synchronize(handle: int) -> Any:
    """Wait for an operation, and free its handle.

    Args:
        handle: what a function with `_async` in its name returned.

    Returns:
        Its tensor, or a tuple or list of them; None for a handle that is not in use, as in Horovod.

    Raises:
        HorovodInternalError: the operation failed; says which ranks asked for what, and where.
    """
    pending = _pending.pop(handle, None)
    return None if pending is None else pending.wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set have called this. Collective.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    channel = channel_of(process_set, "barrier")
    Pending(channel, Request(Meta(channel.full_name("barrier", None), "barrier"))).wait()


def join(device: int = -1) -> int:
    """This rank has no data left: until all have called this, it takes part in reductions with zeros. Collective.

    Averages still divide by the number of all ranks. Other operations than allreduce fail meanwhile.

    Args:
        device: accepted for Horovod's sake; zeros are made where the others' tensors are.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    channel = channel_of(global_process_set, "join")
    return int(Pending(channel, Request(Meta("join", "join"))).wait())
