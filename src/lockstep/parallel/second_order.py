"""Means of gradients that a script may put into a loss (`backward(create_graph=True)`): nothing goes back by them."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.errors import ModelError

__all__ = ["without_way_back"]


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: torch.Tensor) -> torch.Tensor:
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ModelError(
            "a loss contains `.grad` of a model's parameters (backward(create_graph=True)). They are means over the "
            "ranks, through which no gradient goes back. Make the gradients by torch.autograd.grad(loss, "
            "list(model.parameters()), create_graph=True), add what you make of them to the loss, and call backward() "
            "once, on the whole loss"
        )


def without_way_back(mean: torch.Tensor) -> torch.Tensor:
    """A copy of `mean` that requires a gradient, as one process has it, and raises ModelError where one comes.

    As a constant it would leave its part of a loss's gradient out without a word.
    """
    with torch.enable_grad():
        way_back: torch.Tensor = _Mean.apply(mean.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return way_back
