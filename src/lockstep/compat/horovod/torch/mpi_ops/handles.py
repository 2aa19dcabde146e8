"""Handles of pending operations, and checks that all operations share."""

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
    """A pending operation. Its constructor submits the request. Local.

    Args:
        channel: channel of the operation's process set.
        request: this rank's request.
        finish: computes the return value of `synchronize` from the request's result; None for the result itself.

    Raises:
        InputError: a request of that name is pending.
    """

    def __init__(self, channel: Channel, request: Request, finish: Callable[[Any], Any] | None = None) -> None:
        self.channel = channel
        self.request = channel.submit(request)
        self.finish = finish

    def wait(self) -> Any:
        """Wait for the result. Raises HorovodInternalError if it failed."""
        self.channel.wait(self.request)
        result = self.request.take()
        return result if self.finish is None else self.finish(result)


_numbers = itertools.count()
_pending: dict[int, Pending] = {}


def channel_of(process_set: ProcessSet, operation: str) -> Channel:
    """The channel of a process set.

    Raises:
        NotInitializedError: before `init`.
        InputError: the set is not registered, or this rank is not in it.
    """
    opened = runtime.current()
    set_id = process_set.process_set_id
    return opened.channel(-1 if set_id is None else set_id, operation.capitalize())


def check_tensors(tensors: Sequence[torch.Tensor], operation: str) -> list[torch.Tensor]:
    """Check and detach the inputs of an operation.

    Raises:
        InputError: there are no tensors, or one is of an unsupported type or not contiguous.
    """
    if len(tensors) == 0:
        raise InputError(f"{operation}: the list of tensors is empty; expected at least one")
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
    """Create a handle for a pending operation."""
    pending.channel.rouse()
    handle = next(_numbers)
    _pending[handle] = pending
    return handle


def poll(handle: int) -> bool:
    """Whether an operation is done; `synchronize` then returns at once.

    Raises:
        InputError: the handle is not in use.
    """
    pending = _pending.get(handle)
    if pending is None:
        raise InputError(f"Handle {handle} was not created or has been cleared.")
    return pending.request.done


def synchronize(handle: int) -> Any:
    """Wait for an operation, and free its handle.

    Args:
        handle: a handle returned by an `_async` function.

    Returns:
        The result, a tensor or a tuple or list of tensors; None if the handle is not in use, as in Horovod.

    Raises:
        HorovodInternalError: the operation failed; names the ranks, their operations and lines.
    """
    pending = _pending.pop(handle, None)
    return None if pending is None else pending.wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set have called this. Collective.

    Raises:
        HorovodInternalError: a rank was lost.
    """
    channel = channel_of(process_set, "barrier")
    Pending(channel, Request(Meta(channel.full_name("barrier", None), "barrier"))).wait()


def join(device: int = -1) -> int:
    """Call when this rank has no data left: it contributes zeros to reductions until all ranks have joined. Collective.

    Averages still divide by the number of all ranks. Operations other than allreduce fail until then.

    Args:
        device: ignored, for compatibility; zeros are created on the device of the others' tensors.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: a rank was lost.
    """
    channel = channel_of(global_process_set, "join")
    return int(Pending(channel, Request(Meta("join", "join"))).wait())
