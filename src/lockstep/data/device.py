"""Batches on the device before the loop asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from lockstep.errors import DataError
from lockstep.torch_private.tensors import indices_of, values_of
from lockstep.tree import move_tensors, tensors_in

__all__ = ["DeviceIterator", "check_device", "dense_parts"]


def check_device(device: torch.device | str | int | None, prefetch: int) -> torch.device | None:
    """The device that batches are moved to; None leaves them where they are.

    Raises:
        DataError: no such device, or `prefetch` without one.
    """
    if device is None:
        if prefetch != 1:
            raise DataError(f"prefetch={prefetch} counts batches copied to a device ahead of time; pass device, too")
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DataError(f"device is {device!r}, which torch does not know: {str(error).splitlines()[0]}") from None


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with memory of their own that a sparse or nested tensor is made of; a strided one itself."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return (tensor.values(),)
    if tensor.is_nested:
        jagged: Any = tensor
        parts = (jagged.values(), jagged.offsets(), jagged.lengths())
        return tuple(part for part in parts if part is not None)
    if tensor.layout is torch.sparse_coo:
        return indices_of(tensor), values_of(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


class DeviceIterator(Iterator[Any]):
    """Moves batches to a device; to a GPU on a stream of its own, some batches ahead of the loop.

    An exception of a batch fetched ahead comes in that batch's turn.

    Args:
        prefetch: batches that are fetched and copied ahead; 0 copies each when it is asked for. Only a GPU
            copies beside the loop: on other devices nothing is fetched ahead.
    """

    def __init__(self, batches: Iterator[Any], device: torch.device, prefetch: int) -> None:
        self._batches = batches
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._depth = prefetch if self._stream is not None else 0
        # What is ready: a batch and the event behind its copy, or the exception that came instead of it.
        self._ready: deque[tuple[Any, torch.cuda.Event | None] | BaseException] = deque()
        self._is_over = False

    def __next__(self) -> Any:
        while len(self._ready) <= self._depth and not self._is_over:
            self._fetch()
        if not self._ready:
            raise StopIteration
        entry = self._ready.popleft()
        if isinstance(entry, BaseException):
            raise entry
        batch, event = entry
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for tensor in tensors_in(batch):
                for part in dense_parts(tensor):
                    part.record_stream(stream)  # else its memory could be given away while this stream still reads it
        return batch

    def _fetch(self) -> None:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_over = True
            return
        except Exception as error:
            self._ready.append(error)
            return
        if self._stream is None:
            self._ready.append((move_tensors(batch, self._device), None))
            return
        with torch.cuda.stream(self._stream):
            moved = move_tensors(batch, self._device, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._ready.append((moved, event))
