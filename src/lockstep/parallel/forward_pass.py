"""Hooks on the inputs and outputs of one forward pass, which notice its backward pass and weight it exactly.

[Note: exact weighting] Rank r holds n_r of the n samples of a global batch and computes the mean over its n_r. The
gradient of the mean over all n is the mean over ranks of the local gradients times the weight n_r * W / n. The weight
is applied to the gradient that enters the model at its outputs: so it is exact for every micro-batch of an
accumulation, does not affect terms of the loss that do not depend on the batch, and costs nothing if it is 1, as for
all batches that divide evenly.

[Note: weighted once] A path from the loss to a parameter may pass several such places: outputs computed from each
other, a tensor returned twice, or two engines in a row (an encoder and a decoder). So if there are several outputs,
each becomes a separate copy, and hooks on inputs that require a gradient remove the weight again. Only a pass that
accumulates into parameters of the model is weighted: `torch.autograd.grad` gives the same result as without an engine.

[Note: found by a loss] `lockstep.mean` and similar functions (`losses.py`) undo the weight for their part of a loss.
They find the forward passes that a loss comes from by marks on the outputs' graph nodes (`lockstep/batch/graph.py`).

Gradients that reach parameters by another path, such as from a tensor that the model keeps as an attribute, get no
weight, as outside a loader. Those through the graph of a gradient (`create_graph=True`) would get none either, so that
raises ModelError if the batch is not evenly divided: when the gradient is computed, or in evaluation mode, when a loss
goes back through that graph to parameters.
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
from lockstep.torch_private.autograd import base_of, current_graph_task_id, tensors_within, without_transforms
from lockstep.torch_private.dynamo import left_out
from lockstep.tree import map_tensors, tensors_in

__all__ = ["ForwardPass"]

_next_number = itertools.count().__next__


class _Passes(Protocol):
    def pre_backward(self, output: int, forward: ForwardPass) -> bool:
        """Called when a gradient has come to an output; returns whether it reaches parameters of the model."""


class ForwardPass:
    """One forward pass of an engine.

    Args:
        feed: its samples, and so the weight for the gradients that enter at its outputs; see [Note: exact weighting].
        syncs: whether its backward pass averages gradients.
        group: the ranks that average.
        backward: a weak reference to the object that is notified of gradients at outputs. Weak, because the engine
            keeps the graph's roots, and a cycle through the graph is never freed.
        own: `id` of each parameter that the engine averages.
        is_functional: whether it runs inside `torch.func.grad` or similar, with other parameters than the model's.
        trains: whether the model is in training mode.

    Attributes:
        feed, trains: as given; the weight of `feed` is known after `settle`.
        is_plain: whether gradients need no weight.
        is_filler: whether this rank's samples do not count.
        claimed_task: the last backward pass for which the batch of its gradients was noted.
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
        self._weighted_task = -1  # the last backward pass in which the weight was applied

    @property
    def has_weighted(self) -> bool:
        """Whether the current backward pass has come through the outputs, where gradients get their weight."""
        return self._weighted_task == current_graph_task_id()

    def settle(self) -> float:
        """The weight. Collective if it depends on other ranks and they have not been asked yet.

        Raises:
            InputError: the number of samples in the forward pass cannot be determined.
        """
        self._set_feed(self.feed.settled())
        return self.feed.weight

    def _set_feed(self, feed: Feed) -> None:
        self.feed = feed
        is_known = feed.question is None
        self.is_plain, self.is_filler = is_known and feed.weight == 1.0, is_known and feed.weight == 0.0

    def check_penalty(self) -> None:
        """Check a gradient that is computed with a graph and does not reach parameters. Collective, as `settle`.

        Raises:
            ModelError: the batch is not evenly divided, and a loss computed from the gradient would not be weighted.
        """
        if self._is_functional:  # `torch.func.grad` computes all its gradients with a graph
            return
        with without_transforms():  # the ranks exchange plain tensors
            self.settle()
        if not self.is_plain:
            raise ModelError(
                "a gradient with create_graph=True (as for a gradient penalty) belongs to a batch that is not split "
                "evenly between the ranks, so its part of the loss would count once per rank instead of once per "
                "sample. Compute the gradient in forward(), and return the term for each sample"
            )

    def enter(self, inputs: Any) -> Any:
        """The inputs of the forward pass, with hooks on those that need them."""
        return map_tensors(self._enter_one, inputs)

    def _enter_one(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._own or not self._layers(tensor):  # a parameter gets the weight as in the model
            return tensor
        # Not a leaf, which would keep the hook, nor a view, which loses it when written to.
        entered = tensor.clone()
        for each in self._layers(entered):
            each.register_hook(self._take_weight_off)  # type: ignore[no-untyped-call]
        return entered

    def _layers(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What gradients pass through on their way to a tensor: several, within transforms of `torch.func`."""
        layers = [tensor] if self._is_functional else tensors_within(tensor)
        return [each for each in layers if each.requires_grad]

    def _take_weight_off(self, gradient: torch.Tensor) -> torch.Tensor | None:
        # The inputs of a filler get zeros, which would be divided by zero.
        return gradient / self.feed.weight if self.has_weighted and not self.is_filler else None

    def leave(self, output: Any) -> tuple[Any, dict[int, Node]]:
        """The output, with hooks on its tensors that require a gradient, and the graph nodes of these by number.

        A leaf that is not a parameter of the model is left unchanged: a script may differentiate with respect to it.
        """
        roots: dict[int, Node] = {}

        def find(tensor: torch.Tensor) -> list[torch.Tensor]:
            return [each for each in self._layers(tensor) if not each.is_leaf or id(each) in self._own]

        separate = not self.is_plain and sum(len(find(tensor)) for tensor in tensors_in(output)) > 1

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            found = find(tensor)
            if found and (separate or tensor.grad_fn is None):  # A leaf would keep the hook beyond this step.
                tensor = tensor.clone() if separate else tensor.view_as(tensor)
                found = find(tensor)
            for each in found:
                number = _next_number()
                roots[number] = self._watch(each, number)
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
                "the DistributedDataParallel of this model was deleted between its forward and its backward pass. "
                "Keep a reference: it averages the gradients"
            )
        if not backward.pre_backward(number, self):
            return self._with_way_back(number, gradient)
        self._weighted_task = current_graph_task_id()
        if self.is_plain:
            return None
        # Not multiplied by zero: a filler's gradient may be infinite.
        return torch.zeros_like(gradient) if self.is_filler else gradient * self.feed.weight

    def _with_way_back(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """In evaluation mode, at the start of a gradient's graph: notice if a loss goes back through it to parameters.

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
