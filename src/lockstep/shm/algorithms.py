"""The collectives of one host, as transfers through the slots of a team.

All take flat, contiguous CPU tensors and run in the calling thread. Every rank calls the same method with the same
sizes; the flight recorder verifies that at the first step. Each method moves its data in chunks of a slot, so any size
works with bounded shared memory. All may raise `PeerFailure`. See [Note: two slots] in team.py for why no transfer ends
in a barrier.

[Note: who writes a line] Moving a cache line between cores costs little if the core that writes it was the last to read
it, and up to ten times more if it was the last to write it and another core has read it since (measured on Zen 4: 25
GB/s against 2.4). So in a large all_reduce each line of a slot belongs to a pair of ranks that take turns: the owner of
the slot writes its values, the rank whose share it is reads them and overwrites them with the result, the owner reads
the result and writes again two transfers later. On other processors, groups of more than two ranks keep results in
their own slots, and each rank reads all of them: a result is written once (`writes_lines_by_turns` in processor.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from lockstep.shm.kernels import Kernel
from lockstep.shm.processor import bytes_reduced_by_all, writes_lines_by_turns
from lockstep.shm.row_tree import ALIGNMENT, RowShare, RowTree
from lockstep.shm.team import Region, SharedMemoryTeam

__all__ = ["ROWS_BYTES", "SharedMemoryAlgorithms", "reduce_in_place", "reduce_into", "share_bounds"]

# A share is reduced in pieces of this size: what is read, added and written again must stay in a core's private cache.
_PIECE_BYTES = 256 << 10
_PIECE_BYTES_FOR_TWO = 512 << 10
# The same for all rows of more than two ranks together, over which their tree goes back and forth.
ROWS_BYTES = 1 << 20
_TREES = 64
# Bytes of the whole operation, slot, dtype, elements of each row, dtype in which kernels accumulate.
_Key = tuple[int, int, torch.dtype, int, torch.dtype | None]
_Kept = TypeVar("_Kept")


def share_bounds(numel: int, world_size: int, alignment: int = ALIGNMENT) -> list[int]:
    """Bounds that divide `numel` elements among ranks at cache line boundaries; world_size + 1 numbers."""
    return [numel * rank // world_size // alignment * alignment for rank in range(world_size)] + [numel]


class SharedMemoryAlgorithms:
    """The collectives of one shared-memory team.

    Args:
        team: the ranks of the group.
    """

    def __init__(self, team: SharedMemoryTeam) -> None:
        self._team = team
        self._bytes_reduced_by_all = bytes_reduced_by_all(team.world_size)
        self._is_handed_back = writes_lines_by_turns()
        self._trees: dict[_Key, tuple[torch.Tensor, RowTree]] = {}
        self._shares: dict[_Key, RowShare] = {}
        self._sums = torch.empty(0, dtype=torch.uint8, device="cpu")

    def barrier(self, timeout_s: float) -> None:
        """Wait for every other rank."""
        team = self._team
        team.begin_transfer()
        team.step(timeout_s)

    def all_reduce(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        """Reduce `tensor` in place over all ranks."""
        team = self._team
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > self._bytes_reduced_by_all:
            if team.world_size < 3:
                self._all_reduce_by_two(tensor, kernel, timeout_s)
            else:
                self._all_reduce_by_many(tensor, kernel, timeout_s)
            return
        # Each rank reads all slots and reduces them completely: one step. The tensor fits a small slot.
        slot = team.begin_transfer()
        if team.world_size < 3:
            views = team.views(slot, num_bytes, tensor.dtype, tensor.numel())
            _load(views[team.rank], tensor, kernel)
            team.step(timeout_s)
            kernel.reduce(views, tensor)
            return
        key = (num_bytes, slot, tensor.dtype, tensor.numel(), kernel.accumulate)
        own, tree = self._trees.get(key) or self._plant(key, kernel)
        _load(own, tensor, kernel)
        team.step(timeout_s)
        tree.reduce(kernel, tensor)

    def _plant(self, key: _Key, kernel: Kernel) -> tuple[torch.Tensor, RowTree]:
        """This rank's row, and the tree over all rows, for small tensors of this kind."""
        rows = self._team.rows(*key[:4])
        tree = RowTree(rows, self._sums_of(rows.numel(), kernel.accumulate or rows.dtype).view(rows.shape))
        return _keep(self._trees, key, (rows[self._team.rank], tree))

    def _sums_of(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements from a single buffer for the sums of all trees: collectives of a group run one at a time."""
        num_bytes = numel * dtype.itemsize
        if num_bytes > self._sums.numel():
            self._sums = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self._trees.clear()
            self._shares.clear()
        return self._sums[:num_bytes].view(dtype)

    def _share_of(self, rows: torch.Tensor, kernel: Kernel, is_handed_back: bool) -> RowShare:
        dtype = kernel.accumulate or rows.dtype
        sums = self._sums_of(ROWS_BYTES // dtype.itemsize, dtype)
        return RowShare(rows, self._team.rank, sums, is_handed_back)

    def _all_reduce_by_many(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        """Each rank reduces its share of a chunk for all: two steps. See `RowShare`."""
        team = self._team
        num_bytes = tensor.numel() * tensor.element_size()
        for part in torch.split(tensor, team.prepare(num_bytes, timeout_s) // tensor.element_size()):
            key = (num_bytes, team.begin_transfer(), part.dtype, part.numel(), kernel.accumulate)
            share = self._shares.get(key)
            if share is None:
                share = self._share_of(team.rows(*key[:4]), kernel, self._is_handed_back)
                _keep(self._shares, key, share)
            _load(share.own, part, kernel)
            team.step(timeout_s)
            share.reduce(kernel)
            team.step(timeout_s)
            share.copy_to(part)
        team.finish(num_bytes)

    def _all_reduce_by_two(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        """Each rank reduces its share of a chunk and writes it back: two steps. See [Note: who writes a line]."""
        team = self._team
        rank, world_size = team.rank, team.world_size
        for start, stop, views in self._transfers(tensor.numel(), tensor.dtype, timeout_s):
            part = tensor[start:stop]
            bounds = share_bounds(stop - start, world_size)
            low, high = bounds[rank], bounds[rank + 1]
            mine = views[rank]
            if low:
                _load(mine[:low], part[:low], kernel)
            if high < stop - start:
                _load(mine[high:], part[high:], kernel)
            own = part[low:high]
            team.step(timeout_s)
            if kernel.factor is not None:
                own.mul_(kernel.factor)
            shares = [own if peer == rank else views[peer][low:high] for peer in range(world_size)]
            reduce_in_place(shares, rank, 0, high - low, kernel)
            team.step(timeout_s)
            if low:
                part[:low].copy_(mine[:low])
            if high < stop - start:
                part[high:].copy_(mine[high:])

    def all_reduce_symmetric(
        self, region: Region, offset_bytes: int, tensor: torch.Tensor, kernel: Kernel, timeout_s: float
    ) -> None:
        """Reduce a tensor that lies at the same offset of a region on every rank: no copy in or out.

        Each rank reduces its share and writes the result to all parts.
        """
        team = self._team
        num_bytes = tensor.numel() * tensor.element_size()
        team.begin_transfer()
        team.step(timeout_s)
        if kernel.factor is not None:
            tensor.mul_(kernel.factor)
            team.step(timeout_s)  # before the peers read it
        if team.world_size < 3:
            parts = [part[offset_bytes : offset_bytes + num_bytes].view(tensor.dtype) for part in region.parts]
            bounds = share_bounds(tensor.numel(), team.world_size)
            reduce_in_place(parts, team.rank, bounds[team.rank], bounds[team.rank + 1], kernel)
        else:
            rows = region.rows[:, offset_bytes : offset_bytes + num_bytes].view(tensor.dtype)
            self._share_of(rows, kernel, is_handed_back=True).reduce(kernel)
        team.step(timeout_s)

    def reduce(self, tensor: torch.Tensor, kernel: Kernel, root: int, timeout_s: float) -> None:
        """Reduce over all ranks into `tensor` of the root; other ranks keep their tensor.

        The root does all the additions, while the others put the next chunk into their slots.
        """
        team = self._team
        for start, stop, views in self._transfers(tensor.numel(), tensor.dtype, timeout_s):
            part = tensor[start:stop]
            if team.rank != root:
                _load(views[team.rank], part, kernel)
            team.step(timeout_s)
            if team.rank == root:
                if kernel.factor is not None:
                    part.mul_(kernel.factor)
                reduce_into([part], [part if peer == root else view for peer, view in enumerate(views)], kernel)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Copy `tensor` of the root to all ranks."""
        team = self._team
        for start, stop, views in self._transfers(tensor.numel(), tensor.dtype, timeout_s):
            part = tensor[start:stop]
            if team.rank == root:
                views[root].copy_(part)
            team.step(timeout_s)
            if team.rank != root:
                part.copy_(views[root])

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float) -> None:
        """Copy each rank's `tensor` into `outputs[rank]` on all ranks. Sizes may differ between ranks."""
        self._gather_to(outputs, [output.numel() for output in outputs], tensor, timeout_s)

    def gather(
        self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, _root: int, timeout_s: float
    ) -> None:
        """Copy each rank's `tensor` into `outputs[rank]` of the root; other ranks pass None."""
        team = self._team
        self._gather_to(outputs, [tensor.numel()] * team.world_size, tensor, timeout_s)

    def _gather_to(
        self, outputs: Sequence[torch.Tensor] | None, numels: list[int], tensor: torch.Tensor, timeout_s: float
    ) -> None:
        team = self._team
        for start, stop, views in self._transfers(max(numels), tensor.dtype, timeout_s):
            part = tensor[start:stop]
            views[team.rank][: part.numel()].copy_(part)
            team.step(timeout_s)
            if outputs is None:
                continue
            for peer, output in enumerate(outputs):
                piece = output[start:stop]
                piece.copy_(part if peer == team.rank else views[peer][: piece.numel()])

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int, timeout_s: float) -> None:
        """Copy `inputs[rank]` of the root into each rank's `tensor`; other ranks pass None."""
        team = self._team
        for start, stop, views in self._transfers(tensor.numel(), tensor.dtype, timeout_s, team.world_size):
            length = stop - start
            view = views[root]
            if inputs is not None:
                for peer, source in enumerate(inputs):
                    view[peer * length : (peer + 1) * length].copy_(source[start:stop])
            team.step(timeout_s)
            tensor[start:stop].copy_(view[team.rank * length : (team.rank + 1) * length])

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], kernel: Kernel, timeout_s: float
    ) -> None:
        """Reduce `inputs[rank]` of all ranks into each rank's `tensor`. Sizes may differ between ranks."""
        team, rank = self._team, self._team.rank
        largest = max(source.numel() for source in inputs)
        for start, stop, views in self._transfers(largest, tensor.dtype, timeout_s, team.world_size):
            length = stop - start
            mine = views[rank]
            for peer, source in enumerate(inputs):
                piece = source[start:stop]
                _load(mine[peer * length : peer * length + piece.numel()], piece, kernel)
            team.step(timeout_s)
            out = tensor[start:stop]
            kernel.reduce([view[rank * length : rank * length + out.numel()] for view in views], out)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], largest: int, timeout_s: float
    ) -> None:
        """Copy `inputs[peer]` of this rank into `outputs[this rank]` of each peer; `largest` is over all ranks."""
        team, rank = self._team, self._team.rank
        for start, stop, views in self._transfers(largest, inputs[0].dtype, timeout_s, team.world_size):
            length = stop - start
            mine = views[rank]
            for peer, source in enumerate(inputs):
                piece = source[start:stop]
                mine[peer * length : peer * length + piece.numel()].copy_(piece)
            team.step(timeout_s)
            for peer, output in enumerate(outputs):
                piece = output[start:stop]
                piece.copy_(views[peer][rank * length : rank * length + piece.numel()])

    def _transfers(
        self, numel: int, dtype: torch.dtype, timeout_s: float, num_parts: int = 1
    ) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Yield the bounds and all ranks' slots of each transfer of an operation; a single empty one for no elements.

        Args:
            numel: elements of each part, the same on all ranks.
            dtype: of the elements.
            timeout_s: seconds until a wait for the slots is an error.
            num_parts: number of parts that lie next to each other in a slot.
        """
        team = self._team
        item_bytes = dtype.itemsize * num_parts
        num_bytes = numel * item_bytes
        chunk = team.prepare(num_bytes, timeout_s) // item_bytes
        for start in range(0, max(numel, 1), chunk):
            stop = min(start + chunk, numel)
            yield start, stop, team.views(team.begin_transfer(), num_bytes, dtype, (stop - start) * num_parts)
        team.finish(num_bytes)


def _keep(kept: dict[_Key, _Kept], key: _Key, value: _Kept) -> _Kept:
    if len(kept) >= _TREES:
        kept.clear()
    kept[key] = value
    return value


def _load(slot: torch.Tensor, tensor: torch.Tensor, kernel: Kernel) -> None:
    """Copy this rank's input of a reduction into a slot. Local.

    PREMUL_SUM multiplies there: a call may turn out to be mismatched at the first step, and must leave the tensor as
    is.
    """
    slot.copy_(tensor)
    if kernel.factor is not None:
        slot.mul_(kernel.factor)


def reduce_in_place(
    parts: Sequence[torch.Tensor],
    rank: int,
    low: int,
    high: int,
    kernel: Kernel,
    own: torch.Tensor | None = None,
) -> None:
    """Reduce elements low … high of all parts and write the result to each of them. Local.

    The caller ensures that nobody else accesses these elements meanwhile.

    Args:
        parts: one flat tensor per rank, the same numel and dtype.
        rank: index of this rank's part.
        low: index of the first element.
        high: index after the last element.
        kernel: reduces the elements.
        own: flat tensor of high - low elements to use in place of this rank's part.
    """
    sources = [part[low:high] for part in parts]
    # This rank's part first: it is written, and the others are copied from it while it is in the cache.
    targets = [sources[rank], *(source for peer, source in enumerate(sources) if peer != rank)]
    if own is not None:
        sources[rank] = own
    reduce_into(targets, sources, kernel)


def reduce_into(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], kernel: Kernel) -> None:
    """Reduce flat tensors of the same numel and dtype into each of `targets`, which may be some of them. Local."""
    is_direct = len(sources) <= 2  # `Kernel.reduce` can write to one of them
    chunk = (_PIECE_BYTES_FOR_TWO if is_direct else _PIECE_BYTES) // sources[0].element_size()
    scratch: torch.Tensor | None = None
    for start in range(0, sources[0].numel(), chunk):
        parts = [source[start : start + chunk] for source in sources]
        first, *others = (target[start : start + chunk] for target in targets)
        if is_direct:
            kernel.reduce(parts, first)
            result = first
        else:
            if scratch is None or scratch.numel() != first.numel():
                scratch = torch.empty_like(first)
            kernel.reduce(parts, scratch)
            result = scratch
            first.copy_(scratch)
        for other in others:
            other.copy_(result)
