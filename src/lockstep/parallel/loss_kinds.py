"""Warns of a loss whose autograd graph shows that it is no mean over samples.

Such a loss needs `lockstep.mean` or `lockstep.sum` ([Note: divisors] in `losses.py`). Gradients do not show the
divisor, so `loss_watch.py` hands the loss of the first steps to this check. It finds six kinds:

- a sum over samples;
- a sum divided by something else than the samples or the summed elements;
- a mean over targets of which some are ignored or weighted by class, or of which samples have more or fewer;
- a mean over outputs that a mask, or their order, selected;
- a norm or a standard deviation over all samples of this rank;
- a ratio, by sums over all samples of this rank, as a dice loss of a whole batch.

[Note: constants] `(loss * mask).sum() / (len(x) * MAX_LENGTH)` is a mean over samples, times a constant. One loss does
not tell it from a sum divided by a count of words; the next ones do, since a count for each sample changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lockstep import batch
from lockstep.log import get_logger
from lockstep.parallel.loss_graph import (
    DIVISIONS,
    MEAN,
    SUM,
    GraphPlace,
    adds_up_samples,
    is_scalar_output,
    nodes_behind,
    norms_of_samples,
    places_until_outputs,
    ratios_of_samples,
    scalar_of,
    signed,
    summed_sizes,
    sums_inside,
)

__all__ = ["OtherDivisor", "find_other_divisor", "warn_of_other_divisor"]


_MASK_DTYPES = (torch.bool, torch.uint8)
_EPSILON = 1e-4
_RATIO = "made of a ratio, by sums over this rank's samples alone (over those of all: lockstep.all_gather(output))"
_found: dict[str, str] = {}  # lines of which was warned, and what they are


def warn_of_other_divisor(loss: Tensor, local_samples: int | None, line: str, constants: dict[str, float]) -> None:
    """Warn if the loss is seen to be no mean over samples. Local.

    Args:
        loss: 0-dim, before its backward pass.
        local_samples: of this rank in this loss; None where nobody knows.
        line: file and line of the user's call of `backward`.
        constants: for each line what may be a constant by which its losses are divided; is written. See
            [Note: constants].
    """
    try:
        found = find_other_divisor(loss, local_samples)
    except RuntimeError:  # what the nodes have saved is gone: the graph was walked backward before
        return
    if found is None or line in _found:
        return
    if found.may_be_constant and found.value is not None:
        for_each_sample = found.value / (local_samples or 1)
        if math.isclose(constants.setdefault(line, for_each_sample), for_each_sample, rel_tol=_EPSILON):
            return
    _found[line] = found.text
    get_logger(__name__).warning(
        f"{line}: this loss is {found.text}, not a mean over samples, by which ranks are weighted: the "
        "training is not that of one process. Write lockstep.mean(loss_sum, count) for a sum divided by a count "
        "of this rank's (valid tokens, weights of classes), lockstep.sum(loss) for a sum, "
        "lockstep.all_gather(output) before samples are compared with each other, "
        "lockstep.global_loss(loss) for what every rank has computed over the data of all, and where the script "
        "itself divides gradients behind backward() by a count of all ranks, as fairseq does",
    )


@dataclass(frozen=True)
class OtherDivisor:
    """By what a loss is divided on this rank, other than its samples.

    Attributes:
        text: what that makes of it, such as "a sum".
        value: what it is divided by; None for a sum.
        may_be_constant: the value may be this rank's samples times a constant. See [Note: constants].
    """

    text: str
    value: float | None = None
    may_be_constant: bool = False


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
    unsure = None
    for found in _all_found(loss, local_samples, is_output):
        if not found.may_be_constant:
            return found
        unsure = unsure or found
    return unsure


def _all_found(loss: Tensor, local_samples: int | None, is_output: Callable[[Node], bool]) -> Iterator[OtherDivisor]:
    between, outputs = places_until_outputs(loss, is_output)
    for place in between:
        node = place.node
        found = _of_sum(place, local_samples)
        if found is not None and adds_up_samples(node, local_samples, is_output):
            yield found
        found = _of_selection(node, is_output, local_samples) or _of_targets(node, local_samples)
        if found is not None and any(is_output(behind) for behind in nodes_behind(node, is_end=is_output)):
            yield found
    yield from map(_of_norm, norms_of_samples(between, local_samples, is_output))
    yield from (OtherDivisor(_RATIO) for _ in ratios_of_samples(between, local_samples, is_output))
    # Outputs without dimensions are walked first: losses.
    targets = map(_of_targets, nodes_behind(*sorted((output.node for output in outputs), key=is_scalar_output)))
    sums = (_of_sum(place, local_samples) for place in sums_inside(outputs, local_samples))
    yield from (found for found in chain(targets, sums) if found is not None)


def _of_targets(node: Node, local_samples: int | None = None) -> OtherDivisor | None:
    """What a mean of torch's over targets is, if some are ignored or weighted, or samples have more or fewer of them.

    Args:
        node: any, such as that of a sum over targets that is divided by their number.
        local_samples: of this rank; None where nobody knows.
    """
    is_division = node.name() in DIVISIONS
    loss = node.next_functions[0][0] if is_division else node
    if getattr(loss, "_saved_reduction", None) != (SUM if is_division else MEAN):
        return None
    total_weight: Any = getattr(loss, "_saved_total_weight", None)
    if total_weight is None:
        return None
    saved: list[Any] = [getattr(loss, f"_saved_{name}", None) for name in ("target", "weight", "ignore_index")]
    targets, weight, ignored = saved
    # In 16 bits the node's own count of targets is rounded.
    valid, is_weighted = int((targets != signed(ignored)).count_nonzero()), weight is not None
    value = float(total_weight) if is_weighted else valid
    if is_division and scalar_of(getattr(node, "_saved_other", None)) != value:
        return None
    if is_weighted and value != valid:
        return OtherDivisor("a mean over targets weighted by class (weight=)", value)
    if valid != targets.numel():
        counted = f"{valid} of {targets.numel()} targets"
        return OtherDivisor(f"a mean over {counted}, the others being ignored (ignore_index=)", valid)
    if local_samples and valid > local_samples and valid % local_samples:
        return OtherDivisor(f"a mean over {valid} targets of {local_samples} samples", valid)
    return None


def _of_sum(place: GraphPlace, local_samples: int | None) -> OtherDivisor | None:
    """What a `sum()` with its divisors is, if it is seen to be no mean over all that was summed, or over samples.

    Args:
        place: of any node.
        local_samples: of this rank; None where nobody knows.
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
    if is_mean:
        return None
    may_be_constant = any(_is_count_of(divisor, local_samples) for divisor in (*divisors, product))
    return OtherDivisor(f"a sum divided by {product:g}", product, may_be_constant)


def _is_count(number: float) -> bool:
    """Whether it is a whole number, to which what keeps from a division by zero may have been added."""
    if not math.isfinite(number):
        return False
    return round(number) >= 1 and math.isclose(number, round(number), rel_tol=0, abs_tol=_EPSILON)


def _is_count_of(number: float, local_samples: int | None) -> bool:
    """Whether it may be a number of elements, equally many of each sample."""
    return _is_count(number) and not (local_samples and round(number) % local_samples)


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
    between = (behind for behind in nodes_behind(node, is_end=is_output) if not is_output(behind))
    found = (_of_masks(behind) or _of_extremes(behind) or _of_positions(behind, local_samples) for behind in between)
    return next((one for one in found if one is not None), None)


def _of_masks(node: Node) -> OtherDivisor | None:
    """What a mean over a selection by masks is, if one of the masks leaves elements out."""
    masks = [getattr(node, "_saved_mask", None)] if node.name() == "MaskedSelectBackward0" else _indices_of(node)
    for mask in masks:
        if isinstance(mask, Tensor) and mask.dtype in _MASK_DTYPES:
            count = int(mask.count_nonzero())
            is_alike = _is_alike_in_rows(mask)
            if count != mask.numel() and not (is_alike and len(mask) > 1):
                return OtherDivisor(f"a mean over {count} of {mask.numel()} that a mask has selected", count, is_alike)
    return None


def _is_alike_in_rows(mask: Tensor) -> bool:
    """Whether a mask leaves as many elements in each row, as one that leaves out its diagonal; true of one row."""
    if mask.dim() < 2:
        return False
    counts = mask.flatten(1).count_nonzero(1)
    return bool((counts == counts[:1]).all())


def _of_extremes(node: Node) -> OtherDivisor | None:
    """What a mean is over the greatest or least of all rows: `topk`, or the beginning of what was sorted."""
    order = next((each for each, _ in node.next_functions), None) if node.name() == "SliceBackward0" else node
    if order is None or order.name() != ("TopkBackward0" if order is node else "SortBackward0"):
        return None
    shape: Any = getattr(order, "_saved_self_sym_sizes", ())
    if not shape or signed(getattr(order, "_saved_dim", 1)) not in (0, -len(shape)):
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
