"""Which losses go past a model's outputs: by their graphs, without ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lockstep.parallel.bypasses import find_bypass

WITHIN = "computed within forward() and not returned"
BOTH = "from outputs of the model and from its parameters"


class Net(nn.Module):
    """Keeps a loss, and has a head and a scale that it does not use itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.zeros(()))
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        self.kept = hidden.square().mean()
        return hidden.tanh()


def kept(net: Net, output: Tensor) -> Tensor:
    return output.mean() + 0.1 * net.kept


def kept_alone(net: Net, _: Tensor) -> Tensor:
    return net.kept


def stacked(net: Net, output: Tensor) -> Tensor:
    return torch.stack([output.mean(), net.kept / 2]).sum()


def by_a_head(net: Net, output: Tensor) -> Tensor:
    return net.head(output).square().mean()


def scaled(net: Net, output: Tensor) -> Tensor:
    return output.mean() * torch.exp(-net.scale) + net.scale


def of_outputs(_: Net, output: Tensor) -> Tensor:
    return (output.square().mean() - output.mean()).neg() / 3


def with_a_regulariser(net: Net, output: Tensor) -> Tensor:
    return output.mean() + 0.1 * sum((each.square().sum() for each in net.parameters()), torch.zeros(()))


def towards_a_start(net: Net, output: Tensor) -> Tensor:
    start = torch.ones(4, 3)
    return output.mean() + (net.body.weight - start).norm() * 2 + net.scale


def with_others_parameters(_: Net, output: Tensor) -> Tensor:
    return nn.Linear(4, 2)(output).mean()


def constant(_: Net, output: Tensor) -> Tensor:
    return output.detach().mean()


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (kept, WITHIN),
        (kept_alone, WITHIN),
        (stacked, WITHIN),
        (by_a_head, BOTH),
        (scaled, BOTH),
        (of_outputs, None),
        (with_a_regulariser, None),
        (towards_a_start, None),
        (with_others_parameters, None),
        (constant, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_goes_past_the_outputs(loss: Callable[[Net, Tensor], Tensor], what: str | None) -> None:
    net = Net()
    output = net(torch.ones(5, 3))
    assert output.grad_fn is not None
    own = frozenset(map(id, net.parameters()))

    def is_output(node: Node) -> bool:
        return node == output.grad_fn

    found = find_bypass(loss(net, output), [output.grad_fn], own, is_output)
    assert found is None if what is None else what in str(found)
