"""Warns of a loss whose autograd graph shows that it is no mean over samples.

Such a loss needs `lockstep.mean` or `lockstep.sum` ([Note: divisors] in `losses.py`). Gradients do not show the
divisor, so `loss_watch.py` hands the loss of the first steps to this check. It finds five kinds:

- a sum over samples;
- a sum divided by something else than the samples or the summed elements;
- a mean over targets of which some are ignored or weighted by class;
- a mean over outputs that a mask, or their order, selected;
- a norm or a standard deviation over all samples of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lockstep import batch
from lockstep.log import get_logger
from lockstep.parallel.loss_graph import (
    MEAN,
    GraphPlace,
    adds_up_samples,
    nodes_behind,
    norms_of_samples,
    numels_of_outputs,
    places_until_outputs,
    scalar_of,
    summed_sizes,
    sums_inside,
)

__all__ = ["OtherDivisor", "find_other_divisor", "warn_of_other_divisor"]


_MASK_DTYPES = (torch.bool, torch.uint8)
_found: dict[str, str] = {}  # lines of which was warned, and what they are


def warn_of_other_divisor(loss: Tensor, local_samples: int | None, line: str) -> None:
    """Warn if the loss is seen to be no mean over samples. Local.

    Args:
        loss: 0-dim, before its backward pass.
        local_samples: of this rank in this step; None where nobody knows.
        line: file and line of the user's call of `backward`.
    """
    try:
        found = find_other_divisor(loss, local_samples)
    except RuntimeError:  # what the nodes have saved is gone: the graph was walked backward before
        return
    if found is not None and line not in _found:
        _found[line] = found.text
        get_logger(__name__).warning(
            f"{line}: this loss is {found.text}, not a mean over samples, by which ranks are weighted: the "
            "training is not that of one process. Write lockstep.mean(loss_sum, count) for a sum divided by a count "
            "of this rank's (valid tokens, weights of classes), lockstep.sum(loss) for a sum, "
            "lockstep.global_loss(loss) for what every rank has computed over the data of all, and where the script "
            "itself divides gradients behind backward() by a count of all ranks, as fairseq does",
        )


@dataclass(frozen=True)
class OtherDivisor:
    """By what a loss is divided on this rank, other than its samples.

    Attributes:
        text: what that makes of it, such as "a sum".
        value: what it is divided by; None for a sum.
    """

    text: str
    value: float | None = None


def find_other_divisor(
    loss: Tensor, local_samples: int | None, is_output: Callable[[Node], bool] = batch.is_marked
) -> OtherDivisor | None:
    """What the loss is, if it is seen to be no mean over this rank's samples; None where it may be one. Local.

    All kinds are looked for between the loss and the model's outputs; a mean over targets and a plain sum inside the
    model, too, as models return them that are handed the labels.

    Args:
        loss: 0-dim, with a graph.
        local_samples: of this rank; None where nobody knows.
        is_output: whether a node is that of an output of the model; default, of an engine of ours.

    Raises:
        RuntimeError: the graph was walked backward before.
    """
    between, outputs = places_until_outputs(loss, is_output)
    numels = numels_of_outputs(outputs)
    for place in between:
        node = place.node
        found = _of_sum(place, local_samples, numels)
        if found is not None and adds_up_samples(node, local_samples, is_output):
            return found
        found = _of_targets(node) or _of_selection(node, is_output, local_samples)
        if found is not None and any(is_output(behind) for behind in nodes_behind(node, is_output)):
            return found
    norms = map(_of_norm, norms_of_samples(between, local_samples, is_output))
    targets = (_of_targets(node) for output in outputs for node in nodes_behind(output.node))
    sums = (_of_sum(place, local_samples, numels) for place in sums_inside(outputs, local_samples))
    return next((found for found in chain(norms, targets, sums) if found is not None), None)


def _of_targets(node: Node) -> OtherDivisor | None:
    """What a mean of torch's over targets is, if some of them are ignored or weighted."""
    total_weight = getattr(node, "_saved_total_weight", None)
    if getattr(node, "_saved_reduction", None) == MEAN and total_weight is not None:
        targets: Any = getattr(node, "_saved_target", None)
        weight: Any = getattr(node, "_saved_weight", None)
        value = float(total_weight)
        if value == targets.numel():
            return None
        if weight is not None:
            return OtherDivisor("a mean over targets weighted by class (weight=)", value)
        counted = f"{int(value)} of {targets.numel()} targets"
        return OtherDivisor(f"a mean over {counted}, the others being ignored (ignore_index=)", value)
    return None


def _of_sum(place: GraphPlace, local_samples: int | None, numels: Collection[int]) -> OtherDivisor | None:
    """What a `sum()` with its divisors is, if no mean over all that was summed, over samples or over an output.

    Args:
        place: of any node.
        local_samples: of this rank; None where nobody knows.
        numels: of the model's outputs.
    """
    sizes, divisors = summed_sizes(place.node), place.divisors
    if sizes is None:
        return None
    if not divisors:
        return OtherDivisor("a sum")
    nearest, product = divisors[-1], math.prod(filter(None, divisors))
    is_mean = nearest == 0 or any(
        _is_count(sizes.numel() / divisor) and _is_count_of(divisor, local_samples) for divisor in (nearest, product)
    )
    # Or one term of several, in other widths, of which all are divided by the elements of one output.
    if is_mean or any(divisor in numels and _is_count_of(divisor, local_samples) for divisor in divisors):
        return None
    return OtherDivisor(f"a sum divided by {nearest:g}", nearest)


def _is_count(number: float) -> bool:
    return number >= 1 and float(number).is_integer()


def _is_count_of(number: float, local_samples: int | None) -> bool:
    """Whether it may be a number of elements, equally many of each sample."""
    return _is_count(number) and not (local_samples and number % local_samples)


def _of_norm(node: Node) -> OtherDivisor:
    """What a norm or a standard deviation over this rank's samples makes of a loss: its gradient is divided by it."""
    value = scalar_of(getattr(node, "_saved_result", None)) or 0.0
    if node.name() == "StdBackward0":
        return OtherDivisor("made of a standard deviation over this rank's samples alone", value)
    return OtherDivisor(
        "made of a norm over this rank's samples alone (over those of all: lockstep.sum(x.square().sum()).sqrt())",
        value,
    )


def _of_selection(node: Node, is_output: Callable[[Node], bool], local_samples: int | None) -> OtherDivisor | None:
    """What a mean is, if it is over what a mask, or a list of positions, has selected from the outputs."""
    if node.name() != "MeanBackward0" and getattr(node, "_saved_reduction", None) != MEAN:
        return None
    between = (behind for behind in nodes_behind(node, is_output) if not is_output(behind))
    found = (_of_masks(behind) or _of_extremes(behind) or _of_positions(behind, local_samples) for behind in between)
    return next((one for one in found if one is not None), None)


def _of_masks(node: Node) -> OtherDivisor | None:
    """What a mean over a selection by masks is, if one of the masks leaves elements out."""
    masks = [getattr(node, "_saved_mask", None)] if node.name() == "MaskedSelectBackward0" else _indices_of(node)
    for mask in masks:
        if isinstance(mask, Tensor) and mask.dtype in _MASK_DTYPES:
            count = int(mask.count_nonzero())
            if count != mask.numel():
                return OtherDivisor(f"a mean over {count} of {mask.numel()} that a mask has selected", count)
    return None


def _of_extremes(node: Node) -> OtherDivisor | None:
    """What a mean is over the greatest or least of all rows: `topk`, or the beginning of what was sorted."""
    order = next((each for each, _ in node.next_functions), None) if node.name() == "SliceBackward0" else node
    if order is None or order.name() != ("TopkBackward0" if order is node else "SortBackward0"):
        return None
    shape: Any = getattr(order, "_saved_self_sym_sizes", ())
    if not shape or getattr(order, "_saved_dim", None) not in (0, _unsigned(-len(shape))):
        return None  # of each row on its own
    if order is node:
        count = len(getattr(node, "_saved_indices", ()))
    else:
        first, last, step = (getattr(node, f"_saved_{name}", None) for name in ("start", "end", "step"))
        count = len(range(shape[0])[first:last:step])
    if count in (0, shape[0]):
        return None
    return OtherDivisor(
        f"a mean over the first {count} of {shape[0]} in their order (which lockstep.all_gather has of all ranks)",
        count,
    )


def _unsigned(number: int) -> int:
    """As autograd's nodes show what they have saved."""
    return number % 2**64


def _of_positions(node: Node, local_samples: int | None) -> OtherDivisor | None:
    """What a mean over a selection by a list of positions is, if samples do not divide the length of the list."""
    indices = _indices_of(node)
    if not local_samples or len(indices) != 1 or not isinstance(indices[0], Tensor):
        return None
    count = indices[0].numel()
    if indices[0].dtype in _MASK_DTYPES or count % local_samples == 0:
        return None
    return OtherDivisor(f"a mean over {count} selected positions", count)


def _indices_of(node: Node) -> list[Any]:
    """What stands in the brackets of `tensor[…]`, where the node is that of such an expression."""
    return list(getattr(node, "_saved_indices", ()) or ()) if node.name() == "IndexBackward0" else []
