"""Collectives of small tensors between hosts: the tensor travels in the control message that a rank sends anyway.

See [Note: attachments] in `messages/message_team.py`.

[Note: numpy adds] Sums of dtypes that numpy supports are computed by numpy, in the same tree. A call of torch costs
more than adding a few numbers, especially if many ranks share a core and its caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.comm.hosts.pipeline import Reduction
from lockstep.comm.hosts.team import HostsTeam
from lockstep.shm.kernels import Kernel, divide

__all__ = ["SmallTensorAlgorithms"]

_DTYPES_OF_NUMPY = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))


class SmallTensorAlgorithms:
    """The collectives of one team over several hosts, for tensors small enough for `fits`.

    Args:
        team: the ranks of the group.
    """

    def __init__(self, team: HostsTeam) -> None:
        self._team = team
        hosts = team.layout.hosts
        self._by_host = tuple(itertools.chain.from_iterable(hosts))
        self._starts = tuple(itertools.accumulate(map(len, hosts[:-1]), initial=0))

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether tensors of this size, the same on all ranks, fit into this collective's control messages. Local."""
        team = self._team
        return team.is_entering and 0 < tensor.numel() * tensor.element_size() <= team.attachment_bytes

    def all_reduce(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        """Reduce `tensor` in place over all ranks: every rank adds up all parts, in the order used for large tensors.

        It adds within each host, then over hosts, and rounds the hosts' sums as if they had been sent.
        """
        reduction = Reduction.by(kernel, tensor.dtype, self._team)
        is_one_tree = reduction.wire.is_exact and self._team.layout.is_one_tree
        adds_as_it_is = kernel.combine is torch.add and kernel.factor is None and reduction.dtype == tensor.dtype
        if is_one_tree and adds_as_it_is and tensor.dtype in _DTYPES_OF_NUMPY:
            self._add_by_numpy(tensor, timeout_s)
            if reduction.divisor != 1:
                divide(tensor, reduction.divisor)
            return
        self._attach(tensor if kernel.factor is None else tensor.clone().mul_(kernel.factor), timeout_s)
        rows = self._attached(tensor, self._by_host)
        if reduction.dtype != tensor.dtype:
            rows = rows.to(reduction.dtype)
        if not is_one_tree:
            rows = self._sums_of_hosts(rows, reduction)
        result = reduction.kernel.reduce_rows(rows)
        if reduction.divisor != 1:
            divide(result, reduction.divisor)
        tensor.copy_(result)

    def _add_by_numpy(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Sum `tensor` over all ranks in a single tree. See [Note: numpy adds]."""
        own: np.ndarray[Any, Any] = tensor.numpy()
        self._team.arrive(timeout_s, own.tobytes())
        data = bytearray().join(map(self._team.attached, self._by_host))
        rows = np.frombuffer(data, own.dtype).reshape(-1, own.size)
        with np.errstate(all="ignore"):  # like torch
            while (count := len(rows)) > 1:
                sums = rows[: count - 1 : 2] + rows[1::2]
                # A part without a partner is passed up unchanged.
                rows = np.concatenate((sums, rows[-1:])) if count & 1 else sums
        own[:] = rows[0]

    def _sums_of_hosts(self, rows: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """The sum of each host, as other hosts would receive it: one row for each host, from one row for each rank."""
        wire, hosts, numel = reduction.wire, self._team.layout.hosts, rows.shape[1]
        sums = rows.new_empty((len(hosts), numel))
        for host, (start, ranks) in enumerate(zip(self._starts, hosts, strict=True)):
            total = reduction.kernel.reduce_rows(rows[start : start + len(ranks)])
            if not wire.is_exact:
                encoded = torch.empty(wire.num_bytes(numel), dtype=torch.uint8, device="cpu")
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
        """Copy each rank's `tensor` into `outputs[rank]` on all ranks; all have the same size."""
        self._attach(tensor, timeout_s)
        for output, row in zip(outputs, self._attached(tensor, range(self._team.world_size)), strict=True):
            output.copy_(row)

    def _attach(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Wait for all ranks, and send them this tensor."""
        self._team.arrive(timeout_s, tensor.view(torch.uint8).numpy().tobytes())

    def _attached(self, like: torch.Tensor, ranks: Iterable[int]) -> torch.Tensor:
        """The attachments of these ranks: a new tensor with a row of `like`'s dtype and numel for each."""
        data = bytearray().join(map(self._team.attached, ranks))
        return torch.frombuffer(data, dtype=like.dtype).view(-1, like.numel())
