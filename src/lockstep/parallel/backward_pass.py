"""The backward pass of a model as a sequence of events, from the first gradient to the means over ranks.

    pre_forward      a forward pass with gradients begins
    post_forward     its outputs are known and have hooks
    pre_backward     a gradient has come to an output: does this pass average, and of which batch is it?
    on_param_grad    a gradient has come to a parameter: one of each bucket, or all of them (`watch_all`)
    post_backward    autograd's task is over: send what is left, and let the ranks meet

[Note: backward passes] The engine notices a backward pass through hooks on the outputs of the forward pass
(`forward_pass.py`, which also weights the gradients there) and asks autograd to call it back when the pass is over.
There are three cases of a backward pass that reached only some parameters:

- Other outputs, which have had no gradient yet, lead to the rest. The engine waits for their backward pass; the next
  forward pass raises an error if it did not come.
- The user has declared that parameters may be unused. The engine sends zeros for them.
- Otherwise it is a mistake, and an error in that step.

The engine ignores a pass that reaches no parameter of the model (`torch.autograd.grad`, a temporarily frozen model).

[Note: phases of a backward pass] Each arrow is a method of `PassState`:

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

abandon: the pass failed, or the pass that it waits for never came. Back to IDLE from ARMED, DEFERRED and AVERAGING,
before the next ready, accumulate or begin; from WAITING before the next ready. An accumulate leaves it WAITING.

forget: another engine has been created for the parameters. Back to IDLE from READY: from then on only a gradient at an
output begins a pass. If the previous engine is part of a reference cycle, some ranks may have freed it and others not:
an engine that claimed a parameter's gradient would average alone.

A task may run within another one (re-entrant checkpoints). The inner one abandons what the outer one began, and may
have averaged by the end of the outer one: so wait is allowed in all phases but AVERAGING, and average in all phases. A
rank that has joined (`joined.py`) averages zeros in any phase.

[Note: shared parameters] Engines with common parameters may average in the same backward pass. A gradient that one has
sent early is then a view of its bucket, where its peers write the mean as soon as they are done; the other engine would
send the mean, or keep it as this rank's gradient. So neither sends anything before the pass is over. One engine then
finishes before the other sends, and the other averages values that are equal on all ranks.

[Note: watched parameters] A backward pass may bypass the outputs and all sentinels: through the graph of a gradient, or
from a tensor that the model keeps as an attribute. So all parameters have hooks in the first passes, and keep them if
such a pass is seen, or one that may lead to it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum
from itertools import repeat
from operator import is_
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import Node

from lockstep.agreement import all_reduce_number
from lockstep.drift.engines import engines
from lockstep.errors import ModelError, UnusedParameters
from lockstep.parallel.forward_pass import ForwardPass
from lockstep.parallel.graph import begins_with_checkpoint, reachable_leaves, runs_backward_by, runs_backward_to
from lockstep.parallel.joined import Steps
from lockstep.parallel.parameter_changes import ParameterChanges
from lockstep.parallel.rank_agreement import NO_WORDS, RankAgreement
from lockstep.parallel.reducer import Reducer
from lockstep.torch_private.autograd import current_graph_task_id, current_node, queue_callback
from lockstep.torch_private.dynamo import left_out
from lockstep.torch_private.profiling import profiler_range

__all__ = ["AveragingEngine", "BackwardPass", "PassState", "Phase"]

_NO_TASK = -1  # torch's value outside backward passes
_WATCHED_PASSES = 3
_ADVICE = (
    "Use them, freeze them (requires_grad_(False)), or pass find_unused_parameters=True if a step may leave some "
    "out. If they were replaced, wrap the model again: lockstep.DistributedDataParallel(model.module)"
)
_ADVICE_FOR_STATIC_GRAPH = "static_graph=True requires that every step uses the same parameters; this one did not"
_ADVICE_FOR_OUTPUTS = (
    "They belong to outputs of the model that the loss did not use, so that step was not averaged. Return only what "
    "the loss uses, call backward() on all of it before the optimizer steps (also if a loss contains gradients, "
    "create_graph=True), or pass find_unused_parameters=True"
)


class Phase(Enum):
    """See [Note: phases of a backward pass]."""

    IDLE = "idle"  # gradients may accumulate
    READY = "ready"  # a forward pass has run, and its backward pass will average
    ARMED = "armed"  # in that backward pass; buckets may go out early
    DEFERRED = "deferred"  # in that backward pass; all buckets go out at its end
    AVERAGING = "averaging"  # after it; all buckets are out
    WAITING = "waiting"  # after an incomplete backward pass: another one brings the missing gradients


_IDLE, _READY, _ARMED, _DEFERRED, _AVERAGING, _WAITING = Phase  # a module's name is looked up faster than a class's


class PassState:
    """The phase of the current or last backward pass. Changed only by its own methods.

    They raise ModelError for a transition that the note does not show.

    Attributes:
        phase: see [Note: phases of a backward pass].
        is_accumulating: whether gradients of the last forward pass are accumulated without averaging.
        begun_task: the last of autograd's tasks that averages; -1 for none.
        num_begun: number of forward passes with gradients, and of backward passes that average, begun so far.
        awaited: indices of parameters whose gradients another backward pass must bring.
    """

    def __init__(self) -> None:
        self.phase = _IDLE
        self.is_accumulating = False
        self.begun_task = _NO_TASK
        self.num_begun = 0
        self.awaited: list[int] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a pass has begun, and neither waits for another one nor is finished."""
        phase = self.phase
        return phase is _ARMED or phase is _DEFERRED or phase is _AVERAGING

    def ready(self) -> None:
        """A forward pass begins whose backward pass averages."""
        self._go("ready", _READY, self.phase is _IDLE or self.phase is _READY)
        self.is_accumulating = False

    def accumulate(self) -> None:
        """A forward pass begins whose backward pass does not average."""
        self._go("accumulate", self.phase if self.phase is _WAITING else _IDLE, not self.is_under_way)
        self.is_accumulating = True

    def forget(self) -> None:
        """Leave gradients that bypass the outputs to another engine from now on."""
        self._go("forget", _IDLE if self.phase is _READY else self.phase, True)

    def begin(self, task: int, early: bool) -> None:
        """Gradients begin to come in a task that averages; if `early`, buckets are sent as they fill."""
        is_new = not self.is_under_way and task != self.begun_task
        self._go("begin", _ARMED if early else _DEFERRED, is_new)
        self.begun_task = task
        self.num_begun += 1

    def wait(self, awaited: list[int]) -> None:
        """The task is over, and another one over the same outputs brings the gradients of these parameters."""
        self._go("wait", _WAITING, self.phase is not _AVERAGING)
        self.awaited = awaited

    def average(self) -> None:
        """The gradients of all parameters are sent, and the ranks meet."""
        self.phase = _AVERAGING

    def finish(self) -> None:
        """The means are ready."""
        self._go("finish", _IDLE, self.phase is _AVERAGING)

    def abandon(self) -> None:
        """The results of the pass are discarded."""
        self._go("abandon", _IDLE, self.is_under_way or self.phase is _WAITING)

    def _go(self, name: str, phase: Phase, is_drawn: bool) -> None:
        if not is_drawn:
            raise ModelError(
                f"DistributedDataParallel: {name}() of a backward pass that is {self.phase.value}. Another thread "
                "used the model meanwhile: run all its forward and backward passes in one thread"
            )
        self.phase = phase


class AveragingEngine(Protocol):
    """The interface of an engine to its backward pass, which does not keep it alive."""

    find_unused_parameters: bool
    static_graph: bool

    @property
    def _reducer(self) -> Reducer:
        """Collective if it has to be created: for a copy, or after parameters were unfrozen."""

    @property
    def steps_joined(self) -> Steps | None:
        """Within `Join`, the object by which ranks agree on its steps."""

    def buffers_to_sync(self) -> list[torch.Tensor]:
        """Buffers to copy from the first rank to all ranks at the end of this step."""


class BackwardPass(PassState):
    """Handles the events of one engine's backward passes, see above. Only this class changes their state.

    Args:
        engine: the engine; held weakly, because the graph of a forward pass leads here.
        group: the ranks that average.
        device: device of small tensors in the group's collectives.
        compares_rows: whether, without a loader, ranks must have the same number of rows.

    Attributes:
        is_paused: whether gradients accumulate for now (Apex's `disable_allreduce`).
        has_filler: whether the pass includes a forward pass of a filler.
        roots: the outputs, by number, of the last forward pass that have had no backward pass yet.
    """

    def __init__(
        self, engine: AveragingEngine, group: dist.ProcessGroup, device: torch.device, compares_rows: bool = True
    ) -> None:
        super().__init__()
        self._engine = weakref.ref(engine)
        self._group, self._world_size = group, group.size()
        self._device = device
        self._compares_rows = compares_rows
        self.is_paused = self.has_filler = False
        self._reducer: Reducer | None = None
        self._seen_task = _NO_TASK  # the last task that came to an output
        self._reaches = False  # whether that task reaches parameters of the model
        self._steps_within = False  # an optimizer has stepped within a pass, and may have removed the gradients
        self._passes_to_watch = 0  # number of passes in which parameters are still watched
        # Nothing in the graph may refer to this object strongly: it would never be freed.
        self.roots: dict[int, Node] = {}
        self._static_unused: frozenset[int] | None = None  # with a static graph, unused in its first step
        self._static_any_unused = False  # whether any rank left one out; the same on all

    def set_parameters(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        changes: ParameterChanges,
        agreement: RankAgreement,
    ) -> None:
        """Set the parameters to average from now on. Local; the reducer must then be recreated.

        Args:
            parameters: the parameters that require a gradient.
            names: the parameters' names, for errors.
            changes: looks for other parameters.
            agreement: compares the ranks with each averaging.
        """
        self._parameters, self._names = parameters, names
        self._changes, self._agreement = changes, agreement
        self._own = changes.own
        self._reducer = None
        self._static_unused, self._static_any_unused = None, False

    def set_reducer(self, reducer: Reducer) -> None:
        """Set the reducer that averages gradients from now on. Local."""
        self._reducer = reducer
        self._passes_to_watch = 0
        if self._world_size > 1:
            self._passes_to_watch = _WATCHED_PASSES
            reducer.watch_all()

    def pause(self, is_paused: bool) -> None:
        """Set whether gradients accumulate from now on, which overrides the forward pass. Local."""
        self.is_paused = is_paused

    # ---- forward -------------------------------------------------------------------------------

    def pre_forward(self, syncs: bool) -> None:
        """A forward pass with gradients begins; if `syncs`, its backward pass averages. Local."""
        self.roots.clear()  # the outputs of the last one no longer matter
        self.num_begun += 1
        if self._reducer is None:
            return
        if not syncs:
            if self.is_under_way:
                self._abandon()
            self.accumulate()
            return
        if self.phase is not _IDLE and self.phase is not _READY:
            self._abandon()
        self.ready()
        if self._passes_to_watch:
            self._passes_to_watch -= 1
            if not self._passes_to_watch:
                self._reducer.watch_no_more()

    def post_forward(self, forward: ForwardPass, roots: dict[int, Node]) -> None:
        """The forward pass has these outputs, by number, which backward passes may come to. Local."""
        if forward.syncs:
            self.roots.update(roots)
        # No tensor in the output can carry a gradient: if one comes, hooks on parameters will notice.
        if not roots and forward.trains and any(parameter.requires_grad for parameter in self._parameters):
            self._watch_all()

    def _watch_all(self) -> None:
        """Notice backward passes through any parameter from now on. See [Note: watched parameters]."""
        self._passes_to_watch = 0
        self._made_reducer().watch_all()

    def _made_reducer(self) -> Reducer:
        if self._reducer is None:
            engine = self._engine()
            assert engine is not None  # its forward pass or backward pass runs
            self._reducer = engine._reducer
        return self._reducer

    # ---- backward ------------------------------------------------------------------------------

    def pre_backward(self, output: int, forward: ForwardPass) -> bool:
        """A gradient has come to the output with this number. Collective if ranks must exchange their sample counts.

        Returns:
            Whether it reaches parameters of the model.
        """
        task = current_graph_task_id()
        if task != self._seen_task:
            self._see(task, forward)
        if not self._reaches:
            self._reaches = begins_with_checkpoint(current_node(), self._own)
            if not self._reaches:
                return False
        self.roots.pop(output, None)
        if forward.feed.question is not None:
            forward.settle()
        if forward.is_filler:
            self.has_filler = True
        if forward.feed.claim and (self._compares_rows or forward.feed.share is not None):
            self._claim(forward, task)
        if forward.syncs and task != self.begun_task:
            self._begin(task)
        return True

    def _see(self, task: int, forward: ForwardPass) -> None:
        """A task comes to an output for the first time; find out whether it reaches parameters of the model."""
        reducer = self._reducer
        self._seen_task, self.has_filler = task, False
        self._reaches = reducer is not None and runs_backward_by(reducer.watched_nodes)
        if self._reaches or runs_backward_to(self._parameters):
            self._reaches = True
        elif forward.syncs and torch.is_grad_enabled():
            if forward.trains:
                forward.check_penalty()
            self._watch_all()  # a loss may follow that contains these gradients, and none of the outputs
        elif forward.syncs:
            self._changes.suspect()  # parameters may have been replaced

    def _claim(self, forward: ForwardPass, task: int) -> None:
        """Note, once for each task, which batch its gradients come from."""
        if forward.claimed_task == task:
            return
        forward.claimed_task = task
        agreement, feed = self._agreement, forward.feed
        if agreement.has_claims and all(parameter.grad is None for parameter in self._parameters):
            agreement.forget_claims()  # the earlier gradients were discarded
        share = feed.share
        if share is not None and share.world_size == self._world_size:
            agreement.claim(feed.claim, share.name, share.fingerprint)
        else:
            agreement.claim(feed.claim, "")

    def _begin(self, task: int) -> None:
        """Begin a backward pass that averages, as this task. Local."""
        if self.is_paused:
            self._agreement.gradient_accumulates()
            return
        engine = self._engine()
        reducer = self._made_reducer()
        if self.is_under_way:
            self._abandon()
        if self._averages_alone(reducer):
            self.begin(task, early=False)
        else:
            self._agreement.pass_begins()
            known = engines()
            is_alone = len(known) < 2 or not any(e is not engine and e.may_average(self._own) for e in known)
            may_go_early = reducer.begin(is_new=self.phase is not _WAITING)
            self.begin(task, early=may_go_early and is_alone)
        # Keeps the engine alive while its backward pass runs.
        queue_callback(functools.partial(self.post_backward, engine))

    def _averages_alone(self, reducer: Reducer) -> bool:
        """Whether there is no other rank to average with, and no communication hook."""
        return self._world_size == 1 and not reducer.has_hook

    def came_by(self, task: int) -> bool:
        """Whether this task came to parameters through the outputs, or averages. Local."""
        return task != _NO_TASK and task in (self._seen_task if self._reaches else _NO_TASK, self.begun_task)

    @left_out(with_what_it_calls=True)
    def on_param_grad(self, index: int, bucket: int | None = None) -> None:
        """A gradient has come to a parameter. Local.

        Args:
            index: index of the parameter.
            bucket: the bucket whose sentinel it is; None if it is merely watched.
        """
        phase, reducer = self.phase, self._reducer
        if phase is _ARMED:
            if bucket is not None and reducer is not None:
                reducer.try_bucket(bucket)
        elif phase is _READY:
            self._notice(index)
            if bucket is None and self.phase is not _READY:
                self._passes_to_watch = 0  # a reason to keep watching
        elif phase is _IDLE and bucket is not None and self._world_size > 1:
            if self.is_accumulating:
                self._agreement.gradient_accumulates()
            else:
                self._agreement.gradient_strays()

    def _notice(self, index: int) -> None:
        """Handle a gradient that bypassed the outputs: the pass belongs to another engine, or to this one."""
        engine, parameter = self._engine(), self._parameters[index]
        if not any(other is not engine and other.brings_now(parameter) for other in engines()):
            task = current_graph_task_id()
            if task != self.begun_task:
                self._begin(task)

    def step_comes_within(self) -> None:
        """An optimizer steps within the backward pass, with this rank's own gradients. Local."""
        self._steps_within = True

    # ---- after it ------------------------------------------------------------------------------

    @left_out(with_what_it_calls=True)
    def post_backward(self, engine: AveragingEngine | None) -> None:
        """Autograd's task is over. Collective, unless another task will bring missing gradients.

        Raises:
            UnusedParameters: a parameter got no gradient, and unused parameters were not allowed.
        """
        assert engine is not None
        reducer = self._made_reducer()
        gradients = [parameter.grad for parameter in self._parameters]
        none: list[int] = []
        if any(map(is_, gradients, repeat(None))):
            none = [index for index, gradient in enumerate(gradients) if gradient is None]
        frozen = {index for index in none if not self._parameters[index].requires_grad}  # frozen after wrapping
        missing = [] if self._steps_within else [index for index in none if index not in frozen]
        may_be_unused = engine.find_unused_parameters
        if self._come_later(missing, may_be_unused):
            return
        if missing or engine.static_graph:
            self._check_missing(missing, may_be_unused, engine.static_graph)
        if self._averages_alone(reducer):
            if self.is_under_way:
                self.abandon()
            self.accumulate()
            self._agreement.forget_claims()
            return
        without_graph = torch.no_grad() if torch.is_grad_enabled() else nullcontext()  # enabled with create_graph=True
        with without_graph, profiler_range("lockstep.DistributedDataParallel.reduce"):
            self.average()
            reducer.send_rest()
            unused = frozenset(frozen)
            if may_be_unused or self._static_any_unused:
                unused |= self.used_nowhere(missing)
            self._meet(engine, reducer, none, unused)

    def _meet(
        self,
        engine: AveragingEngine,
        reducer: Reducer,
        none: Sequence[int],
        unused: frozenset[int],
        trains: bool = True,
    ) -> None:
        """Average gradients over ranks, and compare the ranks' claims about the step."""
        words = self._agreement.take_words() if trains else NO_WORDS
        steps, buffers = engine.steps_joined, engine.buffers_to_sync()
        if steps is not None:  # ranks may differ
            steps.sync_buffers(buffers, trains)
            buffers, words = [], NO_WORDS
        by_rank = reducer.finish(none, unused, buffers, words)
        self.finish()
        self._agreement.compare(by_rank, words, is_first_only=reducer.has_hook or steps is not None)
        if steps is not None:
            steps.rescale(self._parameters)

    def answer_step(self, engine: AveragingEngine) -> None:
        """On a rank that has joined, take part in the averaging of those that still train. Collective."""
        reducer = self._made_reducer()
        if engine.static_graph and self._static_unused is None:
            self._settle_unused([])
        self.average()
        reducer.send_zeros()
        every = range(len(self._parameters))
        is_asked = engine.find_unused_parameters or self._static_any_unused
        unused = self.used_nowhere(every) if is_asked else frozenset[int]()
        self._meet(engine, reducer, every, unused, trains=False)

    def _abandon(self) -> None:
        """Discard the state of the last backward pass, which failed or never brought all gradients."""
        if self._reducer is not None:
            self._reducer.restart()
        self.abandon()

    # ---- parameters without a gradient ---------------------------------------------------------

    def check_awaited(self, when: str = "in the previous step") -> None:
        """Check that no gradients are awaited when another step, or an optimizer's, begins. Local.

        Args:
            when: when the awaited gradients were missed, for the error.

        Raises:
            UnusedParameters: a backward pass left gradients to another one, which was not run.
        """
        if self.awaited:
            awaited, self.awaited = self.awaited, []
            self._raise(awaited, when, _ADVICE_FOR_OUTPUTS)

    def _come_later(self, missing: list[int], may_be_unused: bool) -> bool:
        """Wait for another backward pass, if one through the remaining outputs can bring the missing gradients."""
        if missing and not may_be_unused and self.roots:
            reachable = reachable_leaves(self.roots.values())
            if any(id(self._parameters[index]) in reachable for index in missing):
                self.wait(missing)
                return True
        self.awaited = []
        self.roots.clear()  # the remaining outputs do not matter
        return False

    def _check_missing(self, missing: list[int], may_be_unused: bool, is_static: bool) -> None:
        """Check that these may be missing at the end of a step. Collective in the first step of a static graph."""
        if is_static and self._static_unused is None:
            self._settle_unused(missing)
        if not missing or may_be_unused:
            return
        if self._static_unused is None:
            self._raise(missing, "in this step", _ADVICE)
        if not self._static_unused.issuperset(missing):
            self._raise(missing, "in this step", _ADVICE_FOR_STATIC_GRAPH)

    def _settle_unused(self, missing: Sequence[int]) -> None:
        """Note which parameters a static graph does not use here, and whether any rank leaves some out. Collective."""
        self._static_unused = frozenset(missing)
        any_missing = all_reduce_number(bool(missing), dist.ReduceOp.MAX, self._group, self._device)
        self._static_any_unused = bool(any_missing)

    def used_nowhere(self, missing: Sequence[int]) -> frozenset[int]:
        """Parameters for which no rank has a gradient; `missing` are those without one on this rank. Collective."""
        used = torch.ones(len(self._names), dtype=torch.uint8, device=self._device)
        if missing:
            used[list(missing)] = 0
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        # A rank that has used all of them knows the answer without waiting for a GPU.
        return frozenset((used == 0).nonzero().flatten().tolist()) if missing else frozenset()

    def _raise(self, indices: list[int], when: str, advice: str) -> NoReturn:
        names = [self._names[index] for index in indices]
        listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        raise UnusedParameters(
            f"{len(names)} parameter(s) got no gradient on rank {dist.get_rank()} {when}: {listed}. {advice}"
        )
