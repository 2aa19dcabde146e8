"""The team of a group on several hosts: messages between all ranks, and shared memory within each host.

Every rank has a connection to every other (`links.py`), for short messages: what it calls, that it leaves, that it has
failed. So each rank learns soon, and at first hand, when another one dies. The ranks of one host form a shared-memory
team (`local`), through which data moves there. Between hosts, Gloo transfers large data (`gloo_transport.py`).

[Note: who waits for whom] A rank that waits in a step of its local team, or for data from another host, waits for ranks
that may themselves be waiting. A rank that notices a failure breaks the group and tells all. So it is enough for a wait
to watch the ranks that it waits for, and to receive their messages.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from lockstep.comm.hosts.connections import LONGEST_MESSAGE_BYTES
from lockstep.comm.hosts.first_ranks import FirstRanks
from lockstep.comm.hosts.gloo_transfers import GlooTransfer
from lockstep.comm.hosts.gloo_transport import GlooTransport
from lockstep.comm.hosts.late_ranks import FIRST_RANKS, LateRanks
from lockstep.comm.hosts.layout import Layout
from lockstep.comm.hosts.links import Links
from lockstep.comm.hosts.watchdog import Watchdog
from lockstep.comm.messages.arrival import forwardings_of
from lockstep.comm.messages.message_team import MessageTeam, Parts
from lockstep.comm.wire import Wire
from lockstep.errors import SetupError, SharedMemoryError
from lockstep.shm.control_blocks import SharedControlBlocks
from lockstep.shm.liveness import PeerIdentity, Watch
from lockstep.shm.segment import Segment
from lockstep.shm.sync import FailureKind, PeerFailure, StepWaiter, next_look
from lockstep.shm.team import SMALL_SLOT_BYTES, Region, SharedMemoryTeam

__all__ = ["HostsTeam"]

_TENSOR_TAG, _P2P_TAG, _CHUNK_TAG = 1, 2, 3
_LARGE_BYTES = SMALL_SLOT_BYTES + 1
# A tensor of up to this size is sent as a message.
_EAGER_BYTES = 64 << 10
# Unlike those of control messages and of the mailbox.
_EAGER_KIND, _WAKE = (31).to_bytes(8, "little"), (30).to_bytes(8, "little")
_SAYS_AFTER_S, _SAYS_AFTER_SHARE = 1.0, 0.25  # seconds, and fraction of the deadline; whichever comes first
assert _EAGER_BYTES + len(_EAGER_KIND) <= LONGEST_MESSAGE_BYTES

_POOL_BYTES = 64 << 20
_CLOSE_PATIENCE_S = 2.0


class _LocalWaiter(StepWaiter):
    """Waits for ranks of this host, and receives messages from all hosts meanwhile."""

    polls_in_looks = True

    def __init__(self, team: HostsTeam, blocks: SharedControlBlocks, watch: Watch) -> None:
        super().__init__(blocks.words, blocks.state_words, blocks.rank, watch, blocks.gate_word)
        self._team = team

    def look(
        self,
        words: memoryview,
        pending: Sequence[tuple[int, int]],
        target: int,
        waited_s: float,
        timeout_s: float,
    ) -> float:
        """Raise PeerFailure, with ranks of the whole group, if an awaited rank can no longer come."""
        self._team.look_locally(lambda: [rank for rank, index in pending if words[index] < target], waited_s, timeout_s)
        return math.inf


class _LocalTeam(SharedMemoryTeam):
    """The ranks of this host, in collectives whose other ranks may not notice that memory is exhausted here."""

    def prepare(self, num_bytes: int, timeout_s: float) -> int:
        """Make sure that slots for an operation on `num_bytes` exist. Collective at the first use of large ones.

        Raises:
            SetupError: memory for them is exhausted; on every rank of this host, or on this rank alone if it had slots
                before. The engine tells the others.
            PeerFailure: a rank did not come to their first use.
        """
        try:
            return super().prepare(num_bytes, timeout_s)
        except SharedMemoryError as error:
            raise SetupError(str(error)) from error


class _FarWatch(Watch):
    """Also detects the end of processes on other hosts, by their closed connections."""

    def __init__(self, near: dict[int, PeerIdentity], links: Links) -> None:
        super().__init__(near)
        self._links = links

    def dead(self) -> set[int]:
        """Ranks whose process has ended, or whose host no longer answers."""
        self._links.lose_silent()
        return super().dead() | self._links.lost


class HostsTeam(MessageTeam[GlooTransfer]):
    """The ranks of one group on several hosts, for an engine, a flight recorder and point to point.

    Args:
        rank: this rank in the group.
        layout: which ranks share a host.
        links: the connections to the other ranks.
        segment: the control segment of this host's ranks, after they have met.
        gloo: transfers large data between hosts.
        wire: the wire format of float sums between hosts.
        timeout_s: how long `close` waits for peers that have not yet read what they were sent.
        global_ranks: global rank of each rank of the group.

    Attributes:
        layout: which ranks share a host.
        interface: the network interface by which this rank reaches other hosts.
        links: the links to the other ranks.
        first_ranks: the first rank of each host, for large sums.
        gloo: Gloo's connections to the other ranks.
        local: the shared-memory team of this host.
        wire: the wire format of float sums between hosts.
        chunk_bytes: size of the pieces in which large tensors move; 0 before `prepare`.
        has_symmetric_memory: whether `allocate` works: always, among the ranks of each host.
    """

    longest_message_bytes = LONGEST_MESSAGE_BYTES
    has_symmetric_memory = True

    def __init__(
        self,
        rank: int,
        layout: Layout,
        links: Links,
        segment: Segment,
        gloo: GlooTransport,
        wire: Wire,
        timeout_s: float,
        global_ranks: Sequence[int],
    ) -> None:
        identities = [member.identity for member in layout.members]
        near = layout.local_ranks(rank)
        watched = {peer: identities[peer] for peer in near if peer != rank}
        super().__init__(rank, identities, _FarWatch(watched, links), near)
        self.layout = layout
        self.interface = layout.members[rank].interface
        self.forwardings = forwardings_of(rank, layout.hosts)
        self.wire = wire
        self.links = links
        self.gloo = gloo.connections
        self._gloo = gloo
        self._timeout_s = timeout_s
        self.first_ranks = FirstRanks(rank, layout, links, global_ranks)
        self._is_in_sum = False  # whether this rank is in a sum of the first ranks
        self._watchdog = Watchdog(self._poll_and_look, self._abort_transfers)
        self._eager_messages: list[deque[bytes]] = [deque() for _ in range(self.world_size)]
        self._late_ranks = LateRanks(rank, self.first_ranks.all, self.blocks.number, self._tell_all)
        self._pool: dict[int, list[torch.Tensor]] = {}
        self._pool_bytes = 0
        self.chunk_bytes = 0  # not agreed on yet
        self.local = _LocalTeam(segment, layout.local_rank_of[rank], len(near), functools.partial(_LocalWaiter, self))

    @property
    def waiter(self) -> StepWaiter:
        """Waits for ranks of this host."""
        return self.local.waiter

    # ---- messages --------------------------------------------------------------------------------------

    def send_message(self, peer: int, message: bytes | memoryview) -> None:
        assert len(message) <= self.longest_message_bytes
        with self.lock:
            self.links.send(peer, message)

    def poll(self) -> None:
        with self.lock:
            for peer, message in self.links.poll():
                if message[:8] == _EAGER_KIND:
                    self._eager_messages[peer].append(bytes(message[8:]))
                elif message != _WAKE and not self._late_ranks.receive(peer, message):
                    self._receive_message(peer, message)
                if self.links.has_sleepers:
                    self.links.interrupt()  # Another thread may be waiting for what was received here.

    def wake(self, peer: int) -> None:
        """Wake a rank that is in `sleep`. Local."""
        self.send_message(peer, _WAKE)

    def wake_here(self) -> None:
        """End the sleep of this rank's other threads. Local."""
        self.links.interrupt()

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a message arrives, or another thread of this rank has received one. Local."""
        self.links.wait(timeout_s)

    # ---- waiting ---------------------------------------------------------------------------------------

    @property
    def _is_closed(self) -> bool:
        return self.waiter.closed

    def _look(self, ranks: Sequence[int], waited_s: float, timeout_s: float) -> None:
        super()._look(ranks, waited_s, timeout_s)
        if waited_s > min(_SAYS_AFTER_S, timeout_s * _SAYS_AFTER_SHARE):
            awaited = [FIRST_RANKS] if self._is_in_sum else self._not_ahead(ranks)
            if len(awaited) == 1:
                self._late_ranks.say_to_await(awaited[0], self._number)

    def _not_ahead(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that are not in a later collective; the others have done their part in this one."""
        return [rank for rank in ranks if self.blocks.number(rank) <= self._number]

    def note_finished(self, number: int) -> None:
        super().note_finished(number)
        self._late_ranks.say_to_go_on(number)

    def _tell_all(self, message: bytes) -> None:
        with self.lock:
            for peer in () if self.has_left else self.peers:
                self.send_message(peer, message)

    def _blamed(self, failure: PeerFailure) -> PeerFailure:
        """The same failure, blamed on the ranks for which the late ones wait. See [Note: who is late]."""
        if any(kind is not FailureKind.LATE for kind in failure.kinds.values()):
            return failure
        self.poll()
        late = self._not_ahead(failure.kinds) or list(failure.kinds)
        return PeerFailure(dict.fromkeys(self._late_ranks.awaited_by(late) or late, FailureKind.LATE), failure.waited_s)

    def _wait(self, awaited: Callable[[], list[int]], timeout_s: float) -> None:
        try:
            self._wait_and_look(awaited, timeout_s)
        except PeerFailure as failure:
            raise self._blamed(failure) from None

    def _wait_and_look(self, awaited: Callable[[], list[int]], timeout_s: float) -> None:
        start = time.monotonic()
        look_at = next_look(start, start, timeout_s)
        while ranks := awaited():
            now = time.monotonic()
            if now >= look_at:
                self._look(ranks, now - start, timeout_s)
                look_at = next_look(start, now, timeout_s)
            self.links.wait(look_at - now)

    def _poll_and_look(self, ranks: Sequence[int], waited_s: float, timeout_s: float) -> None:
        self.poll()
        self._look(ranks, waited_s, timeout_s)

    def look_locally(self, missing: Callable[[], list[int]], waited_s: float, timeout_s: float) -> None:
        """Raise PeerFailure if an awaited rank of this host can no longer come. Local.

        Args:
            missing: returns the local ranks that are awaited. Called after messages are received, since a rank that
                arrived and then left is no longer awaited.
            waited_s: seconds waited so far.
            timeout_s: seconds until PeerFailure of kind LATE.
        """
        self.poll()
        dead = self.watch.dead()
        ranks = [self.near[local_rank] for local_rank in missing()]
        if ranks:
            kinds = dict.fromkeys(dead.intersection(ranks), FailureKind.DEAD)
            # What a rank said before it died is more informative than its death.
            said = {rank: kind for rank in ranks if (kind := self._will_not_finish(rank)) is not None}
            if kinds or said:
                raise PeerFailure(said or kinds, waited_s)
            try:
                self._look(ranks, waited_s, timeout_s)
            except PeerFailure as failure:
                raise self._blamed(failure) from None

    # ---- data ------------------------------------------------------------------------------------------

    def exchange(self, sends: Parts, receives: Parts, timeout_s: float) -> None:
        """Send and receive flat contiguous tensors, each to or from a peer. After `arrive`."""
        transfers: list[GlooTransfer] = []
        eager: list[tuple[int, torch.Tensor]] = []
        for peer, tensor in receives:
            memory = tensor.view(torch.uint8)
            if memory.numel() > _EAGER_BYTES:
                transfers.append(self._gloo.receive(peer, memory, _TENSOR_TAG))
            elif memory.numel():
                eager.append((peer, memory))
        for peer, tensor in sends:
            memory = tensor.view(torch.uint8)
            if memory.numel() > _EAGER_BYTES:
                transfers.append(self._gloo.send(peer, memory, _TENSOR_TAG))
            elif memory.numel():
                self.send_message(peer, _EAGER_KIND + memory.numpy().tobytes())
        self._receive_eager(eager, timeout_s)
        self.wait_for(transfers, timeout_s)

    def _receive_eager(self, eager: Sequence[tuple[int, torch.Tensor]], timeout_s: float) -> None:
        for peer, memory in eager:
            inbox = self._eager_messages[peer]

            def awaited(peer: int = peer, inbox: deque[bytes] = inbox) -> list[int]:
                if not inbox:
                    self.poll()
                return [] if inbox else [peer]

            self._wait(awaited, timeout_s)
            memory.numpy()[:] = memoryview(inbox.popleft())

    def prepare(self, timeout_s: float) -> None:
        """Make this host's slots ready for a large tensor. Collective the first time, after `arrive`.

        The ranks then agree on the size of the chunks in which large tensors move.

        Raises:
            SharedMemoryError: on every rank, if a host could not create them.
            SetupError: this rank cannot reallocate the memory that its slots had released. The others do not know.
            PeerFailure: a rank did not come.
        """
        slot_bytes, problem = 0, None
        try:
            slot_bytes = self.local.prepare(_LARGE_BYTES, timeout_s)
        except SetupError as error:
            if self.chunk_bytes:
                raise
            problem = SharedMemoryError(str(error))
        if not self.chunk_bytes:
            found = self._gather_numbers(slot_bytes, timeout_s)
            self._raise_of_all(problem, found == 0, "the slots for large tensors")
            self.chunk_bytes = int(found.min())

    def _raise_of_all(self, problem: SharedMemoryError | None, failed: torch.Tensor, what: str) -> None:
        """Raise on every rank if a host failed to create shared memory; `failed`: bool of shape (world_size,)."""
        if problem is not None:
            raise problem
        if bool(failed.any()):
            names = {self.layout.members[rank].identity.host for rank in failed.nonzero().view(-1).tolist()}
            raise SharedMemoryError(f"{what} cannot be had on {', '.join(sorted(names))}")

    def _gather_numbers(self, own: int, timeout_s: float) -> torch.Tensor:
        """The `own` of each rank, in order. Collective, after `arrive`."""
        numbers = torch.full((self.world_size,), own, device="cpu")
        sends = [(peer, numbers[self.rank : self.rank + 1]) for peer in self._others]
        self.exchange(sends, [(peer, numbers[peer : peer + 1]) for peer in self._others], timeout_s)
        return numbers

    def finish(self) -> None:
        """Mark this host's slots as fully read by this rank, for the operation begun by `prepare`. Local."""
        self.local.finish(_LARGE_BYTES)

    def allocate(self, part_bytes: int, timeout_s: float) -> Region:
        """Allocate memory shared by the ranks of each host, with `part_bytes` for each of them. Collective.

        Raises:
            SharedMemoryError: on every rank, if a host could not allocate it.
            PeerFailure: a rank did not come.
        """
        self.arrive(timeout_s)
        region, problem = None, None
        try:
            region = self.local.allocate(part_bytes, timeout_s)
        except SharedMemoryError as error:
            problem = error
        failed = self._gather_numbers(int(problem is not None), timeout_s)
        self._raise_of_all(problem, failed != 0, f"{part_bytes / 2**20:.1f} MiB of shared memory for each rank")
        assert region is not None
        return region

    def wait_for(self, transfers: Sequence[GlooTransfer], timeout_s: float) -> None:
        """Wait until these transfers have finished.

        Raises:
            PeerFailure: a peer failed, left, or was too late.
        """
        try:
            self._watchdog.wait(transfers, timeout_s)
        except PeerFailure as failure:
            raise self._blamed(failure) from None

    def start_sum(self, tensor: torch.Tensor, timeout_s: float) -> GlooTransfer:
        """Start summing a flat contiguous tensor in place. Collective over the first ranks of all hosts.

        After `arrive`.

        Raises:
            PeerFailure: at the first sum, a rank failed or left before all were connected.
            RendezvousError: at the first sum, a host is unreachable.
        """
        first_ranks, since = self.first_ranks, time.monotonic()

        def look() -> None:
            self._poll_and_look(first_ranks.others, time.monotonic() - since, timeout_s)

        if not first_ranks.are_connected:
            with self._in_sum():
                first_ranks.connect(timeout_s, look)
        return first_ranks.start_sum(tensor)

    def wait_for_sum(self, under_way: GlooTransfer, timeout_s: float) -> None:
        """Wait until a sum of the first ranks has finished.

        Raises:
            PeerFailure: a peer failed, left, or was too late.
        """
        with self._in_sum():
            self._watchdog.wait([under_way], timeout_s)

    @contextlib.contextmanager
    def _in_sum(self) -> Iterator[None]:
        """Mark that this rank waits for some of the first ranks. See [Note: who is late] in `late_ranks.py`."""
        self._is_in_sum = True
        try:
            yield
        except PeerFailure as failure:
            raise self._blamed(failure) from None
        finally:
            self._is_in_sum = False

    def _abort_transfers(self) -> None:
        self._gloo.abort()
        self.first_ranks.abort()

    def send_chunk(self, peer: int, memory: torch.Tensor, phase: int) -> GlooTransfer:
        """Start sending a part of a reduction: uint8, contiguous. Local."""
        return self._gloo.send(peer, memory, _CHUNK_TAG + phase)

    def receive_chunk(self, peer: int, memory: torch.Tensor, phase: int) -> GlooTransfer:
        """Start receiving a part of a reduction, in the order of the peer's `send_chunk` of that phase. Local."""
        return self._gloo.receive(peer, memory, _CHUNK_TAG + phase)

    def take_buffer(self, num_bytes: int) -> torch.Tensor:
        """A uint8 tensor of that many bytes, from a pool. Local; new memory costs more than the work on it."""
        waiting = self._pool.get(num_bytes)
        if waiting:
            self._pool_bytes -= num_bytes
            return waiting.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def give_buffer(self, buffer: torch.Tensor) -> None:
        """Return a tensor to the pool. Local."""
        num_bytes = buffer.numel()
        if self._pool_bytes + num_bytes > _POOL_BYTES:
            self._pool.clear()
            self._pool_bytes = 0
        self._pool.setdefault(num_bytes, []).append(buffer)
        self._pool_bytes += num_bytes

    # ---- point to point --------------------------------------------------------------------------------

    def start_send(self, peer: int, tensor: torch.Tensor) -> list[GlooTransfer]:
        memory = tensor.view(torch.uint8)
        return [self._gloo.watch(self._gloo.send(peer, memory, _P2P_TAG), self.wake_here)] if memory.numel() else []

    def start_receive(self, peer: int, tensor: torch.Tensor) -> list[GlooTransfer]:
        memory = tensor.view(torch.uint8)
        return [self._gloo.watch(self._gloo.receive(peer, memory, _P2P_TAG), self.wake_here)] if memory.numel() else []

    def are_done(self, requests: list[GlooTransfer]) -> bool:
        """Whether these transfers have finished successfully. Local; does not wait.

        Failed ones never do: the wait for them ends when their peer is found to be gone, and names it.
        """
        return all(transfer.is_done and not transfer.has_failed for transfer in requests)

    def abandon(self, memory: object) -> None:
        """Do nothing: Gloo's transport keeps the memory of pending transfers."""

    # ---- end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.waiter.close()
        in_good_order = not self.has_failed and self._gloo.is_idle and self.first_ranks.is_idle
        self._send_final_notice()
        self._watchdog.close()
        self._gloo.close(in_good_order)
        self.first_ranks.close(in_good_order)
        self.local.close()
        self.watch.close()
        with self.lock:
            self.links.close(self._timeout_s if in_good_order else _CLOSE_PATIENCE_S)
        self._pool.clear()

    def disown(self) -> None:
        """In a forked child: release the connections, so that they end with the parent. Local."""
        super().disown()
        self.links.disown()

    @property
    def local_rank_of(self) -> Mapping[int, int]:
        """Rank in the local team of each rank on this host."""
        return {rank: local_rank for local_rank, rank in enumerate(self.near)}
