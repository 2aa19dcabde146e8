"""Streams and events on a device that does everything synchronously.

A stand-in computes in the calling thread, so all queued work is always done: waiting returns at once, and the time
between two events is the time that passed between recording them.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

import torch

from lockstep.tools.rehearse.devices.naming import devices
from lockstep.tools.rehearse.patching import replace

__all__ = [
    "Event",
    "EventOfDevice",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "install",
    "set_stream",
]

_local = threading.local()
# `device_type` of torch's own streams for CUDA.
_CUDA = 1


class Stream:
    """`torch.cuda.Stream`, on which everything has already run.

    Args:
        device: the device that the stream belongs to; None for the current one.
        priority: stored, without effect.
    """

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", devices.cuda_index(device))
        self.device_index = self.device.index
        self.priority = priority
        self.stream_id = self.cuda_stream = 0
        self.device_type = _CUDA

    def wait_event(self, event: Any) -> None:
        """Returns at once: everything that was queued is done."""

    def wait_stream(self, stream: Any) -> None:
        """Returns at once: everything that was queued is done."""

    def synchronize(self) -> None:
        """Returns at once: everything that was queued is done."""

    def query(self) -> bool:
        """Whether all queued work is done: always True."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being recorded: always False."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event now, and return it; creates one if None."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before = (current_stream(), devices.current)
        set_stream(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _local.stream = self._before[0]
        devices.select(self._before[1])


class Event:
    """`torch.cuda.Event`, with real times.

    Args:
        enable_timing: whether `elapsed_time` may be called.
        blocking: ignored.
        interprocess: ignored.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._is_timed = enable_timing
        self._time_s: float | None = None
        self.device = torch.device("cuda", devices.current)

    def record(self, stream: Any = None) -> None:
        """Record the event; it completes immediately."""
        self._time_s = time.perf_counter()
        self.device = current_stream().device if stream is None else stream.device

    def wait(self, stream: Any = None) -> None:
        """Returns at once: everything that was queued is done."""

    def query(self) -> bool:
        """Whether the recorded work is done: always True."""
        return True

    def synchronize(self) -> None:
        """Returns at once: everything that was queued is done."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to another.

        Raises:
            RuntimeError: one of them was not recorded, or was created without `enable_timing`.
        """
        if not (self._is_timed and end_event._is_timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._time_s is None or end_event._time_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time_s - self._time_s) * 1000


class EventOfDevice(Event):
    """`torch.Event`, whose first argument is the device."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **kwargs: Any) -> None:
        super().__init__(enable_timing)
        self.device = torch.device("cuda", devices.cuda_index(device))


class StreamContext:
    """`torch.cuda.stream(s)`; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> Stream | None:
        return None if self.stream is None else self.stream.__enter__()

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, tb)


def current_stream(device: Any = None) -> Stream:
    """The current stream of this thread; given a device, that device's default stream."""
    stream: Stream | None = getattr(_local, "stream", None)
    return default_stream(device) if stream is None or device is not None else stream


def default_stream(device: Any = None) -> Stream:
    """The default stream of a device."""
    return Stream(device)


def set_stream(stream: Stream | None) -> None:
    """Make `stream` the current stream of this thread, and its device the current device; None changes nothing."""
    if stream is not None:
        _local.stream = stream
        devices.select(stream.device_index)


def install() -> None:
    """Replace torch's classes and functions by these."""
    for owner in (torch.cuda, torch.cuda.streams):
        for cls in (Stream, Event):
            replace(owner, cls.__name__, cls)
    replace(torch, "Stream", Stream)
    replace(torch, "Event", EventOfDevice)
    for name, value in (
        ("StreamContext", StreamContext),
        ("stream", StreamContext),
        ("current_stream", current_stream),
        ("default_stream", default_stream),
        ("set_stream", set_stream),
    ):
        replace(torch.cuda, name, value)
