"""Tensors inside of what models take and return, and what a backward pass reaches."""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import register_pytree_node, tree_flatten
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.graph import begins_with_checkpoint, reachable_leaves, runs_backward_by, runs_backward_to
from lockstep.tree import map_tensors, move_tensors


@dataclasses.dataclass
class Plain:
    value: Any
    note: str = "text"
    derived: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any


class Named(NamedTuple):
    value: Any
    note: str


class Pair(tuple[Any, ...]):
    """A tuple with a constructor of its own."""

    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class Dictionary(dict[str, Any]):
    """With a constructor that a copy by items would not survive."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed=needed)


class Listing(list[Any]):
    pass


class Custom:
    def __init__(self, value: Any) -> None:
        self.nested = {"value": value}


class Graph:
    """An object that may be called too, as the graphs of PyTorch Geometric may, and whose parts know it."""

    def __init__(self, value: Any) -> None:
        self.store = SimpleNamespace(value=value, parent=weakref.ref(self))
        self.others: dict[str, Any] = {
            "full": SimpleNamespace(value=value),
            "empty": SimpleNamespace(parent=weakref.ref(self)),
            "strong": SimpleNamespace(parent=self),
        }

    def __call__(self) -> None:
        raise AssertionError


class Registered:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


register_pytree_node(Registered, lambda each: ([each.value], None), lambda values, _: Registered(*values))


def dictionary(value: Any) -> Dictionary:
    made = Dictionary(3)
    made["value"] = value
    return made


CONTAINERS: dict[str, Any] = {
    "tensor": lambda t: t,
    "list": lambda t: [1, t, None],
    "tuple": lambda t: (t, "text"),
    "dict": lambda t: {"a": t, 5: 6},
    "nested": lambda t: {"a": [(t, {"b": t})]},
    "list subclass": lambda t: Listing([t]),
    "tuple subclass": lambda t: Pair(t, 2),
    "dict subclass": dictionary,
    "ordered": lambda t: collections.OrderedDict(a=t),
    "default": lambda t: collections.defaultdict(list, a=t),
    "deque": lambda t: collections.deque([t], maxlen=3),
    "named tuple": lambda t: Named(t, "note"),
    "torch's named tuple": lambda t: torch.max(torch.stack([t, t]), 0),
    "packed sequence": lambda t: pack_sequence([t, t]),
    "dataclass": lambda t: Plain(t),
    "frozen dataclass": lambda t: Frozen([t]),
    "dataclass with slots": lambda t: Slotted(t),
    "namespace": lambda t: SimpleNamespace(a=t, b=[t]),
    "object": lambda t: Custom(t),
    "object with a method __call__": lambda t: Graph(t),
    "distribution": lambda t: torch.distributions.Normal(t, torch.ones(3)),
    "pytree node": lambda t: Registered(t),
}


def tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    assert map_tensors(look, value) is value, "what is only looked at is not copied"
    return found


@pytest.mark.parametrize("name", list(CONTAINERS))
def test_tensors_are_found_and_replaced_anywhere(name: str) -> None:
    value = CONTAINERS[name](torch.tensor([1.0, 2.0, 3.0]))
    before = [tensor.clone() for tensor in tensors_in(value)]
    assert before

    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert type(doubled) is type(value)
    for after, old in zip(tensors_in(doubled), before, strict=True):
        assert torch.equal(after, old * 2)
    for kept, old in zip(tensors_in(value), before, strict=True):
        assert torch.equal(kept, old), "the original is left as it was"
    leaves, others = ([leaf for leaf in tree_flatten(each)[0] if isinstance(leaf, str)] for each in (value, doubled))
    assert leaves == others


@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", 1.5, int, {}, [], (), len, nn.Linear(2, 2), object()])
def test_values_without_tensors_come_back_as_they_are(value: Any) -> None:
    assert tensors_in(value) == []


def test_parts_of_a_copy_know_the_copy() -> None:
    graph = Graph(torch.ones(2))
    stores = [graph.store, *graph.others.values()]
    mapped = map_tensors(lambda tensor: tensor + 1, graph)
    assert mapped.store.parent() is mapped.others["empty"].parent() is mapped.others["strong"].parent is mapped
    assert [graph.store, *graph.others.values()] == stores
    assert graph.store.parent() is graph.others["empty"].parent() is graph.others["strong"].parent is graph


def test_lengths_of_packed_sequences_stay_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    moved = move_tensors([packed], torch.device("meta"))[0]
    assert type(moved) is type(packed)
    assert {name: value.device.type for name, value in moved._asdict().items()} == {
        "data": "meta",
        "batch_sizes": "cpu",
        "sorted_indices": "meta",
        "unsorted_indices": "meta",
    }


def test_functions_are_not_looked_into() -> None:
    tensor = torch.ones(1)

    def function() -> None: ...

    function.tensor = tensor  # type: ignore[attr-defined]
    partial = functools.partial(function, tensor)
    partial.tensor = tensor  # type: ignore[attr-defined]
    assert tensors_in([function, partial, Custom(tensor).__init__, weakref.ref(Custom(tensor))]) == []  # type: ignore[misc]


def test_a_tensor_that_occurs_twice_is_mapped_once() -> None:
    tensor = torch.ones(2)
    calls = []

    def double(given: Tensor) -> Tensor:
        calls.append(given)
        return given * 2

    first, (second,) = map_tensors(double, (tensor, [tensor]))
    assert len(calls) == 1
    assert first is second


def test_objects_may_refer_to_each_other() -> None:
    parent, child = SimpleNamespace(), SimpleNamespace(value=torch.ones(1))
    parent.child, child.parent = child, parent
    assert len(tensors_in(parent)) == 1
    for depth in range(50):  # wide and deep, but each object is visited once
        parent = SimpleNamespace(left=parent, right=parent, depth=depth)
    assert len(tensors_in(parent)) == 1


def test_modules_are_not_looked_into() -> None:
    assert tensors_in(SimpleNamespace(model=nn.Linear(2, 2))) == []


# ---- graphs -----------------------------------------------------------------------------------------------


def test_leaves_that_a_backward_pass_would_reach() -> None:
    first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    inputs = torch.ones(1, 2, requires_grad=True)
    left = second(first(inputs))
    right = third(first(inputs).detach())
    assert left.grad_fn is not None
    assert right.grad_fn is not None
    of_left = {id(leaf) for leaf in (*first.parameters(), *second.parameters(), inputs)}
    assert reachable_leaves([left.grad_fn]) == of_left
    assert reachable_leaves([right.grad_fn]) == {id(leaf) for leaf in third.parameters()}
    assert reachable_leaves([left.grad_fn, right.grad_fn]) == of_left | {id(leaf) for leaf in third.parameters()}
    assert reachable_leaves([]) == set()
    left.sum().backward()
    assert reachable_leaves([left.grad_fn]) == of_left, "the graph can be walked after a backward pass"


def test_where_the_backward_pass_under_way_goes() -> None:
    used, unused, frozen = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    frozen.requires_grad_(False)
    inputs = torch.ones(1, 2, requires_grad=True)
    nodes = [get_gradient_edge(each).node for each in used.parameters()]
    by_nodes: dict[str, bool] = {}
    answers: dict[str, list[bool]] = {}

    def run(name: str, function: Any) -> None:
        output = frozen(used(inputs))

        def ask(_: Tensor) -> None:
            answers[name] = [runs_backward_to(each.parameters()) for each in (used, unused, frozen)]
            by_nodes[name] = runs_backward_by(nodes)

        output.register_hook(ask)
        function(output.sum())

    run("backward", lambda loss: loss.backward())
    run("into the inputs", lambda loss: loss.backward(inputs=[inputs]))
    run("into a parameter", lambda loss: loss.backward(inputs=[used.bias]))
    run("gradient of the inputs", lambda loss: torch.autograd.grad(loss, inputs))
    run("gradient of a parameter", lambda loss: torch.autograd.grad(loss, used.weight))
    run("gradient of another", lambda loss: torch.autograd.grad(loss, unused.weight, allow_unused=True))
    assert answers == {
        "backward": [True, False, False],
        "into the inputs": [False, False, False],
        "into a parameter": [True, False, False],
        "gradient of the inputs": [False, False, False],
        "gradient of a parameter": [False, False, False],
    }
    assert by_nodes == {name: first for name, (first, *_) in answers.items()}


def test_whether_a_checkpoint_hides_parameters() -> None:
    inside, behind, before = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    own = frozenset(id(each) for layer in (inside, behind, before) for each in layer.parameters())
    inputs = torch.ones(1, 2, requires_grad=True)

    def begins(output: Tensor) -> bool:
        assert output.grad_fn is not None
        return begins_with_checkpoint(output.grad_fn, own)

    hidden = checkpoint(inside, before(inputs), use_reentrant=True)
    assert begins(hidden)
    assert begins(hidden * 2.0)
    assert not begins(behind(hidden)), "its own parameters come first"
    assert not begins(before(inputs))
    assert not begins(inputs * 2.0), "no parameter and no checkpoint"
    far = hidden
    for _ in range(100):
        far = far * 2.0
    assert not begins(far), "it gives up"
