"""Sums of large tensors over several hosts, by the first ranks of all hosts. See `first_ranks.py`.

The ranks of a host add up their tensors in the memory of their first rank; the first ranks add up theirs by Gloo's
ring, in that memory; and each rank copies the result from there. If a host has several ranks, large tensors pass
through these stages in pieces, so that network and memory work at the same time. A ring of small pieces is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.comm.hosts.layout import is_summed_by_first_ranks, num_pieces_of_sum
from lockstep.comm.hosts.pipeline import Reduction
from lockstep.comm.hosts.team import HostsTeam
from lockstep.shm.algorithms import SharedMemoryAlgorithms, share_bounds
from lockstep.shm.kernels import divide

__all__ = ["LargeSums"]

_DTYPES = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))


class LargeSums:
    """The sums of one team over several hosts, for tensors large enough for `fits`.

    Args:
        team: the ranks of the group.
        local: the collectives among this host's ranks.
    """

    def __init__(self, team: HostsTeam, local: SharedMemoryAlgorithms) -> None:
        self._team, self._local = team, local

    def fits(self, tensor: torch.Tensor, reduction: Reduction) -> bool:
        """Whether to reduce tensors of this size, the same on all ranks, in this way. Local."""
        adds_as_it_is = reduction.kernel.combine is torch.add and reduction.dtype == tensor.dtype
        is_sum = adds_as_it_is and tensor.dtype in _DTYPES and reduction.wire.is_exact
        num_bytes = tensor.numel() * tensor.element_size()
        return is_sum and is_summed_by_first_ranks(num_bytes)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, timeout_s: float) -> None:
        """Sum a flat contiguous tensor in place over all ranks. After `arrive`."""
        is_alone = self._team.local.world_size == 1
        pieces = self._pieces(tensor)

        def gather(number: int) -> None:
            self._local.reduce(pieces[number], reduction.kernel, 0, timeout_s)

        def spread(number: int) -> None:
            self._local.broadcast(pieces[number], 0, timeout_s)

        self._add_up(pieces, _nothing if is_alone else gather, _nothing if is_alone else spread, reduction, timeout_s)

    def all_reduce_symmetric(self, parts: Sequence[torch.Tensor], reduction: Reduction, timeout_s: float) -> None:
        """Sum the parts of all ranks of all hosts, and write the result into each part of this host. After `arrive`.

        Args:
            parts: a flat tensor for each rank of this host, all of the same numel and dtype, and complete.
            reduction: how to combine the parts.
            timeout_s: seconds until each wait is an error.
        """
        local = self._team.local
        all_pieces = list(zip(*map(self._pieces, parts), strict=True))
        local.begin_transfer()

        def gather(number: int) -> None:
            pieces = all_pieces[number]
            bounds = share_bounds(pieces[0].numel(), len(pieces))
            low, high = bounds[local.rank], bounds[local.rank + 1]
            if len(pieces) > 1 and high > low:
                shares = [piece[low:high] for piece in pieces]
                reduction.within_host_into(shares, shares[0])
            local.step(timeout_s)

        def spread(number: int) -> None:
            local.step(timeout_s)
            if local.rank:
                all_pieces[number][local.rank].copy_(all_pieces[number][0])

        self._add_up([pieces[0] for pieces in all_pieces], gather, spread, reduction, timeout_s)

    def _pieces(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The pieces to sum, the same on all hosts, since each has its own ring: one if no host has several ranks."""
        if self._team.layout.num_channels == 1:
            return [tensor]
        numel = tensor.numel()
        return torch.split(tensor, -(-numel // num_pieces_of_sum(numel * tensor.element_size())))

    def _add_up(
        self,
        pieces: Sequence[torch.Tensor],
        gather: Callable[[int], None],
        spread: Callable[[int], None],
        reduction: Reduction,
        timeout_s: float,
    ) -> None:
        """Sum piece by piece: while one is between hosts, the next is gathered and the previous one spread.

        Args:
            pieces: of the tensor of this host's first rank.
            gather: sums the piece with a given number over the ranks of this host, all of which call it.
            spread: distributes the result for that piece to the ranks of this host, all of which call it.
            reduction: provides the divisor.
            timeout_s: seconds until each wait is an error.
        """
        team, last = self._team, len(pieces) - 1
        is_first = team.first_ranks.is_one
        gather(0)
        under_way = team.start_sum(pieces[0], timeout_s) if is_first else None
        for number, piece in enumerate(pieces):
            if number < last:
                gather(number + 1)
            if under_way is not None:
                team.wait_for_sum(under_way, timeout_s)
                under_way = team.start_sum(pieces[number + 1], timeout_s) if number < last else None
                if reduction.divisor != 1:
                    divide(piece, reduction.divisor)
            spread(number)


def _nothing(_: int) -> None:
    """Do nothing: the host has only one rank."""
