"""An operation requested by this rank, from submission to completion."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.comm.callsite import call_site, site_text
from lockstep.compat.horovod.torch.meta import Entry, Meta

__all__ = ["Request"]


class Request:
    """An operation of this rank, which the channel of its process set completes.

    Args:
        meta: its description for other ranks.
        inputs: contiguous tensors.
        outputs: outputs of a reduction or broadcast, one per input; may be the inputs. None for operations
            whose result size depends on other ranks.
        is_single: whether the result is one tensor rather than a list.
        run_fused: runs the whole request instead, if no rank has joined; for `Meta.fused`.
        unfuse: returns the tensors to reduce in place if `run_fused` cannot be used.
        is_ready: whether `run_fused` may be tried before the ranks have agreed: it then detects, with all
            of them, if requests differ (CollectiveMismatch).

    Attributes:
        result: the return value of `synchronize`, once done.
        error: the exception to raise instead.
        done: whether it has succeeded or failed. Set last.
        submitted_s: time of submission, by `time.perf_counter`.
    """

    def __init__(
        self,
        meta: Meta,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] | None = None,
        is_single: bool = True,
        run_fused: Callable[[], None] | None = None,
        unfuse: Callable[[], list[Any]] | None = None,
        is_ready: bool = False,
    ) -> None:
        self.meta = meta
        self.inputs = list(inputs)
        self.outputs = None if outputs is None else list(outputs)
        self.is_single = is_single
        self.run_fused = run_fused
        self.unfuse = unfuse
        self.is_ready = is_ready
        self.site = call_site()
        self.submitted_s = time.perf_counter()
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        # Events of pending GPU work on the inputs, and later on the results.
        self._ready = _record_events(self.inputs)
        self._finished: list[Any] = []

    @functools.cached_property
    def entry(self) -> Entry:
        """The description of the request for other ranks."""
        return Entry(self.meta, site_text(self.site))

    def wait_for_inputs(self) -> None:
        """Make this thread's GPU streams wait for work queued on the caller's streams. Local."""
        for event in self._ready:
            torch.cuda.current_stream(event.device).wait_event(event)

    def complete(self, tensors: Sequence[torch.Tensor] = (), result: Any = None) -> None:
        """Note that the operation has succeeded. Local."""
        self._finished = _record_events(tensors)
        if result is not None:
            self.result = result
        elif tensors:
            self.result = tensors[0] if self.is_single else list(tensors)
        self.done = True

    def fail(self, error: BaseException) -> None:
        """Note that the operation has failed. Local."""
        self.error = error
        self.done = True

    def take(self) -> Any:
        """Return the result, or raise the error, of a completed request. Local.

        Raises:
            HorovodInternalError: it failed.
        """
        if self.error is not None:
            raise self.error
        for event in self._finished:
            torch.cuda.current_stream(event.device).wait_event(event)
        return self.result


def _record_events(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """An event on the current stream of every GPU with one of the tensors."""
    events: list[Any] = []
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return events
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        with torch.cuda.device(device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        events.append(event)
    return events
