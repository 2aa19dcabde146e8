"""The collectives of a team whose ranks exchange tensors, and share no memory.

Each begins with `team.arrive`, which acts only once in a call with several tensors.

[Note: shares] A large all_reduce is two exchanges: every rank receives its share of all ranks' tensors, reduces it, and
sends the result to all. Each byte crosses between two ranks 2 (W - 1) / W times, the minimum, and is added by one rank
only, in the fixed tree of `Kernel.reduce`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep.comm.contract import Algorithms
from lockstep.comm.messages.message_team import MessageTeam
from lockstep.shm.algorithms import share_bounds
from lockstep.shm.kernels import Kernel

__all__ = ["MessageAlgorithms"]

# Up to this size every rank reduces the whole tensor: one exchange instead of two.
_REDUNDANT_BYTES = 8 << 10
# Tensors are reduced in pieces of this size, so that the parts of all ranks need no more memory than this.
_REDUCED_AT_ONCE_BYTES = 32 << 20


class MessageAlgorithms(Algorithms):
    """The collectives of one team, as exchanges between its ranks.

    Args:
        team: the ranks of the group.
    """

    def __init__(self, team: MessageTeam[Any]) -> None:
        self._team = team

    def barrier(self, timeout_s: float) -> None:
        self._team.arrive(timeout_s)

    def all_reduce(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        team = self._team
        team.arrive(timeout_s)
        if kernel.factor is not None:
            tensor.mul_(kernel.factor)
        for piece in _pieces(tensor):
            if piece.numel() * piece.element_size() <= _REDUNDANT_BYTES:
                self._all_reduce_redundant(piece, kernel, timeout_s)
            else:
                self._all_reduce_shared(piece, kernel, timeout_s)

    def _all_reduce_redundant(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        """Every rank receives the tensors of all ranks and reduces them completely."""
        team = self._team
        parts = team.scratch(tensor)
        parts[team.rank].copy_(tensor)
        self._exchange([tensor] * team.world_size, parts, timeout_s)
        kernel.reduce(parts, tensor)

    def _all_reduce_shared(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        """Every rank reduces its share and sends it to all. See [Note: shares]."""
        team = self._team
        shares = _shares(tensor, team.world_size)
        own = shares[team.rank]
        self._reduce_share(shares, own, kernel, timeout_s)
        self._exchange([own] * team.world_size, shares, timeout_s)

    def _reduce_share(
        self, shares: Sequence[torch.Tensor], out: torch.Tensor, kernel: Kernel, timeout_s: float
    ) -> None:
        """Reduce this rank's share of all ranks' tensors into `out`, which may be that share itself."""
        team = self._team
        own = shares[team.rank]
        parts = team.scratch(own)
        self._exchange(shares, parts, timeout_s)
        result = out
        if team.world_size > 2:
            # The tree must not write its result into one of its parts, and `out` may be this rank's share.
            result = parts[team.rank]
        parts[team.rank] = own
        kernel.reduce(parts, result)
        if result is not out:
            out.copy_(result)

    def reduce(self, tensor: torch.Tensor, kernel: Kernel, root: int, timeout_s: float) -> None:
        team = self._team
        team.arrive(timeout_s)
        for piece in _pieces(tensor):
            source = piece if kernel.factor is None else piece * kernel.factor
            if piece.numel() * piece.element_size() <= _REDUNDANT_BYTES:
                parts = team.scratch(piece) if team.rank == root else None
                self._gather(parts, source, root, timeout_s)
                if parts is not None:
                    kernel.reduce(parts, piece)
                continue
            shares = _shares(source, team.world_size)
            reduced = torch.empty_like(shares[team.rank])
            self._reduce_share(shares, reduced, kernel, timeout_s)
            self._gather(_shares(piece, team.world_size) if team.rank == root else None, reduced, root, timeout_s)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        team = self._team
        team.arrive(timeout_s)
        team.broadcast(tensor, root, timeout_s)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float) -> None:
        team = self._team
        team.arrive(timeout_s)
        self._exchange([tensor] * team.world_size, outputs, timeout_s)
        outputs[team.rank].copy_(tensor)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        team = self._team
        team.arrive(timeout_s)
        self._gather(outputs, tensor, root, timeout_s)

    def _gather(
        self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int, timeout_s: float
    ) -> None:
        team = self._team
        if outputs is None:
            team.exchange([(root, tensor)], [], timeout_s)
        else:
            team.exchange([], [(peer, outputs[peer]) for peer in team.peers], timeout_s)
            outputs[root].copy_(tensor)

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int, timeout_s: float) -> None:
        team = self._team
        team.arrive(timeout_s)
        if inputs is None:
            team.exchange([], [(root, tensor)], timeout_s)
        else:
            team.exchange([(peer, inputs[peer]) for peer in team.peers], [], timeout_s)
            tensor.copy_(inputs[root])

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], kernel: Kernel, timeout_s: float
    ) -> None:
        team = self._team
        team.arrive(timeout_s)
        length = max(_REDUCED_AT_ONCE_BYTES // tensor.element_size() // team.world_size, 1)
        for start in range(0, max(source.numel() for source in inputs), length):
            shares = [source[start : start + length] for source in inputs]
            if kernel.factor is not None:
                shares = [share * kernel.factor for share in shares]
            self._reduce_share(shares, tensor[start : start + length], kernel, timeout_s)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], _largest: int, timeout_s: float
    ) -> None:
        """Copy `inputs[peer]` of this rank into `outputs[this rank]` of each peer."""
        team = self._team
        team.arrive(timeout_s)
        self._exchange(inputs, outputs, timeout_s)
        outputs[team.rank].copy_(inputs[team.rank])

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Send `sent[peer]` to each peer, and receive `received[peer]` from it."""
        peers = self._team.peers
        self._team.exchange(
            [(peer, sent[peer]) for peer in peers], [(peer, received[peer]) for peer in peers], timeout_s
        )


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of a flat tensor that are reduced one after another; the tensor itself if it is small."""
    length = _REDUCED_AT_ONCE_BYTES // tensor.element_size()
    for start in range(0, tensor.numel(), length):
        yield tensor[start : start + length]


def _shares(tensor: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """One part of a flat tensor for each rank."""
    bounds = share_bounds(tensor.numel(), world_size)
    return [tensor[low:high] for low, high in itertools.pairwise(bounds)]
