"""Streams and events on a device that does everything at once.

A stand-in computes in the thread that asks, so all that was queued is done: waiting is over at once, and the time
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
# The number of CUDA among torch's types of device, as torch's own streams have it.
_CUDA = 1


class Stream:
    """`torch.cuda.Stream`: accepted, ordered with everything else.

    Args:
        device: the device that the stream belongs to.
        priority: kept.
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
        """Whether all is done: yes."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being recorded: no."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """An event that happens now."""
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
        enable_timing: whether `elapsed_time` may be asked.
        blocking: accepted.
        interprocess: accepted.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._is_timed = enable_timing
        self._time_s: float | None = None
        self.device = torch.device("cuda", devices.current)

    def record(self, stream: Any = None) -> None:
        """Record the event: it happens now."""
        self._time_s = time.perf_counter()
        self.device = current_stream().device if stream is None else stream.device

    def wait(self, stream: Any = None) -> None:
        """Returns at once: everything that was queued is done."""

    def query(self) -> bool:
        """Whether it has happened: whatever was recorded has."""
        return True

    def synchronize(self) -> None:
        """Returns at once: everything that was queued is done."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to another.

        Raises:
            RuntimeError: one of them was not recorded, or takes no times.
        """
        if not (self._is_timed and end_event._is_timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._time_s is None or end_event._time_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time_s - self._time_s) * 1000


class EventOfDevice(Event):
    """`torch.Event`, which begins with its device."""

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
    """The stream of this thread."""
    stream: Stream | None = getattr(_local, "stream", None)
    return default_stream(device) if stream is None or device is not None else stream


def default_stream(device: Any = None) -> Stream:
    """The default stream of a device."""
    return Stream(device)


def set_stream(stream: Stream | None) -> None:
    """Make a stream the current one of this thread."""
    if stream is not None:
        _local.stream = stream
        devices.select(stream.device_index)


def install() -> None:
    """Put these classes and functions in the place of torch's."""
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
