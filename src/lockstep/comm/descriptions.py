"""How the flight record describes a collective: the text that determines its fingerprint and that people read.

Dimensions of size 1 are shown, but do not affect the fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm.flight_recorder import fingerprint
from lockstep.comm.wording import describe_tensor, without_ones

__all__ = ["describe_call", "describe_rows"]

# This many tensors are listed; a fingerprint stands for the rest.
_NUM_SHOWN = 4


def describe_call(
    operation: str,
    tensors: Sequence[torch.Tensor],
    op: str | None = None,
    root: int | None = None,
    offsets: Sequence[int | None] = (),
) -> str:
    """`all_reduce(float32[10], SUM)`.

    Args:
        operation: name of the collective.
        tensors: the tensors that it moves, in any shape and dtype.
        op: the reduce operation; None for none.
        root: global rank of the root; None for none.
        offsets: offset of each tensor in symmetric memory, or None. They affect the fingerprint, because such tensors
            are reduced in place.
    """
    parts = [describe_tensor(tensor) for tensor in tensors[:_NUM_SHOWN]]
    if len(tensors) > _NUM_SHOWN:
        rest = "".join(map(describe_tensor, tensors[_NUM_SHOWN:]))
        parts.append(f"… {len(tensors)} tensors {fingerprint(without_ones(rest)):x}")
    if op is not None:
        parts.append(op)
    if root is not None:
        parts.append(f"root={root}")
    if any(offset is not None for offset in offsets):
        shown = ", ".join(map(str, offsets[:_NUM_SHOWN]))
        rest = f" {fingerprint(str(offsets)):x}" if len(offsets) > _NUM_SHOWN else ""
        parts.append(f"symmetric memory at {shown}{rest}")
    return f"{operation}({', '.join(parts)})"


def describe_rows(
    operation: str, tensors: Sequence[torch.Tensor], sizes: list[list[int]], op: str | None = None
) -> str:
    """`all_gather(float32[10])`, or with all sizes if they differ from rank to rank.

    Args:
        operation: name of the collective.
        tensors: one for each row.
        sizes: numel of each tensor of each row.
        op: the reduce operation; None for none.
    """
    if all(len(set(row)) == 1 for row in sizes):
        return describe_call(operation, tensors, op)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    suffix = f", {op}" if op else ""
    return f"{operation}({dtype} of uneven sizes {str(sizes)[:160]} {fingerprint(str(sizes)):x}{suffix})"
