"""Hooks on what enters and leaves one forward pass, so that its backward pass is noticed and weighted exactly.

[Note: exact weighting] Rank r holds n_r of the n samples of a global batch and computes the mean over its n_r. The
gradient of the mean over all n is the mean over ranks of the local gradients times the weight n_r * W / n. The weight
goes onto the gradient that enters the model at its outputs: so it is exact for every micro-batch of an
accumulation, does not touch terms of the loss that do not depend on the batch, and costs nothing when it
is 1, as with all batches that divide evenly.

[Note: weighted once] A path from the loss to a parameter may pass several such places: outputs computed
from each other, a tensor returned twice, or two engines in a row (a decoder behind an encoder). So where there are
several outputs each gets a copy of its own, and inputs that require a gradient take the weight off again. Only a pass
that accumulates into parameters of the model is weighted: `torch.autograd.grad` gives what it gives without an engine.

[Note: found by a loss] `lockstep.mean` and the like (`losses.py`) take the weight off again for their part of a loss.
They find the forward passes that a loss comes from by marks on the outputs' nodes in the graph
(`lockstep/batch/graph.py`).

These hooks do not see a gradient that reaches the parameters by another way, such as from a tensor that the model keeps
as an attribute. It gets no weight, as outside a loader. A gradient through the graph of a gradient
(`create_graph=True`) would get none either; it raises ModelError where the ranks do not divide the batch: when it is
computed, in evaluation mode when a loss goes back through that graph to parameters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import Node

from lockstep import batch
from lockstep.errors import ModelError
from lockstep.parallel.feeding import Feed
from lockstep.torch_private.autograd import base_of, current_graph_task_id, without_transforms
from lockstep.torch_private.dynamo import left_out
from lockstep.tree import map_tensors, tensors_in

__all__ = ["ForwardPass"]

_next_number = itertools.count().__next__


class _Passes(Protocol):
    def pre_backward(self, output: int, forward: ForwardPass) -> bool:
        """A gradient has come to an output; whether it reaches parameters of the model."""


class ForwardPass:
    """One forward pass of an engine.

    Args:
        feed: what goes through, and so the weight for the gradients that enter at its outputs; see [Note: exact
            weighting].
        syncs: whether its backward pass averages gradients.
        group: whose ranks average.
        backward: a weak reference to what is asked where a gradient has come to an output. Weak, because the engine
            keeps the graph's roots, and a cycle through the graph is never freed.
        own: `id` of the parameters that the engine averages.
        is_functional: it runs inside of `torch.func.grad` or the like, with other parameters than the model's.
        trains: the model is in training mode.

    Attributes:
        feed: what goes through; with a weight from `settle` on.
        is_plain: nothing is to be weighted.
        is_filler: nothing that this rank computes counts.
        trains: the model is in training mode.
        claimed_task: the last backward pass for which it was noted what the gradients are of.
    """

    def __init__(
        self,
        feed: Feed,
        syncs: bool,
        group: dist.ProcessGroup,
        backward: Callable[[], _Passes | None],
        own: frozenset[int] = frozenset(),
        is_functional: bool = False,
        trains: bool = True,
    ) -> None:
        self._set_feed(feed)
        self.syncs = syncs
        self.group = group
        self.trains = trains
        self.claimed_task = -1
        self._backward = backward
        self._own = own
        self._is_functional = is_functional
        self._weighted_task = -1  # the last backward pass in which the weight was put on

    @property
    def has_weighted(self) -> bool:
        """Whether the backward pass under way has come by the outputs, where gradients get their weight."""
        return self._weighted_task == current_graph_task_id()

    def settle(self) -> float:
        """The weight; asks the other ranks for what it depends on, if that was not done. Collective then.

        Raises:
            InputError: how many samples the forward pass holds cannot be told.
        """
        self._set_feed(self.feed.settled())
        return self.feed.weight

    def _set_feed(self, feed: Feed) -> None:
        self.feed = feed
        is_known = feed.question is None
        self.is_plain, self.is_filler = is_known and feed.weight == 1.0, is_known and feed.weight == 0.0

    def check_penalty(self) -> None:
        """A gradient is computed with a graph of its own, and does not reach parameters. Collective, as `settle`.

        Raises:
            ModelError: the ranks do not divide the batch, and what a loss makes of the gradient would count plainly.
        """
        if self._is_functional:  # `torch.func.grad` computes all its gradients with a graph
            return
        with without_transforms():  # the ranks exchange plain tensors
            self.settle()
        if not self.is_plain:
            raise ModelError(
                "a gradient with a graph of its own (create_graph=True, as for a gradient penalty), of a batch that "
                "the ranks do not divide: what a loss makes of it would count once for each rank, not for each "
                "sample. Compute the gradient in forward(), and return the term for each sample"
            )

    def enter(self, inputs: Any) -> Any:
        """The inputs of the forward pass, with hooks where they need some."""
        return map_tensors(self._enter_one, inputs)

    def _enter_one(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or id(tensor) in self._own:  # a parameter takes the weight as in the model
            return tensor
        # Neither a leaf, which would keep the hook, nor a view, which loses it when written to.
        entered = tensor.clone()
        entered.register_hook(self._take_weight_off)  # type: ignore[no-untyped-call]
        return entered

    def _take_weight_off(self, gradient: torch.Tensor) -> torch.Tensor | None:
        # To the inputs of a filler come zeros, which would be divided by zero.
        return gradient / self.feed.weight if self.has_weighted and not self.is_filler else None

    def leave(self, output: Any) -> tuple[Any, dict[int, Node]]:
        """The output with hooks on its tensors that require a gradient, and the graph nodes of those by number.

        A leaf that is no parameter of the model stays as it is: no parameter is reached through it, and a script may
        differentiate by it.
        """
        roots: dict[int, Node] = {}
        separate = not self.is_plain and sum(tensor.requires_grad for tensor in tensors_in(output)) > 1

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or (tensor.is_leaf and id(tensor) not in self._own):
                return tensor
            if separate:
                tensor = tensor.clone()
            elif tensor.grad_fn is None:  # A leaf would keep the hook beyond this step.
                tensor = tensor.view_as(tensor)
            number = _next_number()
            roots[number] = self._watch(tensor, number)
            return tensor

        return map_tensors(watch, output), roots

    def _watch(self, tensor: torch.Tensor, number: int) -> Node:
        # A view that is written to in place leaves its hooks behind; its base does not.
        base = base_of(tensor)
        anchor = tensor if base is None or base.grad_fn is None else base
        anchor.register_hook(functools.partial(self._on_gradient, number))  # type: ignore[no-untyped-call]
        tells_share = self.feed.share is not None or self.feed.question is not None
        node = batch.graph.mark(tensor, self, tells_share)
        if anchor is not tensor:
            batch.graph.mark(anchor, self, tells_share)
        return node

    @left_out(with_what_it_calls=True)
    def _on_gradient(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        backward = self._backward()
        if backward is None:
            raise ModelError(
                "the DistributedDataParallel of this model was deleted between its forward and its backward pass: keep "
                "it, the gradients are averaged by it"
            )
        if not backward.pre_backward(number, self):
            return self._with_way_back(number, gradient)
        self._weighted_task = current_graph_task_id()
        if self.is_plain:
            return None
        # Not multiplied by zero: what a filler sample gives may be infinite.
        return torch.zeros_like(gradient) if self.is_filler else gradient * self.feed.weight

    def _with_way_back(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """In evaluation mode, where a graph of gradients begins: notices whether a loss goes back by it to parameters.

        See [Note: gradients of an evaluation] in `feeding.py`.
        """
        is_own_business = self.is_plain or self.trains or self._is_functional or not self.syncs
        if is_own_business or not torch.is_grad_enabled():
            return None
        entered = gradient.clone() if gradient.requires_grad else gradient.detach().requires_grad_()
        entered.register_hook(functools.partial(self._on_penalty, number))  # type: ignore[no-untyped-call]
        return entered

    def _on_penalty(self, number: int, _: torch.Tensor) -> None:
        backward = self._backward()
        if backward is not None and backward.pre_backward(number, self):
            self.check_penalty()
