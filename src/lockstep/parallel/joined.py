"""Training while ranks run out of batches at different times: the engine's side of torch's `Join`.

A rank that still trains and one that has joined call the same collectives in the same order, once per step:

====================================  =====================================
training: `DistributedDataParallel`   joined: `JoinedRank.main_hook`
====================================  =====================================
`Join.notify_join_context`            `Join` itself
`agree_on_step` before the forward    `agree_on_step`, with no rows
backward: the gradients               zeros
backward: who uses which parameter    the same, using none
backward: `sync_buffers`              `sync_buffers`, having none to give
====================================  =====================================

[Note: rows of a step] Ranks that train may have any numbers of rows, which they add up before each forward pass. If T
ranks train, and rank r has n_r of their n rows, its weight is n_r·T/n: so the mean over the training ranks is the mean
over all rows. Divided by all W ranks, as torch's `Join` does by default, it is T/W of that.

A joined rank's answers go through `.grad`, where an optimizer that has also joined (`ZeroRedundancyOptimizer`) finds
the means for its step. In the end each parameter gets back the gradient that it had when the rank joined: the next
backward pass may run before gradients are set to zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from lockstep.agreement import all_reduce_number, broadcast_tensors
from lockstep.batch.share import BatchShare
from lockstep.errors import InputError
from lockstep.parallel.checks import named_tensors
from lockstep.torch_private.groups import join_config_of, tell_join_config

__all__ = ["JoinableEngine", "JoinedRank", "RepeatableJoin", "Steps"]


class JoinableEngine(Protocol):
    """The interface of an engine to `Join`."""

    module: torch.nn.Module
    process_group: dist.ProcessGroup
    device: torch.device
    broadcast_buffers: bool

    def answer_step(self) -> None:
        """Take part in one step of the ranks that still train. Collective."""


class Steps:
    """An engine's steps within `Join`, apart from the gradients themselves.

    Attributes:
        divides_by_all: whether to divide gradients by all ranks, and not by those that still train.
        share: this rank's share of the rows in the step that ranks agreed on last.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._num_training = group.size()
        self.divides_by_all = True
        self.share = BatchShare(1, 1, 1)

    def agree_on_step(self, trains: bool, averages: bool, rows: int) -> bool:
        """Whether this step averages gradients on any rank. Collective.

        Args:
            trains: whether this rank still trains.
            averages: whether it averages in the backward pass.
            rows: this rank's number of rows; see [Note: rows of a step].

        Raises:
            InputError: on all ranks, if none has any rows.
        """
        state = torch.tensor([int(trains), int(averages), rows], dtype=torch.int64, device=self._device)
        dist.all_reduce(state, group=self._group)
        self._num_training, num_averaging, num_rows = state.tolist()
        if not num_rows and self._group.size() > 1:
            raise InputError("join: no rank that still trains has a row in this forward pass")
        self.share = BatchShare(rows, max(num_rows, 1), self._num_training, rows=rows)
        return bool(num_averaging > 0)

    def rescale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Convert gradients divided by all ranks to be divided by those that train, if requested. Local."""
        if self.divides_by_all:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._group.size() / self._num_training)

    def sync_buffers(self, buffers: Sequence[torch.Tensor], trains: bool) -> None:
        """Copy the buffers of the last rank that still trains to all ranks. Collective, unless there are none."""
        if buffers:
            own = self._group.rank() if trains else -1
            last = all_reduce_number(own, dist.ReduceOp.MAX, self._group, self._device)
            broadcast_tensors(buffers, self._group, last)


class JoinedRank(JoinHook):
    """Answers an engine's collectives on a rank that has run out of batches."""

    def __init__(self, engine: JoinableEngine, ignored: frozenset[str]) -> None:
        super().__init__()
        self._engine, self._ignored = engine, ignored
        self._own: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []  # gradients from before the first answer

    def main_hook(self) -> None:
        """Answer one step of the others."""
        if not self._own:  # copied: the gradient may be a view of the engine's memory, which it writes to
            pairs = ((parameter, parameter.grad) for parameter in self._engine.module.parameters())
            self._own = [(parameter, None if grad is None else grad.detach().clone()) for parameter, grad in pairs]
        self._engine.answer_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """When all have joined, copy the state that the engine keeps equal from the last rank that trained to all."""
        for parameter, gradient in self._own:
            parameter.grad = gradient
        self._own.clear()
        engine, group = self._engine, self._engine.process_group
        last = all_reduce_number(group.rank() if is_last_joiner else -1, dist.ReduceOp.MAX, group, engine.device)
        tensors = named_tensors(engine.module, self._ignored, engine.broadcast_buffers)
        broadcast_tensors([tensor.detach() for tensor in tensors.values()], group, last)
        # `Join` leaves it enabled: later steps would run as if within it, without the checks that it excludes.
        tell_join_config(engine, join_config_of(engine)._replace(enable=False))


class RepeatableJoin(Join):
    """The context of one engine, which may be entered repeatedly."""

    def __init__(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__([engine], *args, **kwargs)
        self._engine, self._config = engine, join_config_of(engine)

    def __enter__(self) -> None:
        tell_join_config(self._engine, self._config)
