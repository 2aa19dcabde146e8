"""The backward pass of a model: which of autograd's tasks it is, where it began, how far it is, and what is pending.

[Note: phases of a backward pass] Each arrow is a method of `BackwardPass`:

           ready: a forward pass begins whose backward pass averages
    ┌────► IDLE ───────────────────────────────────────────────► READY
    │       │ ▲                                                    │ │
    │       │ └─── accumulate: one whose backward pass does not ───┘ │
    │       └───────────────────────────┬────────────────────────────┘
    │                                   │ begin: a gradient comes to an output, or to a parameter
    │                  ┌────────────────┴────────────────┐
    │                  │ every `.grad` was None          │ otherwise        ◄─────────────────┐
    │                ARMED                            DEFERRED                               │
    │                  └────────────────┬────────────────┘                                   │
    │                                   │ autograd's task is over                            │
    │                  ┌────────────────┴────────────────┐                                   │
    │ finish: the      │ average: it brought all         │ wait: another task brings         │ begin
    │ means are there  ▼                                 ▼ what is missing                   │ (to either)
    └────────────── AVERAGING                         WAITING ───────────────────────────────┘

abandon: the pass failed, or what it waits for never came. Back to IDLE from ARMED, DEFERRED and AVERAGING, before the
next ready, accumulate or begin; from WAITING before the next ready. An accumulate leaves it WAITING.

A task may run within another one (re-entrant checkpoints). The inner one abandons what the outer one began, and may
have averaged when the outer one is over: so a wait comes in all phases but AVERAGING, and an average in all phases. A
rank that has joined (`joined.py`) averages zeros, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from torch.autograd.graph import Node

from lockstep.errors import ModelError

__all__ = ["BackwardPass", "Phase"]


class Phase(Enum):
    """See [Note: phases of a backward pass]."""

    IDLE = "idle"  # gradients may accumulate
    READY = "ready"  # a forward pass has been whose backward pass will average
    ARMED = "armed"  # in that backward pass; buckets may go out early
    DEFERRED = "deferred"  # in that backward pass; all buckets go out at its end
    AVERAGING = "averaging"  # behind it; all buckets are out
    WAITING = "waiting"  # behind a backward pass that was not all: another one brings the missing gradients


_NO_TASK = -1  # what torch says outside of backward passes
_UNDER_WAY = frozenset({Phase.ARMED, Phase.DEFERRED, Phase.AVERAGING})


class BackwardPass:
    """The backward pass that runs, or that ran last. An engine and its reducer share one. Local.

    ready, accumulate, begin, wait, average, finish and abandon move it, and raise ModelError where the note does not
    draw that.

    Attributes:
        phase: see [Note: phases of a backward pass]. No property, because hooks of parameters read it; set here alone.
        is_accumulating: gradients of the last forward pass are not to be averaged.
        seen_task: the last of autograd's tasks that came to an output; -1 for none.
        reaches: whether that task goes on to parameters of the model.
        has_filler: it is of a forward pass whose samples count nothing, among others.
        begun_task: the last task that averages.
        roots: of the last forward pass that may have a backward pass, the outputs that none has come to yet, by
            number. Nothing in the graph may hold this object: it would never be freed.
        awaited: indices of parameters that a backward pass left to another one.
        num_begun: forward passes with gradients, and backward passes that average, that have begun so far.
        steps_within: an optimizer has stepped within a backward pass, and may have taken the gradients away.
    """

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.is_accumulating = self.reaches = self.has_filler = False
        self.seen_task = self.begun_task = _NO_TASK
        self.roots: dict[int, Node] = {}
        self.awaited: list[int] = []
        self.num_begun = 0
        self.steps_within = False

    @property
    def is_under_way(self) -> bool:
        """Whether a pass has begun that neither waits for another one nor is finished."""
        return self.phase in _UNDER_WAY

    def ready(self) -> None:
        """A forward pass begins whose backward pass averages."""
        self._go("ready", Phase.READY, self.phase in (Phase.IDLE, Phase.READY))
        self.is_accumulating = False

    def accumulate(self) -> None:
        """A forward pass begins whose backward pass does not average."""
        self._go("accumulate", self.phase if self.phase is Phase.WAITING else Phase.IDLE, not self.is_under_way)
        self.is_accumulating = True

    def begin(self, task: int, early: bool) -> None:
        """Gradients begin to come in a task that averages; `early`: buckets go out as they fill."""
        is_new = not self.is_under_way and task != self.begun_task
        self._go("begin", Phase.ARMED if early else Phase.DEFERRED, is_new)
        self.begun_task = task
        self.num_begun += 1

    def wait(self, awaited: list[int]) -> None:
        """The task is over, and another one over the same outputs brings the gradients of these parameters."""
        self._go("wait", Phase.WAITING, self.phase is not Phase.AVERAGING)
        self.awaited = awaited

    def average(self) -> None:
        """The gradients of all parameters go out, and the ranks meet."""
        self.phase = Phase.AVERAGING

    def finish(self) -> None:
        """The means are there."""
        self._go("finish", Phase.IDLE, self.phase is Phase.AVERAGING)

    def abandon(self) -> None:
        """What the pass left is void."""
        self._go("abandon", Phase.IDLE, self.is_under_way or self.phase is Phase.WAITING)

    def _go(self, name: str, phase: Phase, is_drawn: bool) -> None:
        if not is_drawn:
            raise ModelError(
                f"DistributedDataParallel: {name}() of a backward pass that is {self.phase.value}. Another thread used "
                "the model meanwhile: let one thread make all its forward and backward passes"
            )
        self.phase = phase

    def forward_begins(self) -> None:
        """Another forward pass begins: the outputs of the last one do not matter any more."""
        self.roots.clear()
        self.num_begun += 1

    def see(self, task: int, reaches: bool) -> None:
        """A task has come to an output; whether it goes on to parameters of the model."""
        self.seen_task, self.reaches, self.has_filler = task, reaches, False

    def came_by(self, task: int) -> bool:
        """Whether this task came to parameters by the outputs, or averages."""
        return task in (self.seen_task if self.reaches else _NO_TASK, self.begun_task)

    def expect(self, roots: Mapping[int, Node]) -> None:
        """A forward pass has these outputs, by number: backward passes may come to them."""
        self.roots.update(roots)

    def reach(self, output: int) -> None:
        """A backward pass has come to that output."""
        self.roots.pop(output, None)

    def forget_outputs(self) -> None:
        """None of the outputs left matters."""
        self.roots.clear()

    def take_awaited(self) -> list[int]:
        """What was awaited, and is not any more."""
        awaited, self.awaited = self.awaited, []
        return awaited
