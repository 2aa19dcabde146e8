"""Large reductions over several hosts, in chunks that pass through a pipeline of stages.

A chunk is divided into channels, as many as the fullest host has ranks. Each channel has an owner on every host, and
passes through these stages::

    load       the ranks of a host put the chunk where its owners can read it; each owner sums its channels
    exchange   the owners of a channel exchange their sums and add them up
    store      each owner distributes its results to the ranks of its host

While one chunk is on the network, earlier ones are stored and later ones loaded. So a large reduction takes little
longer than the slowest of its stages; and because every channel has a different owner, all ranks of a host send.

[Note: exchange] With two hosts, owners exchange whole sums and both add: each byte crosses once in each direction. With
more, each owner of a channel sums one part of it and sends the result to the others: 2 (H - 1) / H of the bytes.

[Note: halving] With 4, 8, 16, … hosts, owners exchange chunks of medium size in pairs: hosts 0 and 1 halve their data,
swap halves and add; then hosts 0 and 2 do the same with these halves, and so on. The results go back the same way. The
number of bytes is the same, in 2 log2 H messages for each owner instead of 2 (H - 1), but these are sequential.
Partners add in the order of the pairwise tree, so the bits are the same. That does not hold for sums in fewer bits,
which would be encoded at each step.

[Note: order] The fixed pairwise tree adds over the ranks of a host, then over hosts, in their order in the layout. All
owners of a value add the same parts in the same order, so results are bit-identical across ranks and runs.

[Note: in place] If a host has one rank, and sums travel in full precision, an exchange sends from the tensor itself and
receives into it. With more than two hosts a result arrives in memory that was sent from before; but the owner that
sends it has already received what was sent. Two hosts swap whole sums: there a result has to wait until the sends have
ended.

[Note: posted ahead] Gloo sends only when it knows that the receiver is ready. So an owner posts its receives some
chunks ahead, and no send has to wait for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.hosts.gloo_transfers import GlooTransfer
from lockstep.comm.hosts.layout import halved_bytes
from lockstep.comm.hosts.team import HostsTeam
from lockstep.comm.wire import WIRES, Wire
from lockstep.shm.algorithms import share_bounds
from lockstep.shm.kernels import Kernel, divide

__all__ = ["Reduction", "reduce_pipelined"]

# Chunks between the start and the end of an exchange, and the number more for which receives are posted.
_DEPTH = 2
_AHEAD = 3
_FLOAT_SUMS = ("SUM", "AVG", "PREMUL_SUM")


@dataclass(frozen=True)
class Reduction:
    """How to combine parts, within a host and between hosts.

    Attributes:
        dtype: the dtype of partial sums.
        kernel: combines parts, without the division of an average.
        divisor: divides the final result; 1 for none.
        wire: the wire format of partial sums between hosts.
    """

    dtype: torch.dtype
    kernel: Kernel
    divisor: int
    wire: Wire

    @classmethod
    def by(cls, kernel: Kernel, dtype: torch.dtype, team: HostsTeam) -> Reduction:
        """The reduction of tensors of `dtype` by `kernel`."""
        accumulate = kernel.accumulate or dtype
        may_round = accumulate is torch.float32 and kernel.name in _FLOAT_SUMS
        return cls(
            accumulate,
            Kernel(kernel.name, kernel.combine),
            team.world_size if kernel.divide else 1,
            team.wire if may_round else WIRES["fp32"],
        )

    def within_host(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine parts of any dtype into `out`, of `dtype`, which is not one of them."""
        wide = [part if part.dtype == self.dtype else part.to(self.dtype) for part in parts]
        if len(wide) == 1:
            out.copy_(wide[0])
        else:
            self.kernel.reduce(wide, out)

    def within_host_into(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """Combine parts, of `dtype`, into one of them; the others are overwritten."""
        self._tree(parts, own)

    def over_hosts(self, sums: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine the sums of all hosts into the result.

        `out` may be one of the sums if there are two, but not if there are more. It may have another dtype, to which
        the result is rounded.
        """
        target = out if out.dtype == self.dtype else torch.empty_like(sums[0])
        self.kernel.reduce(sums, target)
        if self.divisor != 1:
            divide(target, self.divisor)
        if target is not out:
            out.copy_(target)

    def can_be_by_partners(self, team: HostsTeam) -> bool:
        """Whether hosts may add up in pairs. See [Note: halving]."""
        return self.wire.is_exact and team.layout.has_partners

    def over_hosts_into(self, sums: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """Combine the sums of all hosts, of `dtype`, into one of them; the others are overwritten.

        Fresh memory, and a copy out of it, would cost more than the additions.
        """
        self._tree(sums, own)
        if self.divisor != 1:
            divide(own, self.divisor)

    def _tree(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        """The tree of `Kernel.reduce`, with results stored in the parts: in `own`, if that is one of a pair."""
        if len(parts) == 1:
            return parts[0]
        middle = 1 << (len(parts) - 1).bit_length() - 1
        left, right = self._tree(parts[:middle], own), self._tree(parts[middle:], own)
        return self.kernel.combine(left, right, out=right if right is own else left)

    def num_bytes(self, numel: int) -> int:
        """Number of bytes of `numel` values on the wire."""
        return numel * self.dtype.itemsize if self.wire.is_exact else self.wire.num_bytes(numel)


class _Exchange:
    """The exchange of one channel of one chunk between its owners.

    Args:
        team: the ranks of the group.
        reduction: how to combine the parts.
        channel: number of the channel.
        numel: elements of the channel in this chunk.
        memory: the memory of the channel's only part and of its result; see [Note: in place]. None otherwise.
    """

    def __init__(
        self, team: HostsTeam, reduction: Reduction, channel: int, numel: int, memory: torch.Tensor | None = None
    ) -> None:
        layout = team.layout
        self._team = team
        self._reduction = reduction
        self._numel = numel
        self._memory = memory
        self._own = layout.host_of[team.rank]
        self._owners = [layout.owner(host, channel) for host in range(len(layout.hosts))]
        # Starting with the next rank, so that not all send to the same one first.
        self._others = [(self._own + step) % len(self._owners) for step in range(1, len(self._owners))]
        self._is_direct = len(self._owners) == 2
        bounds = [0, numel] if self._is_direct else share_bounds(numel, len(self._owners))
        self._spans = list(itertools.pairwise(bounds))
        self._buffers: list[torch.Tensor] = []
        self._sends: list[GlooTransfer] = []
        self._coming: dict[int, tuple[GlooTransfer | None, torch.Tensor]] = {}  # sums, by host
        self._returning: dict[int, tuple[GlooTransfer | None, torch.Tensor]] = {}  # results, by host
        self._sum = torch.empty(0, device="cpu")

    # ---- pieces ----------------------------------------------------------------------------------------

    def _take(self, num_bytes: int) -> torch.Tensor:
        buffer = self._team.take_buffer(num_bytes)
        self._buffers.append(buffer)
        return buffer

    def _new(self, numel: int) -> torch.Tensor:
        return self._take(numel * self._reduction.dtype.itemsize).view(self._reduction.dtype)

    def _span(self, host: int) -> tuple[int, int]:
        """Bounds of the part that the owner on that host sums."""
        return self._spans[0] if self._is_direct else self._spans[host]

    def _expect(
        self, host: int, numel: int, phase: int, target: torch.Tensor | None = None
    ) -> tuple[GlooTransfer | None, torch.Tensor]:
        buffer = self._take(self._reduction.num_bytes(numel)) if target is None else target.view(torch.uint8)
        if not numel:
            return None, buffer
        return self._team.receive_chunk(self._owners[host], buffer, phase), buffer

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes to send for these values; may share their memory."""
        wire = self._reduction.wire
        if wire.is_exact:
            return values.view(torch.uint8)
        data = self._take(wire.num_bytes(values.numel()))
        wire.encode(values, data)
        return data

    def _decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        wire = self._reduction.wire
        return data.view(self._reduction.dtype) if wire.is_exact else wire.decode(data, self._new(numel))

    def _send(self, host: int, data: torch.Tensor, phase: int) -> None:
        if data.numel():
            self._sends.append(self._team.send_chunk(self._owners[host], data, phase))

    def _await(self, coming: Mapping[int, tuple[GlooTransfer | None, torch.Tensor]], timeout_s: float) -> None:
        self._team.wait_for([transfer for transfer, _ in coming.values() if transfer is not None], timeout_s)

    # ---- stages ----------------------------------------------------------------------------------------

    def post(self) -> None:
        """Post the receives. Local."""
        low, high = self._span(self._own)
        for host in self._others:
            self._coming[host] = self._expect(host, high - low, 0)
        if not self._is_direct:
            for host in self._others:
                low, high = self._spans[host]
                target = None if self._memory is None else self._memory[low:high]
                self._returning[host] = self._expect(host, high - low, 1, target)

    def start(self, parts: Sequence[torch.Tensor]) -> None:
        """Sum the parts of this host's ranks, and send the sum. Local."""
        if self._memory is None:
            self._sum = self._new(self._numel)
            self._reduction.within_host(parts, self._sum)
        else:
            self._sum = self._memory
        if self._is_direct:
            data = self._encode(self._sum)
            self._send(self._others[0], data, 0)
            if not self._reduction.wire.is_exact:
                self._sum = self._decode(data, self._numel)  # the same values as on the other host
            return
        for host in self._others:
            low, high = self._spans[host]
            self._send(host, self._encode(self._sum[low:high]), 0)

    def reduce_part(self, timeout_s: float) -> None:
        """With more than two hosts: sum this owner's part of the channel, and send the result to the others."""
        if self._is_direct:
            return
        self._await(self._coming, timeout_s)
        low, high = self._spans[self._own]
        if high == low:
            return
        own = self._sum[low:high]
        sums = [
            own if host == self._own else self._decode(self._coming[host][1], high - low)
            for host in range(len(self._owners))
        ]
        if self._reduction.wire.is_exact:
            self._reduction.over_hosts_into(sums, own)
            for host in self._others:
                self._send(host, own.view(torch.uint8), 1)
            return
        result = self._new(high - low)
        self._reduction.over_hosts(sums, result)
        data = self._encode(result)
        for host in self._others:
            self._send(host, data, 1)
        own.copy_(self._decode(data, high - low))

    def finish(self, out: torch.Tensor, timeout_s: float) -> None:
        """Write the result to `out`, of shape (numel,), in the dtype of the tensors."""
        if not self._is_direct:
            self._await(self._returning, timeout_s)
            if self._memory is not None:
                return
            for host, (_, data) in self._returning.items():
                low, high = self._spans[host]
                if high > low:
                    out[low:high].copy_(self._decode(data, high - low))
            low, high = self._spans[self._own]
            out[low:high].copy_(self._sum[low:high])
            return
        self._await(self._coming, timeout_s)
        (other,) = self._others
        if self._memory is not None:
            self._team.wait_for(self._sends, timeout_s)
        theirs = self._decode(self._coming[other][1], self._numel)
        self._reduction.over_hosts([self._sum, theirs] if self._own == 0 else [theirs, self._sum], out)

    def release(self, timeout_s: float) -> None:
        """Wait until everything is sent, and return the buffers to the pool."""
        self._team.wait_for(self._sends, timeout_s)
        for buffer in self._buffers:
            self._team.give_buffer(buffer)
        self._buffers.clear()


class _HalvingExchange(_Exchange):
    """An exchange between partners. See [Note: halving]."""

    def __init__(
        self, team: HostsTeam, reduction: Reduction, channel: int, numel: int, memory: torch.Tensor | None = None
    ) -> None:
        super().__init__(team, reduction, channel, numel, memory)
        self._rounds: list[tuple[int, slice, slice]] = []  # partner, slice to keep, slice to send
        self._parts: list[tuple[GlooTransfer | None, torch.Tensor]] = []  # one for each round
        self._results: list[tuple[GlooTransfer | None, torch.Tensor]] = []
        bounds = share_bounds(numel, len(self._owners))
        first, last = 0, len(self._owners)
        for partner in team.layout.partners_of(self._own):
            middle = (first + last) // 2
            lower, upper = slice(bounds[first], bounds[middle]), slice(bounds[middle], bounds[last])
            if self._own < partner:
                self._rounds.append((partner, lower, upper))
                last = middle
            else:
                self._rounds.append((partner, upper, lower))
                first = middle

    def post(self) -> None:
        self._sum = self._new(self._numel) if self._memory is None else self._memory
        for partner, kept, _ in self._rounds:
            self._parts.append(self._expect(partner, kept.stop - kept.start, 0))
        for partner, _, given in self._rounds:
            self._results.append(self._expect(partner, given.stop - given.start, 1, self._sum[given]))

    def start(self, parts: Sequence[torch.Tensor]) -> None:
        """Sum the parts of this host's ranks, and send the first half. Local."""
        if self._memory is None:
            self._reduction.within_host(parts, self._sum)
        self._give(0)

    def _give(self, number: int) -> None:
        partner, _, given = self._rounds[number]
        self._send(partner, self._encode(self._sum[given]), 0)

    def _return(self, number: int) -> None:
        partner, kept, _ = self._rounds[number]
        self._send(partner, self._encode(self._sum[kept]), 1)

    def reduce_part(self, timeout_s: float) -> None:
        """Sum this owner's part of the channel, and send the first result."""
        last = len(self._rounds) - 1
        for number, (partner, kept, _) in enumerate(self._rounds):
            self._await({partner: self._parts[number]}, timeout_s)
            own, theirs = self._sum[kept], self._parts[number][1].view(self._reduction.dtype)
            if own.numel():
                sums = [own, theirs] if self._own < partner else [theirs, own]
                combine = self._reduction.over_hosts if number == last else self._reduction.kernel.reduce
                combine(sums, own)
            if number < last:
                self._give(number + 1)
        self._return(last)

    def finish(self, out: torch.Tensor, timeout_s: float) -> None:
        for number in reversed(range(len(self._rounds))):
            self._await({number: self._results[number]}, timeout_s)
            if number:
                self._return(number - 1)
        if self._memory is None:
            out.copy_(self._sum)


def reduce_pipelined(
    team: HostsTeam,
    reduction: Reduction,
    chunk_numels: Sequence[int],
    load: Callable[[int, Sequence[int]], Mapping[int, Sequence[torch.Tensor]]],
    target: Callable[[int, Sequence[int]], Mapping[int, torch.Tensor]],
    store: Callable[[int, Sequence[int]], None],
    timeout_s: float,
    in_place: bool = False,
) -> None:
    """Reduce chunk by chunk over all ranks. Collective, after `arrive`.

    Args:
        team: the ranks of the group.
        reduction: how to combine the parts.
        chunk_numels: elements of each chunk; the same on all ranks.
        load: given the number of a chunk and the bounds of its channels (number of channels + 1 values), returns, for
            each channel that this rank owns, the parts of its host's ranks. All ranks of a host call it together.
        target: given the same, returns where the result goes, for each channel that this rank owns.
        store: given the same, distributes the results to the ranks of the host. All of them call it together.
        timeout_s: seconds until each wait is an error.
        in_place: whether `load` and `target` return the same memory, and may be called at any time.

    Raises:
        PeerFailure: a peer failed, left, or was too late.
    """
    num_chunks, channels = len(chunk_numels), team.layout.channels_of(team.rank)
    bounds = [share_bounds(numel, team.layout.num_channels) for numel in chunk_numels]
    exchanges: list[dict[int, _Exchange]] = []
    is_small = max(chunk_numels) * reduction.dtype.itemsize <= halved_bytes(len(team.layout.hosts))
    make = _HalvingExchange if is_small and reduction.can_be_by_partners(team) else _Exchange
    reduce_after = _DEPTH if len(team.layout.hosts) > 2 else 0
    finish_after = reduce_after + _DEPTH

    def post(until: int) -> None:
        while len(exchanges) < min(until, num_chunks):
            at = bounds[len(exchanges)]
            memory = target(len(exchanges), at) if in_place else {}
            exchanges.append(
                {own: make(team, reduction, own, at[own + 1] - at[own], memory.get(own)) for own in channels}
            )
            for each in exchanges[-1].values():
                each.post()

    for step in range(num_chunks + finish_after):
        post(step + 1 + _AHEAD)
        if step < num_chunks:
            for channel, parts in load(step, bounds[step]).items():
                exchanges[step][channel].start(parts)
        reducing, finishing = step - reduce_after, step - finish_after
        if reduce_after and 0 <= reducing < num_chunks:
            for exchange in exchanges[reducing].values():
                exchange.reduce_part(timeout_s)
        if 0 <= finishing < num_chunks:
            targets = target(finishing, bounds[finishing])
            for channel, exchange in exchanges[finishing].items():
                exchange.finish(targets[channel], timeout_s)
            store(finishing, bounds[finishing])
            for exchange in exchanges[finishing].values():
                exchange.release(timeout_s)
            exchanges[finishing] = {}
