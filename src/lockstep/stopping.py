"""Signals that tell a job to stop, turned into a request that all ranks see at the same step.

A scheduler sends a job a signal and kills it soon after: Slurm before the time limit or for another job, `docker stop`,
Kubernetes when it drains a node. The signal may reach one rank, all of them, or their launcher. A rank that stopped on
its own would leave the others waiting in a collective, and one that is interrupted in the middle of a step has no
consistent state to save. So the signal only sets a flag, and `World.should_stop` combines the flags of all ranks.

No signal is caught before a script asks for it, and the previous handlers are restored when the world is left.

[Note: children] A forked child inherits the handler. It is not a rank, and a signal to it means that it should end: so
in a child the handler restores the previous handler and sends the signal again.

[Note: answers on a GPU] A host that reads a number from a GPU waits for all work that it has queued there. So if the
group only takes GPU tensors, the answer is copied to the host asynchronously and read by the next call: one step later,
on all ranks alike, and without waiting.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType

import torch
import torch.distributed as dist

from lockstep.agreement import collective_device
from lockstep.errors import InputError, SetupError
from lockstep.log import get_logger
from lockstep.rank_status import note_stopping

__all__ = ["DEFAULT_SIGNALS", "StopSignals", "signals_for_ranks"]

DEFAULT_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
_NOT_TO_CATCH = frozenset(getattr(signal, name) for name in ("SIGKILL", "SIGSTOP") if hasattr(signal, name))
# Signals caught by any world of this process, and Ctrl-C, which a terminal sends to every process of a job.
_for_ranks = {signal.SIGINT, *DEFAULT_SIGNALS}


def signals_for_ranks() -> frozenset[signal.Signals]:
    """Signals meant for ranks, and not for the worker processes, to which a scheduler sends them as well. Local."""
    return frozenset(_for_ranks)


class StopSignals:
    """The stop signals that one world has received. Used from the main thread, except for `should_stop`.

    Attributes:
        is_catching: whether a signal sets the flag.
    """

    def __init__(self) -> None:
        self.is_catching = False
        self._pid = os.getpid()
        self._heard = 0  # the latest signal's number
        self._agreed = False
        self._answer: _Answer | None = None
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def catch(self, numbers: Iterable[int]) -> None:
        """Let these signals set the flag, instead of those chosen before. Local.

        Raises:
            InputError: one of them is not a signal, or cannot be caught.
            SetupError: this is not the main thread, or no signal is named.
        """
        try:
            chosen = {signal.Signals(number) for number in numbers}
        except ValueError as error:
            raise InputError(f"world.stop_on: {error}; give signals, such as signal.SIGTERM") from None
        if not chosen or chosen & _NOT_TO_CATCH:
            raise InputError(
                "world.stop_on: expected signals that can be caught: not SIGKILL, not SIGSTOP, at least one"
            )
        if threading.current_thread() is not threading.main_thread():
            raise SetupError(
                "Python catches signals in the main thread only: call world.stop_on(signal.SIGTERM, signal.SIGUSR1) "
                "there, before another thread asks world.should_stop()"
            )
        self.release()
        for number in sorted(chosen):
            # None: a handler that Python did not install and could not restore. Ignored signals stay ignored (`nohup`).
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, self._hear)
        self.is_catching = True
        _for_ranks.update(chosen)
        note_stopping()

    def release(self) -> None:
        """Restore the previous handlers, except where another one has been installed since. Local."""
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._pid:
            for number, handler in self._previous.items():
                if signal.getsignal(number) == self._hear:
                    signal.signal(number, handler)
        self._previous.clear()
        self.is_catching = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(signal.Signals(number), signal.SIG_DFL)
        if os.getpid() != self._pid:  # see [Note: children]
            signal.signal(number, previous)
            os.kill(os.getpid(), number)
            return
        is_second, self._heard = bool(self._heard), number
        if callable(previous) and (previous is not signal.default_int_handler or is_second):
            previous(number, frame)

    def should_stop(self) -> bool:
        """See `World.should_stop`. Collective."""
        if not self.is_catching:
            self.catch(DEFAULT_SIGNALS)
        if self._agreed:
            return True
        device = collective_device()
        latest = torch.full((), self._heard, dtype=torch.int32, device=device)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        if device.type == "cpu":
            number = int(latest.item())
        else:  # see [Note: answers on a GPU]
            before, self._answer = self._answer, _Answer(latest)
            number = 0 if before is None else before.read()
        if number:
            self._agreed = True
            if dist.get_rank() == 0:
                get_logger(__name__).warning("%s: all ranks stop after this step", signal.Signals(number).name)
        return self._agreed


class _Answer:
    """A number on its way from a GPU to the host."""

    def __init__(self, number: torch.Tensor) -> None:
        self._event = torch.cuda.Event() if number.is_cuda else None  # type: ignore[no-untyped-call]
        self._number = number
        if self._event is not None:
            self._number = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event.record()

    def read(self) -> int:
        """Wait for the number, but not for work queued after it."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._number.item())
