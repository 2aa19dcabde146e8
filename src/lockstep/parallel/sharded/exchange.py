"""Sends each rank's part of some tensors to all others, and compares the ranks' requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.agreement import texts_that_differ
from lockstep.comm.backend import engine_of, mismatch_in
from lockstep.parallel.sharded.shares import Share
from lockstep.torch_private.tensors import foreach_copy_

__all__ = ["WORTH_SENDING", "compare", "exchange"]

WORTH_SENDING = 32 << 10  # elements from which on a part is sent as a separate message


def exchange(shares: Sequence[Share], flats: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the elements of the others. Collective.

    Args:
        shares: the same on all ranks.
        flats: for each share, a flat tensor of its parameter's size, whose own elements are sent.
        group: the ranks that have shares.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Share, torch.Tensor]]] = {}
    for share, flat in zip(shares, flats, strict=True):
        kinds.setdefault((flat.dtype, flat.device), []).append((share, flat))
    for (_, device), members in kinds.items():
        by_rank = [
            [flat[share.bounds[rank] : share.bounds[rank + 1]] for share, flat in members]
            for rank in range(group.size())
        ]
        if device.type == "cpu" and engine_of(group) is None:
            _broadcast(by_rank, group)
        else:
            _gather(by_rank, group)


def _broadcast(by_rank: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup) -> None:
    """For gloo, whose all_gather takes several times as long: large parts in place, small ones in one message."""
    works = []
    rows: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for rank, parts in enumerate(by_rank):
        small = [each for each in parts if 0 < each.numel() < WORTH_SENDING]
        rows += [(torch.cat(small), small)] if small else []
        sent = [each for each in parts if each.numel() >= WORTH_SENDING] + [row for row, _ in rows[-1:] if small]
        source = dist.get_global_rank(group, rank)
        works += [dist.broadcast(each, source, group=group, async_op=True) for each in sent]
    for work in works:
        work.wait()
    for row, parts in rows:
        foreach_copy_(list(parts), list(torch.split(row, [each.numel() for each in parts])))


def _gather(by_rank: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup) -> None:
    numels = [sum(each.numel() for each in parts) for parts in by_rank]
    own = by_rank[0][0].new_empty(max(numels))
    own[: numels[group.rank()]] = torch.cat(list(by_rank[group.rank()]))
    rows = [torch.empty_like(own) for _ in numels]
    dist.all_gather(rows, own, group=group)
    for rank, (parts, row) in enumerate(zip(by_rank, rows, strict=True)):
        if rank != group.rank():
            sizes = [each.numel() for each in parts]
            foreach_copy_(list(parts), list(torch.split(row[: numels[rank]], sizes)))


def compare(description: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks request the same, if there is no shared memory that shows it. Collective."""
    said = "; ".join(f"rank {rank} {text}" for rank, text in texts_that_differ(description, group, device))
    if said:
        raise mismatch_in(
            group,
            f"the ranks take different steps: {said}. Every rank must step with the same options, state and "
            "gradients. Give ReduceLROnPlateau, and anything else that uses a loss, the loss of all ranks "
            "(lockstep.mean(loss * len(y), len(y))), and load states on every rank",
        )
