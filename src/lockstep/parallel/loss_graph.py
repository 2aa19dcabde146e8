"""What lies between a loss and the model's outputs in the autograd graph, and which sums there add up samples.

A node stands for what was computed: `SumBackward0` for a `sum()`. What a node has saved tells sizes and factors.

[Note: sums of means] A sum over samples is one whose terms come from the outputs sample by sample. Where each way from
a sum to the outputs passes another reduction over the samples, as in `torch.stack([loss_a, loss_b]).sum()`, its terms
are losses. So are they where there are fewer of them than samples, and where an output without dimensions is a term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lockstep import batch
from lockstep.parallel.losses import GATHERED, RESCALED

__all__ = [
    "DIVISIONS",
    "MEAN",
    "SUM",
    "Divisors",
    "adds_up_samples",
    "is_scalar_output",
    "nodes_behind",
    "nodes_until_outputs",
    "numels_of_outputs",
    "scalar_of",
    "summed_sizes",
]

Divisors = tuple[float, ...]

# What torch's losses have saved under `reduction`.
MEAN, SUM = 1, 2
DIVISIONS = ("DivBackward0", "DivBackward1")  # by a tensor; by a number, as torch's own losses divide
_MAX_NODES = 2000
_ENDS = (RESCALED, GATHERED)
_CUTS = ("SelectBackward0", "SliceBackward0", "SplitBackward0", "UnbindBackward0")


def nodes_until_outputs(
    loss: Tensor, is_output: Callable[[Node], bool], outputs: list[Node]
) -> Iterator[tuple[Node, Divisors]]:
    """The nodes between a loss and the model's outputs, each with what a sum at that node is divided by.

    That is all divisors on the way from the loss, the nearest to the node last: none for a plain sum; 0 where the first
    of them is a factor, by which nobody can tell.

    Args:
        loss: 0-dim.
        is_output: whether a node is that of an output of the model.
        outputs: receives the nodes of outputs, as the walk reaches them.
    """
    stack: list[tuple[Node, Divisors]] = [(loss.grad_fn, ())] if loss.grad_fn is not None else []
    seen: set[Node] = set()
    while stack and len(seen) < _MAX_NODES:
        node, divisors = stack.pop()
        if node in seen or node.name() in _ENDS:
            continue
        if is_output(node):
            outputs.append(node)
            continue
        seen.add(node)
        yield node, divisors
        divisors = _divisors_behind(node, divisors)
        stack.extend((following, divisors) for following in _following(node))


def _divisors_behind(node: Node, divisors: Divisors) -> Divisors:
    """The divisors of sums behind a node, given those of sums at the node."""
    if node.name() in DIVISIONS:
        divisor = scalar_of(getattr(node, "_saved_other", None))
        return (*divisors, divisor) if divisor else divisors
    if node.name() == "MulBackward0" and not divisors:
        return (0.0,)  # scaled by something: then nobody can tell whether the divisor is right
    return divisors


def nodes_behind(root: Node, is_end: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """The nodes from `root` on, those at the end included, but not what `lockstep.mean` and the like have made."""
    stack, seen = [root], set[Node]()
    while stack and len(seen) < _MAX_NODES:
        node = stack.pop()
        if node in seen or node.name() in _ENDS:
            continue
        seen.add(node)
        yield node
        if not is_end(node):
            stack.extend(_following(node))


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def scalar_of(value: object) -> float | None:
    """A number, or a tensor without dimensions, as a float; None for anything else."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.dim() == 0 else None
    return float(value) if isinstance(value, int | float) else None


def is_scalar_output(node: Node) -> bool:
    """Whether the outputs with this node are known to have no dimensions: parts of a loss."""
    shapes = batch.shapes_at(node)
    return bool(shapes) and all(not shape for shape in shapes)


def numels_of_outputs(outputs: Iterable[Node]) -> frozenset[int]:
    """How many elements the outputs with these nodes have, as far as that was noted."""
    return frozenset(shape.numel() for output in outputs for shape in batch.shapes_at(output))


def summed_sizes(node: Node) -> torch.Size | None:
    """The shape of what the node adds up in full; None where it is no such sum."""
    if node.name() == "SumBackward0":
        return torch.Size(getattr(node, "_saved_self_sym_sizes", ()))
    if getattr(node, "_saved_reduction", None) == SUM:
        return torch.Size(getattr(node, "_saved_self", torch.empty(0, device="cpu")).shape)
    return None


def adds_up_samples(node: Node, local_samples: int | None, is_output: Callable[[Node], bool]) -> bool:
    """Whether the terms of a sum are of samples. See [Note: sums of means].

    Args:
        node: that of a sum.
        local_samples: of this rank; None where nobody knows.
        is_output: whether a node is that of an output of the model.
    """
    numel = (summed_sizes(node) or torch.Size()).numel()
    if numel < (local_samples or 2):
        return numel == local_samples == 1 and _comes_by_samples(node, local_samples, is_output)
    if _comes_by_samples(node, local_samples, is_output):
        return True
    # One loss for each sample, of rows that were taken out one by one.
    return numel == local_samples and any(
        each.name() in _CUTS and getattr(each, "_saved_dim", None) == 0 for each in nodes_behind(node, is_output)
    )


def _comes_by_samples(root: Node, local_samples: int | None, is_output: Callable[[Node], bool]) -> bool:
    """Whether a way from the node to an output passes no reduction over samples."""
    stack, seen = [(each, False) for each in _following(root)], set[Node]()
    while stack and len(seen) < _MAX_NODES:
        node, is_divided = stack.pop()
        if node in seen or node.name() in _ENDS:
            continue
        seen.add(node)
        if is_output(node):
            if not is_scalar_output(node):
                return True
            continue
        is_divided = is_divided or node.name() in DIVISIONS
        if not _reduces_samples(node, is_divided, local_samples):
            stack.extend((following, is_divided) for following in _following(node))
    return False


def _reduces_samples(node: Node, is_divided: bool, local_samples: int | None) -> bool:
    """Whether what the node has computed holds no samples any more, as a mean or another sum over them."""
    name = node.name()
    if name in ("MeanBackward0", "SumBackward0") or getattr(node, "_saved_reduction", None) in (MEAN, SUM):
        return True
    if name != "MeanBackward1" and not (name == "SumBackward1" and is_divided):
        return False
    dims: Any = getattr(node, "_saved_dim", None)
    sizes: Sequence[int] = getattr(node, "_saved_self_sym_sizes", ())
    if not dims or {0, 2**64 - len(sizes), -len(sizes)}.intersection(dims):
        return True
    return bool(local_samples and sizes and sizes[0] % local_samples)  # samples are not first
