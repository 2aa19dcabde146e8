"""What lies between a loss and the model's outputs in the autograd graph, and which sums there add up samples.

A node stands for what was computed: `SumBackward0` for a `sum()`. What a node has saved tells sizes and factors.

[Note: sums of means] A sum over samples is one whose terms come from the outputs sample by sample. Where each way from
a sum to the outputs passes another reduction over the samples, as in `torch.stack([loss_a, loss_b]).sum()`, its terms
are losses. So are they where there are fewer of them than samples, and where an output without dimensions is a term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    "GraphPlace",
    "adds_up_samples",
    "is_scalar_output",
    "nodes_behind",
    "norms_of_samples",
    "places_until_outputs",
    "ratios_of_samples",
    "scalar_of",
    "signed",
    "summed_sizes",
    "sums_inside",
]

# What torch's losses have saved under `reduction`.
MEAN, SUM = 1, 2
DIVISIONS = ("DivBackward0", "DivBackward1")  # by a tensor; by a number, as torch's own losses divide
_MAX_NODES = 2000
_ENDS = (RESCALED, GATHERED)
_ADDITIONS = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Sub", "Rsub", "Neg", "Sum", "Stack", "Cat", "Clone", "Alias", "ToCopy"),
        *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Unbind"),
    )
    for number in (0, 1)
)
# Layers by whose inputs data may come, and which of their arguments are the input.
_INPUTS = {
    **{f"{name}Backward0": (0, 1) for name in ("Mm", "Bmm", "Mv")},
    **{f"{name}Backward0": (1, 2) for name in ("Addmm", "Baddbmm", "Addmv")},
    **{f"{name}Backward0": (0,) for name in ("Convolution", "Linear", "NativeLayerNorm", "NativeBatchNorm")},
}
_ALWAYS_OF_DATA = ("EmbeddingBackward", "EmbeddingBagBackward", "CudnnRnnBackward", "MkldnnRnnLayerBackward")
_LEAST_SCALE = 128.0  # of a loss that is scaled for half precision
_CUTS = ("SelectBackward0", "SliceBackward0", "SplitBackward0", "UnbindBackward0")


@dataclass(frozen=True)
class GraphPlace:
    """A node on the way from a loss to the model's outputs.

    Attributes:
        node: that one.
        divisors: what a sum at the node is divided by on the way from the loss, the nearest to the node last; empty for
            a plain sum, and with 0 first where a factor stands before them all, by which nobody can tell.
        is_term: the loss is the node's tensor and others added up, scaled or not.
    """

    node: Node
    divisors: tuple[float, ...] = ()
    is_term: bool = True

    def behind(self, is_root: bool) -> list[GraphPlace]:
        """The places behind it; `is_root`: this one is the loss itself."""
        divisors = self.divisors
        if self.node.name() in DIVISIONS:
            divisor = scalar_of(getattr(self.node, "_saved_other", None))
            divisors = (*divisors, divisor) if divisor else divisors
        elif self.node.name() == "MulBackward0" and not divisors and not _leaves_sums(self.node, is_root):
            divisors = (0.0,)
        is_term = self.is_term and _is_linear(self.node)
        return [GraphPlace(each, divisors, is_term) for each in _following(self.node)]


def places_until_outputs(loss: Tensor, is_output: Callable[[Node], bool]) -> tuple[list[GraphPlace], list[GraphPlace]]:
    """The places between a loss and the model's outputs, and those of the outputs.

    Args:
        loss: 0-dim.
        is_output: whether a node is that of an output of the model.
    """
    stack = [GraphPlace(loss.grad_fn)] if loss.grad_fn is not None else []
    between: list[GraphPlace] = []
    outputs: list[GraphPlace] = []
    seen: set[Node] = set()
    while stack and len(seen) < _MAX_NODES:
        place = stack.pop()
        if place.node in seen or place.node.name() in _ENDS:
            continue
        seen.add(place.node)
        if is_output(place.node):
            outputs.append(place)
            continue
        between.append(place)
        stack.extend(place.behind(is_root=place.node is loss.grad_fn))
    return between, outputs


def sums_inside(outputs: Iterable[GraphPlace], local_samples: int | None) -> Iterator[GraphPlace]:
    """Of outputs without dimensions, the sums over samples that they are, or are made of by additions alone.

    A sum that is divided or scaled within the model is left out: the model may know by which count it divides (of
    torch's losses over targets `loss_kinds.py` sees the count). So is what depends on parameters alone.
    """
    stack = [place for place in outputs if place.is_term and is_scalar_output(place.node)]
    seen: set[Node] = set()
    while stack and len(seen) < _MAX_NODES:
        place = stack.pop()
        node, sizes = place.node, summed_sizes(place.node)
        if node in seen or node.name() in _ENDS:
            continue
        seen.add(node)
        if sizes is not None and not sizes.numel() % (local_samples or 1) and adds_up_samples(node, local_samples):
            yield place
        elif _is_linear(node) and node.name() not in DIVISIONS and _leaves_sums(node):
            stack.extend(GraphPlace(each, place.divisors) for each in _following(node))


def _is_linear(node: Node) -> bool:
    """Whether what the node has computed is a sum of its inputs, of which each may be scaled."""
    name = node.name()
    if name == "MeanBackward0":
        return getattr(node, "_saved_self_sym_numel", 0) == 1
    return name in _ADDITIONS or (name in (*DIVISIONS, "MulBackward0") and _factor(node) is not None)


def _leaves_sums(node: Node, is_root: bool = False) -> bool:
    """Whether a sum behind the node is as plain as one before it: it is not scaled, or by a scaler of losses.

    That multiplies the loss itself by a power of two, which is not small, nor divides it by a number of samples.
    """
    factor = _factor(node) if node.name() == "MulBackward0" else 1.0
    if factor is None:
        return False
    return abs(factor) == 1 or (is_root and factor >= _LEAST_SCALE and math.frexp(factor)[0] == 0.5)


def _factor(node: Node) -> float | None:
    """What the node multiplies or divides by, if that is one number."""
    factor = scalar_of(getattr(node, "_saved_other", None))
    return scalar_of(getattr(node, "_saved_self", None)) if factor is None and node.name() == "MulBackward0" else factor


def nodes_behind(*roots: Node, is_end: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """The nodes from the last root on, and so forth, each once. Those at the end are among them.

    What `lockstep.mean` and the like have made is not.
    """
    stack, seen = [*roots], set[Node]()
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


def signed(number: int) -> int:
    """What a node has saved, of which it shows a negative number as an unsigned one."""
    return number - 2**64 if number >= 2**63 else number


def is_scalar_output(node: Node) -> bool:
    """Whether the outputs with this node are known to have no dimensions: parts of a loss."""
    shapes = batch.shapes_at(node)
    return bool(shapes) and all(not shape for shape in shapes)


def summed_sizes(node: Node) -> torch.Size | None:
    """The shape of what the node adds up in full; None where it is no such sum."""
    if node.name() == "SumBackward0":
        return torch.Size(getattr(node, "_saved_self_sym_sizes", ()))
    if getattr(node, "_saved_reduction", None) == SUM:
        return torch.Size(getattr(node, "_saved_self", torch.empty(0, device="cpu")).shape)
    return None


def adds_up_samples(node: Node, local_samples: int | None, is_output: Callable[[Node], bool] | None = None) -> bool:
    """Whether the terms of a sum are of samples. See [Note: sums of means].

    Args:
        node: that of a sum.
        local_samples: of this rank; None where nobody knows.
        is_output: whether a node is that of an output of the model; None for a sum within the model.
    """
    is_source, is_inside = is_output or _takes_data, is_output is None
    numel = (summed_sizes(node) or torch.Size()).numel()
    if numel < (local_samples or 2):
        return numel == local_samples == 1 and _comes_by_samples(node, local_samples, is_source, is_inside)
    if _comes_by_samples(node, local_samples, is_source, is_inside):
        return True
    # One loss for each sample, of rows that were taken out one by one.
    return numel == local_samples and _takes_rows_apart(node, is_source)


def _takes_rows_apart(node: Node, is_source: Callable[[Node], bool]) -> bool:
    """Whether some of what the node was computed from are pieces of others, along the first dimension."""
    behind = nodes_behind(node, is_end=is_source)
    return any(each.name() in _CUTS and getattr(each, "_saved_dim", None) == 0 for each in behind)


def _comes_by_samples(
    root: Node, local_samples: int | None, is_source: Callable[[Node], bool], is_inside: bool
) -> bool:
    """Whether a way from the node to a source of samples passes no reduction over them, nor a division by their number.

    Args:
        root: that of a sum.
        local_samples: of this rank; None where nobody knows.
        is_source: whether a node is that of an output of the model, or takes the data within the model.
        is_inside: within the model, where any whole number may be that of samples.
    """
    stack, seen = [(each, False, True) for each in _following(root)], set[Node]()
    while stack and len(seen) < _MAX_NODES:
        node, is_divided, is_term = stack.pop()
        if node in seen or node.name() in _ENDS:
            continue
        seen.add(node)
        is_end = is_source(node)
        if is_end and not is_scalar_output(node):
            return True
        samples = 1 if is_inside else local_samples if is_term else None
        is_divided, is_term = is_divided or node.name() in DIVISIONS, is_term and _is_linear(node)
        if not is_end and not _is_average(node, samples, is_divided, local_samples):
            stack.extend((following, is_divided, is_term) for following in _following(node))
    return False


def _is_average(node: Node, samples: int | None, is_divided: bool, local_samples: int | None) -> bool:
    return _divides_by_count(node, samples) or _reduces_samples(node, is_divided, local_samples)


def _divides_by_count(node: Node, samples: int | None) -> bool:
    """Whether terms are divided before they are summed, by what may be a number of so many samples' elements."""
    factor = _factor(node) if node.name() in DIVISIONS else None
    return factor is not None and factor > 1 and samples is not None and factor % max(samples, 1) == 0


def _takes_data(node: Node) -> bool:
    """Whether the node is of a layer that was given data: something without a gradient, in the place of its input."""
    name = node.name()
    if name.startswith(_ALWAYS_OF_DATA):
        return True
    return any(
        slot < len(node.next_functions) and node.next_functions[slot][0] is None for slot in _INPUTS.get(name, ())
    )


def norms_of_samples(
    between: Iterable[GraphPlace], local_samples: int | None, is_output: Callable[[Node], bool]
) -> Iterator[Node]:
    """Of the places before the model's outputs, norms and standard deviations over several samples in full.

    Not such that are squared, which are sums over samples again; nor those of sizes by which nobody can tell that
    samples come first.
    """
    places = list(between)
    squared: set[Node | None] = set()
    for place in places:
        following = [each for each, _ in place.node.next_functions]
        if place.node.name() == "PowBackward0" or (place.node.name() == "MulBackward0" and len(set(following)) == 1):
            squared.update(following)
    for node in (place.node for place in places if _is_norm(place.node)):
        sizes = getattr(node, "_saved_self", torch.empty(0, device="cpu")).shape
        if node in squared or not local_samples or local_samples < 2 or not sizes or sizes[0] % local_samples:
            continue
        if _comes_by_samples(node, local_samples, is_output, False) and not _takes_rows_apart(node, is_output):
            yield node


def ratios_of_samples(
    between: Iterable[GraphPlace], local_samples: int | None, is_output: Callable[[Node], bool]
) -> Iterator[Node]:
    """Of the places before the model's outputs, divisions by what has added up several samples in some dimensions.

    Not such whose divisor has no gradient, nor of sizes by which nobody can tell that samples come first. What is
    divided by a sum in full is among the sums.
    """
    for node in (place.node for place in between if place.node.name() == "DivBackward0"):
        divisor = node.next_functions[1][0] if len(node.next_functions) == 2 else None
        if divisor is None or not local_samples or local_samples < 2:
            continue
        behind = nodes_behind(divisor, is_end=is_output)
        if any(
            _adds_up_first_dim(each, local_samples) and _comes_by_samples(each, local_samples, is_output, False)
            for each in behind
        ):
            yield node


def _adds_up_first_dim(node: Node, local_samples: int) -> bool:
    """Whether the node is of a `sum(dim=…)` over what seem to be the samples, in the first dimension."""
    dims: Any = getattr(node, "_saved_dim", None)
    sizes: Sequence[int] = getattr(node, "_saved_self_sym_sizes", ())
    if node.name() != "SumBackward1" or not dims or not sizes:
        return False
    is_first = sizes[0] == local_samples or (sizes[0] % local_samples == 0 and local_samples not in sizes)
    return is_first and bool({0, -len(sizes)}.intersection(map(signed, dims)))


def _is_norm(node: Node) -> bool:
    """Whether the node is of a norm over all dimensions, of an order above 1 (with 1 it is a sum), or of a `std()`."""
    if node.name() not in ("LinalgVectorNormBackward0", "NormBackward0", "StdBackward0"):
        return False
    order = scalar_of(getattr(node, "_saved_ord", getattr(node, "_saved_p", 2.0)))
    dims, sizes = getattr(node, "_saved_dim", None), getattr(node, "_saved_self", torch.empty(0, device="cpu")).shape
    return order is not None and 1 < order < math.inf and (not dims or len(dims) == len(sizes))


def _reduces_samples(node: Node, is_divided: bool, local_samples: int | None) -> bool:
    """Whether what the node has computed holds no samples any more, as a mean or another sum over them."""
    name = node.name()
    if (
        name in ("MeanBackward0", "SumBackward0")
        or _is_norm(node)
        or getattr(node, "_saved_reduction", None) in (MEAN, SUM)
    ):
        return True
    if name != "MeanBackward1" and not (name == "SumBackward1" and is_divided):
        return False
    dims: Any = getattr(node, "_saved_dim", None)
    sizes: Sequence[int] = getattr(node, "_saved_self_sym_sizes", ())
    if not dims or {0, -len(sizes)}.intersection(map(signed, dims)):
        return True
    return bool(local_samples and sizes and sizes[0] % local_samples)  # samples are not first
