"""Adasum: an adaptive sum of gradients, between sum and mean (Maleki et al., "Scaling Distributed Training with
Adaptive Summation", 2020).

Two gradients a and b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: the sum if they are orthogonal, the mean if
they are equal. More ranks are combined in pairs, then pairs of pairs, so their number must be a power of
two.

[Note: Adasum of GPUs] Horovod with NCCL sums tensors on GPUs within each host, combines the sums of the hosts by
Adasum, and divides the result by the number of ranks of a host; on one host that is the mean. Scripts count on it:
they multiply their learning rate by `hvd.local_size()` if `hvd.nccl_built()`, and by 1 otherwise. Then the number of
hosts must be a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["combine", "combines_hosts", "is_power_of_two", "reduce_adasum", "reduce_adasum_of_hosts"]


def is_power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, 8, …"""
    return number > 0 and number & (number - 1) == 0


def combine(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The adaptive sum of two tensors of the same shape; products in float32 or better are summed in float64. Local.

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


def combines_hosts(device_type: str) -> bool:
    """Whether hosts rather than ranks are combined. Local; see [Note: Adasum of GPUs]."""
    return device_type != "cpu" and dist.is_nccl_available() and torch.cuda.is_available()


def reduce_adasum(tensor: torch.Tensor, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
    """Replace `tensor` by the adaptive sum over the group. Collective; log2(ranks) exchanges with one peer each.

    Args:
        tensor: any shape, contiguous, a floating-point dtype; the same on all ranks.
        ranks: global ranks of the group; their number must be a power of two.
        rank: rank of this process in the group.
        group: the group.
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
        # Both peers compute the same from the same inputs in the same order.
        tensor.copy_(combine(tensor, theirs) if rank < peer else combine(theirs, tensor))
        distance *= 2


def reduce_adasum_of_hosts(
    tensor: torch.Tensor, hosts: Sequence[Sequence[int]], rank: int, group: dist.ProcessGroup
) -> None:
    """Replace `tensor` by the adaptive sum of the hosts' sums, over the ranks of a host. Collective; one all_reduce.

    Args:
        tensor: any shape, a floating-point dtype; the same on all ranks.
        hosts: ranks of each host in the group, equally many; the number of hosts must be a power of two.
        rank: rank of this process in the group.
        group: the group.
    """
    # All sums are sent at once: for a few hosts, this is no more traffic than if each rank exchanged its
    # tensor with a peer at every level, and it needs no further NCCL group.
    sums = tensor.new_zeros((len(hosts), *tensor.shape))
    (own,) = (index for index, ranks in enumerate(hosts) if rank in ranks)
    sums[own].copy_(tensor)
    dist.all_reduce(sums, group=group)
    parts = list(sums.unbind())
    while len(parts) > 1:
        parts = [combine(one, two) for one, two in zip(parts[::2], parts[1::2], strict=True)]
    tensor.copy_(parts[0]).div_(len(hosts[0]))
