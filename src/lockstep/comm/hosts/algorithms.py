"""The collectives of a group on several hosts: shared memory within a host, messages between hosts.

Each begins with `team.arrive`, which acts only once in a call with several tensors.

[Note: proxies] A rank exchanges data with another host through one rank there, its proxy: the one with the same local
rank, modulo that host's number of ranks. So every byte crosses between two hosts once, and all ranks take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lockstep.comm.contract import Algorithms
from lockstep.comm.hosts.large_sums import LargeSums
from lockstep.comm.hosts.layout import LARGEST_CHUNK_BYTES, num_chunks, redundant_bytes
from lockstep.comm.hosts.pipeline import Reduction, reduce_pipelined
from lockstep.comm.hosts.small_tensors import SmallTensorAlgorithms
from lockstep.comm.hosts.team import HostsTeam
from lockstep.shm.algorithms import SharedMemoryAlgorithms
from lockstep.shm.kernels import Kernel
from lockstep.shm.team import Region

__all__ = ["HostsAlgorithms"]

_BROADCAST_PIECE_BYTES = 8 << 20


class HostsAlgorithms(Algorithms):
    """The collectives of one team over several hosts.

    Args:
        team: the ranks of the group.
    """

    def __init__(self, team: HostsTeam) -> None:
        self._team = team
        self._local = SharedMemoryAlgorithms(team.local)
        self._small = SmallTensorAlgorithms(team)
        self._large_sums = LargeSums(team, self._local)

    def barrier(self, timeout_s: float) -> None:
        self._team.arrive(timeout_s)

    # ---- reductions --------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        team = self._team
        if self._small.fits(tensor):
            self._small.all_reduce(tensor, kernel, timeout_s)
            return
        team.arrive(timeout_s)
        if kernel.factor is not None:
            tensor.mul_(kernel.factor)
        reduction = Reduction.by(kernel, tensor.dtype, team)
        largest = redundant_bytes(len(team.layout.hosts), team.layout.num_channels, reduction.wire.is_exact)
        if tensor.numel() * tensor.element_size() <= largest:
            self._all_reduce_redundant(tensor, reduction, timeout_s)
        elif self._large_sums.fits(tensor, reduction):
            self._large_sums.all_reduce(tensor, reduction, timeout_s)
        elif len(team.layout.local_ranks(team.rank)) == 1:
            self._all_reduce_alone(tensor, reduction, timeout_s)
        else:
            self._all_reduce_shared(tensor, reduction, timeout_s)

    def _all_reduce_redundant(self, tensor: torch.Tensor, reduction: Reduction, timeout_s: float) -> None:
        """Every rank sums the parts of its host, and then the sums of all hosts."""
        team = self._team
        numel = tensor.numel()
        local = team.local
        parts = [tensor]
        if local.world_size > 1:
            parts = local.views(local.begin_transfer(), numel * tensor.element_size(), tensor.dtype, numel)
            parts[local.rank].copy_(tensor)
            local.step(timeout_s)
        own = torch.empty(numel, dtype=reduction.dtype, device="cpu")
        reduction.within_host(parts, own)
        if reduction.can_be_by_partners(team):
            tensor.copy_(self._reduce_by_doubling(own, reduction, timeout_s))
            return
        wanted = dict.fromkeys((team.rank, *self._represented()), own)
        result = torch.empty(numel, dtype=reduction.dtype, device="cpu")
        reduction.over_hosts(self._exchange_sums(reduction, wanted, timeout_s), result)
        tensor.copy_(result)

    def _reduce_by_doubling(self, own: torch.Tensor, reduction: Reduction, timeout_s: float) -> torch.Tensor:
        """The sum over all hosts, by recursive doubling: partners swap sums of 1, 2, 4, … hosts. See [Note: halving].

        That takes log2 H messages in sequence, instead of H - 1 messages at once.
        """
        team = self._team
        layout, total = team.layout, own
        here = layout.host_of[team.rank]
        partners = layout.partners_of(here)
        for number, partner in enumerate(partners):
            theirs = torch.empty_like(total)
            sends = [(rank, total) for rank in self._represented() if layout.host_of[rank] == partner]
            team.exchange(sends, [(self._proxy_on(partner), theirs)], timeout_s)
            combine = reduction.over_hosts if number + 1 == len(partners) else reduction.kernel.reduce
            combine([total, theirs] if here < partner else [theirs, total], theirs)
            total = theirs
        return total

    def _exchange_sums(
        self, reduction: Reduction, sums: Mapping[int, torch.Tensor], timeout_s: float
    ) -> list[torch.Tensor]:
        """Send this host's sums to the ranks whose proxy this rank is, and receive other hosts' sums for this rank.

        Args:
            reduction: has the wire format of the sums.
            sums: rank that needs the sum -> sum; for this rank and those for which it is the proxy.
            timeout_s: seconds until the wait is an error.

        Returns:
            The sum of each host, in order, as every rank sees it.
        """
        team = self._team
        layout, wire = team.layout, reduction.wire
        here, numel = layout.host_of[team.rank], sums[team.rank].numel()
        encoded: dict[int, torch.Tensor] = {}  # by the identity of the sum
        for values in sums.values():
            if id(values) not in encoded:
                encoded[id(values)] = values.view(torch.uint8)
                if not wire.is_exact:
                    encoded[id(values)] = torch.empty(wire.num_bytes(values.numel()), dtype=torch.uint8, device="cpu")
                    wire.encode(values, encoded[id(values)])
        arrived = {
            host: torch.empty(reduction.num_bytes(numel), dtype=torch.uint8, device="cpu")
            for host in range(len(layout.hosts))
            if host != here
        }
        team.exchange(
            [(rank, encoded[id(values)]) for rank, values in sums.items() if rank != team.rank],
            [(self._proxy_on(host), data) for host, data in arrived.items()],
            timeout_s,
        )
        arrived[here] = encoded[id(sums[team.rank])]
        decoded = []
        for host in range(len(layout.hosts)):
            if wire.is_exact:
                decoded.append(arrived[host].view(reduction.dtype))
            else:
                decoded.append(wire.decode(arrived[host], torch.empty(numel, dtype=reduction.dtype, device="cpu")))
        return decoded

    def _represented(self) -> list[int]:
        """The ranks of other hosts for which this rank is the proxy."""
        team = self._team
        layout = team.layout
        own = layout.local_ranks(team.rank)
        return [
            rank
            for rank, host in enumerate(layout.host_of)
            if host != layout.host_of[team.rank] and own[layout.local_rank_of[rank] % len(own)] == team.rank
        ]

    def _proxy_on(self, host: int) -> int:
        """This rank's proxy on another host."""
        team = self._team
        ranks = team.layout.hosts[host]
        return ranks[team.layout.local_rank_of[team.rank] % len(ranks)]

    def _rounds(self) -> list[list[int | None]]:
        """Per round and local rank, the rank that it represents, itself first; None if none is left."""
        team = self._team
        layout = team.layout
        own = layout.local_ranks(team.rank)
        stands_for: list[list[int]] = [[rank] for rank in own]
        for rank, host in enumerate(layout.host_of):
            if host != layout.host_of[team.rank]:
                stands_for[layout.local_rank_of[rank] % len(own)].append(rank)
        longest = max(map(len, stands_for))
        return [[ranks[turn] if turn < len(ranks) else None for ranks in stands_for] for turn in range(longest)]

    def _all_reduce_alone(self, tensor: torch.Tensor, reduction: Reduction, timeout_s: float) -> None:
        """All-reduce on a host whose only rank is this one, which owns all channels."""
        team = self._team
        starts, numels = self._chunks(tensor, self._bytes_that_fit(timeout_s))
        in_place = reduction.wire.is_exact and reduction.dtype == tensor.dtype

        def load(chunk: int, bounds: Sequence[int]) -> dict[int, list[torch.Tensor]]:
            part = tensor[starts[chunk] :]
            return {
                channel: [part[bounds[channel] : bounds[channel + 1]]] for channel in range(team.layout.num_channels)
            }

        def target(chunk: int, bounds: Sequence[int]) -> dict[int, torch.Tensor]:
            return {channel: parts[0] for channel, parts in load(chunk, bounds).items()}

        def store(chunk: int, bounds: Sequence[int]) -> None:
            """Do nothing: the result is already in the tensor."""

        reduce_pipelined(team, reduction, numels, load, target, store, timeout_s, in_place=in_place)
        team.finish()

    def _all_reduce_shared(self, tensor: torch.Tensor, reduction: Reduction, timeout_s: float) -> None:
        """The ranks of this host exchange their parts through its slots. See [Note: two slots] in `shm/team.py`."""
        team = self._team
        local = team.local
        num_bytes = tensor.numel() * tensor.element_size()
        starts, numels = self._chunks(tensor, self._bytes_that_fit(timeout_s))
        own_channels = team.layout.channels_of(team.rank)
        owners = self._local_ranks_of_owners()

        def load(chunk: int, bounds: Sequence[int]) -> dict[int, list[torch.Tensor]]:
            part = tensor[starts[chunk] : starts[chunk] + numels[chunk]]
            views = local.views(local.begin_transfer(), num_bytes, tensor.dtype, numels[chunk])
            for channel, owner in enumerate(owners):
                if owner != local.rank:
                    low, high = bounds[channel], bounds[channel + 1]
                    views[local.rank][low:high].copy_(part[low:high])
            local.step(timeout_s)
            sources = [part if peer == local.rank else view for peer, view in enumerate(views)]
            return {each: [source[bounds[each] : bounds[each + 1]] for source in sources] for each in own_channels}

        slots: list[torch.Tensor] = []

        def target(chunk: int, bounds: Sequence[int]) -> dict[int, torch.Tensor]:
            slots[:] = local.views(local.begin_transfer(), num_bytes, tensor.dtype, numels[chunk])
            return {channel: slots[local.rank][bounds[channel] : bounds[channel + 1]] for channel in own_channels}

        def store(chunk: int, bounds: Sequence[int]) -> None:
            part = tensor[starts[chunk] : starts[chunk] + numels[chunk]]
            local.step(timeout_s)
            for channel, owner in enumerate(owners):
                low, high = bounds[channel], bounds[channel + 1]
                part[low:high].copy_(slots[owner][low:high])

        reduce_pipelined(team, reduction, numels, load, target, store, timeout_s)
        team.finish()

    def all_reduce_symmetric(
        self, region: Region, offset_bytes: int, tensor: torch.Tensor, kernel: Kernel, timeout_s: float
    ) -> None:
        """Reduce a tensor that lies at the same offset of a region on every rank of a host: no copy in or out."""
        team = self._team
        team.arrive(timeout_s)
        local = team.local
        num_bytes = tensor.numel() * tensor.element_size()
        if kernel.factor is not None:
            # Only after `arrive`, since a mismatched call must leave the tensor as it is.
            tensor.mul_(kernel.factor)
            local.begin_transfer()
            local.step(timeout_s)
        reduction = Reduction.by(kernel, tensor.dtype, team)
        parts = [part[offset_bytes : offset_bytes + num_bytes].view(tensor.dtype) for part in region.parts]
        if self._large_sums.fits(tensor, reduction):
            self._large_sums.all_reduce_symmetric(parts, reduction, timeout_s)
        else:
            self.reduce_symmetric(parts, reduction, timeout_s)
        local.begin_transfer()
        local.step(timeout_s)

    def reduce_symmetric(self, parts: Sequence[torch.Tensor], reduction: Reduction, timeout_s: float) -> None:
        """Reduce the parts of this host's ranks and of all others, and write the result to each part. Collective.

        After `arrive`; a rank may read its part once all ranks of its host have returned.

        Args:
            parts: one flat tensor for each rank of this host, the same numel and dtype.
            reduction: how to combine the parts.
            timeout_s: seconds until each wait is an error.
        """
        team = self._team
        starts, numels = self._chunks(parts[0], LARGEST_CHUNK_BYTES)
        own_channels = team.layout.channels_of(team.rank)

        def load(chunk: int, bounds: Sequence[int]) -> dict[int, list[torch.Tensor]]:
            spans = {each: (starts[chunk] + bounds[each], starts[chunk] + bounds[each + 1]) for each in own_channels}
            return {channel: [part[low:high] for part in parts] for channel, (low, high) in spans.items()}

        def target(chunk: int, bounds: Sequence[int]) -> dict[int, torch.Tensor]:
            return {channel: pieces[team.local.rank] for channel, pieces in load(chunk, bounds).items()}

        def store(chunk: int, bounds: Sequence[int]) -> None:
            for pieces in load(chunk, bounds).values():
                for peer, other in enumerate(pieces):
                    if peer != team.local.rank:
                        other.copy_(pieces[team.local.rank])

        reduce_pipelined(team, reduction, numels, load, target, store, timeout_s)

    def _bytes_that_fit(self, timeout_s: float) -> int:
        """Largest chunk in bytes: bounded by the slots, if any host has several ranks. Collective."""
        team = self._team
        if team.layout.num_channels == 1:
            return LARGEST_CHUNK_BYTES
        team.prepare(timeout_s)
        return team.chunk_bytes

    def _chunks(self, tensor: torch.Tensor, largest_bytes: int) -> tuple[list[int], list[int]]:
        """Start and number of elements of each chunk of a flat tensor; the same on all hosts."""
        team = self._team
        wanted = num_chunks(tensor.numel() * tensor.element_size(), len(team.layout.hosts), largest_bytes)
        length = min(-(-tensor.numel() // wanted), largest_bytes // tensor.element_size())
        starts = list(range(0, tensor.numel(), length))
        return starts, [min(length, tensor.numel() - start) for start in starts]

    def _local_ranks_of_owners(self) -> list[int]:
        """For each channel, the local rank of its owner on this host."""
        team = self._team
        layout = team.layout
        here = layout.host_of[team.rank]
        return [layout.local_rank_of[layout.owner(here, channel)] for channel in range(layout.num_channels)]

    def reduce(self, tensor: torch.Tensor, kernel: Kernel, root: int, timeout_s: float) -> None:
        """Reduce over all ranks into `tensor` of the root; other ranks keep theirs.

        Networks carry both directions at once, so this takes no longer than sending the result to one rank only.
        """
        self.all_reduce(tensor if self._team.rank == root else tensor.clone(), kernel, timeout_s)

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], kernel: Kernel, timeout_s: float
    ) -> None:
        team = self._team
        team.arrive(timeout_s)
        reduction = Reduction.by(kernel, tensor.dtype, team)
        wide = [source.to(reduction.dtype) for source in inputs]
        if kernel.factor is not None:
            wide = [source * kernel.factor for source in wide]
        local = team.local
        nothing = torch.empty(0, dtype=reduction.dtype, device="cpu")
        sums: dict[int, torch.Tensor] = {}
        for ranks in self._rounds():
            sources = [nothing if rank is None else wide[rank] for rank in ranks]
            out = torch.empty_like(sources[local.rank])
            self._local.reduce_scatter(out, sources, reduction.kernel, timeout_s)
            wanted_by = ranks[local.rank]
            if wanted_by is not None:
                sums[wanted_by] = out
        result = torch.empty(tensor.numel(), dtype=reduction.dtype, device="cpu")
        reduction.over_hosts(self._exchange_sums(reduction, sums, timeout_s), result)
        tensor.copy_(result)

    # ---- copies ------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        team = self._team
        if self._small.fits(tensor):
            self._small.broadcast(tensor, root, timeout_s)
            return
        team.arrive(timeout_s)
        layout, local = team.layout, team.local
        here = layout.host_of[team.rank]
        # For each host, the rank that receives it from the root and passes it on to the others there.
        sources = [root if layout.host_of[root] == host else ranks[0] for host, ranks in enumerate(layout.hosts)]
        length = max(_BROADCAST_PIECE_BYTES // tensor.element_size(), 1)
        for start in range(0, max(tensor.numel(), 1), length):
            piece = tensor[start : start + length]
            if team.rank == root:
                team.exchange([(rank, piece) for rank in sources if rank != root], [], timeout_s)
            elif team.rank == sources[here]:
                team.exchange([], [(root, piece)], timeout_s)
            if local.world_size > 1:
                self._local.broadcast(piece, layout.local_rank_of[sources[here]], timeout_s)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float) -> None:
        team = self._team
        if self._small.fits(tensor) and all(output.numel() == tensor.numel() for output in outputs):
            self._small.all_gather(outputs, tensor, timeout_s)
            return
        team.arrive(timeout_s)
        layout, local = team.layout, team.local
        here = layout.host_of[team.rank]
        proxies = [self._proxy_on(host) for host in range(len(layout.hosts)) if host != here]
        team.exchange(
            [(rank, tensor) for rank in proxies], [(rank, outputs[rank]) for rank in self._represented()], timeout_s
        )
        nothing = tensor[:0]
        for ranks in self._rounds():
            own = ranks[local.rank]
            source = nothing if own is None else tensor if own == team.rank else outputs[own]
            self._local.all_gather([nothing if rank is None else outputs[rank] for rank in ranks], source, timeout_s)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        team = self._team
        team.arrive(timeout_s)
        layout = team.layout
        here = layout.local_ranks(root)
        if team.rank not in here:
            team.exchange([(root, tensor)], [], timeout_s)
            return
        if outputs is None:
            self._local.gather(None, tensor, layout.local_rank_of[root], timeout_s)
            return
        team.exchange([], [(rank, output) for rank, output in enumerate(outputs) if rank not in here], timeout_s)
        self._local.gather([outputs[rank] for rank in here], tensor, layout.local_rank_of[root], timeout_s)

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int, timeout_s: float) -> None:
        team = self._team
        team.arrive(timeout_s)
        layout = team.layout
        here = layout.local_ranks(root)
        if team.rank not in here:
            team.exchange([], [(root, tensor)], timeout_s)
            return
        if inputs is not None:
            team.exchange([(rank, source) for rank, source in enumerate(inputs) if rank not in here], [], timeout_s)
        chosen = None if inputs is None else [inputs[rank] for rank in here]
        self._local.scatter(tensor, chosen, layout.local_rank_of[root], timeout_s)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], largest: int, timeout_s: float
    ) -> None:
        """Copy `inputs[peer]` of this rank into `outputs[this rank]` of each peer."""
        team = self._team
        team.arrive(timeout_s)
        here = team.layout.local_ranks(team.rank)
        far = [rank for rank in team.peers if rank not in here]
        team.exchange([(rank, inputs[rank]) for rank in far], [(rank, outputs[rank]) for rank in far], timeout_s)
        near_outputs, near_inputs = [outputs[rank] for rank in here], [inputs[rank] for rank in here]
        self._local.all_to_all(near_outputs, near_inputs, largest, timeout_s)
