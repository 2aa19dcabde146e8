"""Adasum: a sum of gradients that keeps its length where they agree (Maleki et al., "Scaling Distributed Training with
Adaptive Summation", 2020).

Two gradients a and b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: the sum if they are orthogonal, the mean if
they are equal. More ranks are combined in pairs, then pairs of pairs, which is why their number must be a power of
two.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["combine", "is_power_of_two", "reduce_adasum"]


def is_power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, 8, …"""
    return number > 0 and number & (number - 1) == 0


def combine(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The adaptive sum of two tensors of one shape; dot products in float64 of a float32 product or better. Local.

    >>> combine(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).tolist()
    [1.0, 1.0]
    >>> combine(torch.tensor([2.0]), torch.tensor([2.0])).tolist()
    [2.0]
    """
    one, two = first.double().reshape(-1), second.double().reshape(-1)
    dot, one_square, two_square = float(one @ two), float(one @ one), float(two @ two)
    one_weight = 1.0 - dot / (2 * one_square) if one_square else 1.0
    two_weight = 1.0 - dot / (2 * two_square) if two_square else 1.0
    return (one * one_weight + two * two_weight).reshape(first.shape).to(first.dtype)


def reduce_adasum(tensor: torch.Tensor, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
    """Replace `tensor` by the adaptive sum over the group. Collective; log2(ranks) exchanges with one peer each.

    Args:
        tensor: any shape, contiguous, a floating-point dtype; the same on all ranks.
        ranks: global ranks of the group, as many as a power of two.
        rank: of this process in the group.
        group: its ranks take part.
    """
    distance = 1
    while distance < len(ranks):
        peer = rank ^ distance
        theirs = torch.empty_like(tensor)
        works = [
            dist.isend(tensor, ranks[peer], group=group),
            dist.irecv(theirs, ranks[peer], group=group),
        ]
        for work in works:
            assert work is not None
            work.wait()
        # Both sides compute the same from the same in the same order.
        tensor.copy_(combine(tensor, theirs) if rank < peer else combine(theirs, tensor))
        distance *= 2
