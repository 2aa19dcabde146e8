"""Names of groups and tensors in messages. Does not import torch, for the record of torch's own groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lockstep.rank_status import DEFAULT_GROUP

if TYPE_CHECKING:
    import torch

__all__ = ["SHAPE", "describe_group", "describe_mismatch", "describe_shape", "describe_tensor", "without_ones"]

# The shape in the output of `describe_tensor`; its sizes are the regex group.
SHAPE = re.compile(r"(?<=\w)\[([\d, ]*)\]")


def describe_group(group_name: str, ranks: Sequence[int], is_default: bool) -> str:
    """The name of a group in errors.

    Args:
        group_name: torch's name for the group.
        ranks: global rank of each of its ranks.
        is_default: whether it is the default group.
    """
    return DEFAULT_GROUP if is_default else f"group {group_name} of ranks {list(ranks)}"


def describe_mismatch(calls: Iterable[str]) -> tuple[str, str]:
    """What ranks did that made these different calls, and what they must do instead."""
    if len({call.partition("); ")[0] for call in calls}) == 1:  # what follows is the batch
        advice = "Every rank must run the same passes, and take the batches of a lockstep.DataLoader in the same order."
        return "averaged gradients of different batches", advice
    advice = (
        "Every rank must call the same collective, in the same order, with the same shapes, dtype, reduce op and root. "
        "Look for a branch that only some ranks take, or a loop that some leave earlier."
    )
    return "called different operations", advice


def describe_tensor(tensor: torch.Tensor) -> str:
    """`float32[2, 3]`: the form in which errors name a tensor."""
    return describe_shape(tensor.dtype, tensor.shape)


def describe_shape(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """The same for a tensor given by dtype and shape."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def without_ones(text: str) -> str:
    """Remove dimensions of size 1 from the shapes in a text: tensors that differ only in them hold the same elements.

    Shapes of sparse tensors are kept: their indices depend on the dimensions.

    >>> without_ones("all_reduce(float32[1, 3], int64[1], SUM)")
    'all_reduce(float32[3], int64[], SUM)'
    """
    if "sparse" in text:
        return text
    return SHAPE.sub(lambda shape: f"[{', '.join(size for size in shape[1].split(', ') if size != '1')}]", text)
