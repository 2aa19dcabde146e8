"""Collectives of small tensors between hosts: the tensor travels in the notice that a rank sends anyway.

See [Note: attachments] in `messages/message_team.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from lockstep.comm.hosts.pipeline import Reduction
from lockstep.comm.hosts.team import HostsTeam
from lockstep.shm.kernels import Kernel

__all__ = ["SmallTensorAlgorithms"]


class SmallTensorAlgorithms:
    """The collectives of one team over several hosts for tensors that `fits` finds small enough.

    Args:
        team: the ranks of the group.
    """

    def __init__(self, team: HostsTeam) -> None:
        self._team = team
        hosts = team.layout.hosts
        self._by_host = tuple(itertools.chain.from_iterable(hosts))
        self._starts = tuple(itertools.accumulate(map(len, hosts[:-1]), initial=0))

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether tensors of this size, the same on all ranks, may come with the notices of this collective. Local."""
        team = self._team
        return team.is_entering and 0 < tensor.numel() * tensor.element_size() <= team.attachment_bytes

    def all_reduce(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        """Reduce `tensor` in place over all ranks: every rank adds up the parts of all, in the order of large tensors.

        It adds by host, then over hosts, and rounds what would have travelled as a sum.
        """
        reduction = Reduction.by(kernel, tensor.dtype, self._team)
        self._attach(tensor if kernel.factor is None else tensor.clone().mul_(kernel.factor), timeout_s)
        rows = self._attached(tensor, self._by_host)
        if reduction.dtype != tensor.dtype:
            rows = rows.to(reduction.dtype)
        if not (reduction.wire.is_exact and self._team.layout.is_one_tree):
            rows = self._sums_of_hosts(rows, reduction)
        result = reduction.kernel.reduce_rows(rows)
        if reduction.divisor != 1:
            result.div_(reduction.divisor)
        tensor.copy_(result)

    def _sums_of_hosts(self, rows: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """A row for each host, as other hosts would see it, of rows for each rank."""
        wire, hosts, numel = reduction.wire, self._team.layout.hosts, rows.shape[1]
        sums = rows.new_empty((len(hosts), numel))
        for host, (start, ranks) in enumerate(zip(self._starts, hosts, strict=True)):
            total = reduction.kernel.reduce_rows(rows[start : start + len(ranks)])
            if not wire.is_exact:
                encoded = torch.empty(wire.num_bytes(numel), dtype=torch.uint8)
                wire.encode(total, encoded)
                total = wire.decode(encoded, torch.empty_like(total))
            sums[host] = total
        return sums

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Copy `tensor` of the root to all ranks."""
        if self._team.rank == root:
            self._attach(tensor, timeout_s)
        else:
            self._team.arrive(timeout_s)
            tensor.copy_(self._attached(tensor, [root])[0])

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float) -> None:
        """Copy each rank's `tensor` into `outputs[rank]` on all ranks; all of one size."""
        self._attach(tensor, timeout_s)
        for output, row in zip(outputs, self._attached(tensor, range(self._team.world_size)), strict=True):
            output.copy_(row)

    def _attach(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Wait for all ranks, and give them this tensor."""
        self._team.arrive(timeout_s, tensor.view(torch.uint8).numpy().tobytes())

    def _attached(self, like: torch.Tensor, ranks: Iterable[int]) -> torch.Tensor:
        """What these ranks have given: a row of `like`'s dtype and numel for each, in fresh memory."""
        data = bytearray().join(map(self._team.attached, ranks))
        return torch.frombuffer(data, dtype=like.dtype).view(-1, like.numel())
