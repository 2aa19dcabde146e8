"""Warns if part of a loss takes no weight, or that of other ranks, while the batch does not divide evenly among them.

Weights of ranks enter at the outputs ([Note: exact weighting] in `forward_pass.py`). A loss that a layer keeps as an
attribute, or what the script computes with the model's parameters (`model.module.head(hidden)`), bypasses the outputs,
and counts once for each rank, not for each sample. Terms on parameters (regularisers) bypass them as well, and that is
right: they do not depend on the batch.

What torch's differentiable collectives gather takes another rank's weight: their backward passes add up what comes back
on all ranks, and this rank's share weights the sum. A mean over ranks of equal weights is right.

[Note: terms] The check follows the loss down to its summands. A summand that depends on outputs, and on parameters by
another path, mixes both. A summand that depends on parameters alone is a regulariser, unless it shares nodes of the
graph with the outputs: then a layer computed it in the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor
from torch.autograd.graph import Node

from lockstep import batch
from lockstep.log import get_logger, warn_once
from lockstep.parallel.losses import COLLECTIVES, RESCALED

__all__ = ["find_bypass", "warn_of_bypass", "warn_of_collective"]

_logger = get_logger(__name__)

_MAX_NODES = 20_000
# What adds terms up, or scales them, or shapes them.
_ADDING = frozenset(
    f"{name}Backward0"
    for name in (
        "Add",
        "Sub",
        "Neg",
        "Sum",
        "Stack",
        "Unsqueeze",
        "Squeeze",
        "View",
        "Reshape",
        "Clone",
        "ToCopy",
        "Alias",
    )
)
_SCALING = ("MulBackward0", "DivBackward0", "DivBackward1")


def warn_of_bypass(loss: Tensor, roots: Collection[Node], own: frozenset[int], line: str) -> None:
    """Warn if a part of the loss goes past the outputs. Local.

    Args:
        loss: 0-dim, of a batch that the ranks do not divide.
        roots: the nodes of the model's outputs.
        own: `id` of the model's parameters.
        line: file and line of the user's call of `backward`.
    """
    found = find_bypass(loss, roots, own)
    if found is not None:
        warn_once(
            _logger,
            f"{line}: the loss contains {found}, and the ranks do not divide this batch: that part counts once for "
            "each rank, not for each sample, so the training is not that of one process. Return what the loss needs "
            "from forward(), or give the loader drop_last=True and a batch size that the ranks divide",
        )


def warn_of_collective(loss: Tensor, line: str) -> None:
    """Warn if the loss comes from outputs by a collective of torch's that gives gradients to all ranks. Local.

    Args:
        loss: 0-dim, of a batch that the ranks do not divide.
        line: file and line of the user's call of `backward`.
    """
    nodes = _behind([] if loss.grad_fn is None else [loss.grad_fn], batch.is_marked)
    names = {node.name() for node in nodes if not batch.is_marked(node)}
    if any(word in name for name in names for word in COLLECTIVES):
        warn_once(
            _logger,
            f"{line}: the loss is computed from what a collective of torch's has gathered with gradients, and the "
            "ranks do not divide this batch: each rank weights by its own share what comes back from all of them, and "
            "fillers count, so the training is not that of one process. Gather with lockstep.all_gather, or give the "
            "loader drop_last=True and a batch size that the ranks divide",
        )


def find_bypass(
    loss: Tensor, roots: Collection[Node], own: frozenset[int], is_output: Callable[[Node], bool] = batch.is_marked
) -> str | None:
    """What goes past the outputs, in words; None if nothing does. Local. See [Note: terms].

    Args:
        loss: 0-dim.
        roots: the nodes of the model's outputs.
        own: `id` of the model's parameters.
        is_output: whether a node is that of an output of the model, or of another engine's.
    """
    inside: set[Node] | None = None
    for term in _terms(loss.grad_fn, is_output):
        nodes = _behind([term], is_output)
        if not any(id(getattr(node, "variable", None)) in own for node in nodes):
            continue
        if any(is_output(node) for node in nodes):
            return "what is computed from outputs of the model and from its parameters, past its forward()"
        if inside is None:
            inside = {node for node in _behind(roots) if node.next_functions}
        if not inside.isdisjoint(nodes):
            return "what was computed within forward() and not returned, such as a loss kept as an attribute"
    return None


def _terms(root: Node | None, is_output: Callable[[Node], bool]) -> list[Node]:
    """What is added up at `root`, each once; outputs themselves are no terms."""
    stack, seen, found = [] if root is None else [root], set[Node](), []
    while stack and len(seen) < _MAX_NODES:
        node = stack.pop()
        if node in seen or node.name() == RESCALED or is_output(node):
            continue
        seen.add(node)
        following = [each for each, _ in node.next_functions if each is not None]
        if node.name() in _ADDING or (node.name() in _SCALING and len(following) == 1):
            stack.extend(following)
        else:
            found.append(node)
    return found


def _behind(roots: Iterable[Node], is_end: Callable[[Node], bool] = lambda _: False) -> set[Node]:
    """The nodes behind some, these included; nothing behind those at the end, or what takes the weight off."""
    stack, seen = list(roots), set[Node]()
    while stack and len(seen) < _MAX_NODES:
        node = stack.pop()
        if node in seen or node.name() == RESCALED:
            continue
        seen.add(node)
        if not is_end(node):
            stack.extend(following for following, _ in node.next_functions if following is not None)
    return seen
