"""Copies GPU tensors to host memory and back, for groups that only move host memory.

[Note: staging] A GPU tensor is copied to pinned host memory, moved there like any other tensor, and copied back. A call
waits for its copies before it finishes, and leaves nothing queued on the GPU. So all work that the caller queues after
it sees the result, on any stream, and no memory of the tensor has to be kept for a stream. A call in another thread
runs on a separate stream, after an event in the caller's stream, so it sees all work that the caller queued before the
call. It does not wait for the caller's stream itself, which keeps computing meanwhile.

Staging is meant for occasional tensors, and for ranks that share one GPU, which NCCL refuses. Between GPUs NCCL is
faster: "cpu:lockstep,cuda:nccl", or `lockstep.init()`, which chooses it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lockstep.errors import InputError

__all__ = ["behind_caller", "cuda_devices", "host_memory", "is_capturing", "mark_now"]

_local = threading.local()


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of this device is being recorded as a CUDA graph. Local."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def host_memory(tensor: torch.Tensor, is_read: bool) -> torch.Tensor:
    """Allocate contiguous pinned host memory for a GPU tensor.

    Args:
        tensor: GPU tensor of any shape and dtype.
        is_read: whether to fill it with the tensor's values, once the current stream has computed them.

    Raises:
        InputError: the stream is being recorded as a CUDA graph.
    """
    if is_capturing(tensor.device):
        raise InputError(
            "a lockstep group copies tensors of a GPU through memory of the host, which a CUDA graph cannot record; "
            "use nccl inside of graphs"
        )
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    return host.copy_(tensor) if is_read else host


def cuda_devices(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The GPUs on which these tensors lie."""
    return sorted({tensor.device for tensor in tensors if not tensor.is_cpu}, key=str)


def mark_now(device: torch.device) -> Any:
    """An event after everything that this thread has queued on its stream of that GPU."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def behind_caller(tensors: Iterable[torch.Tensor], call: Callable[[], None]) -> Callable[[], None]:
    """`call` for another thread, ordered after what this thread has queued on the GPUs of these tensors.

    Returns:
        `call` itself if no tensor is on a GPU.
    """
    events = [(device, mark_now(device)) for device in cuda_devices(tensors)]
    for device, event in events:
        call = _behind(device, event, call)
    return call


def _behind(device: torch.device, event: Any, call: Callable[[], None]) -> Callable[[], None]:
    def ordered() -> None:
        stream = _own_stream(device)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            call()

    return ordered


def _own_stream(device: torch.device) -> Any:
    """A stream that only this thread uses."""
    streams: dict[torch.device, Any] = _local.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]
