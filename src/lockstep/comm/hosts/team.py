"""The team of a group on several hosts: messages between all ranks, and shared memory within each host.

Every rank has a connection to every other (`links.py`), for short messages: what it has come for, that it
leaves, that it has failed. So each rank learns soon, and by itself, that any other dies.
The ranks of one host form a team of shared memory (`local`), through which data moves there. Between hosts, Gloo moves
large data (`gloo_transport.py`).

[Note: who waits for whom] A rank that waits in a step of its local team, or for data of another host, waits for ranks
that may themselves wait for others. A rank that notices a failure breaks the group and tells all. So it is enough that
a wait watches the ranks that it waits for, and receives their messages.
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
# A tensor of up to this size travels as a message.
_EAGER_BYTES = 64 << 10
# Unlike those of notices and of the mailbox.
_EAGER_KIND, _WAKE = (31).to_bytes(8, "little"), (30).to_bytes(8, "little")
_SAYS_AFTER_S, _SAYS_AFTER_SHARE = 1.0, 0.25  # and of the deadline; what comes first
assert _EAGER_BYTES + len(_EAGER_KIND) <= LONGEST_MESSAGE_BYTES

_POOL_BYTES = 64 << 20
_CLOSE_PATIENCE_S = 2.0


class _LocalWaiter(StepWaiter):
    """Waits for ranks of this host, and receives the messages of all hosts meanwhile."""

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
        """Raise PeerFailure, in ranks of the whole group, if a rank that is still awaited cannot come any more."""
        self._team.look_locally(lambda: [rank for rank, index in pending if words[index] < target], waited_s, timeout_s)
        return math.inf


class _LocalTeam(SharedMemoryTeam):
    """The ranks of this host, in collectives of ranks that do not all learn when there is no memory here."""

    def prepare(self, num_bytes: int, timeout_s: float) -> int:
        """Make sure that slots for an operation on `num_bytes` exist. Collective on first use of large ones.

        Raises:
            SetupError: there is no memory for them, on every rank of this host, or on this rank alone, where it had
                some before. The engine tells the others.
            PeerFailure: a rank did not come to their first use.
        """
        try:
            return super().prepare(num_bytes, timeout_s)
        except SharedMemoryError as error:
            raise SetupError(str(error)) from error


class _FarWatch(Watch):
    """Also sees the end of processes on other hosts, by their closed connections."""

    def __init__(self, near: dict[int, PeerIdentity], links: Links) -> None:
        super().__init__(near)
        self._links = links

    def dead(self) -> set[int]:
        """Ranks whose process has ended, or whose host does not answer any more."""
        self._links.lose_silent()
        return super().dead() | self._links.lost


class HostsTeam(MessageTeam[GlooTransfer]):
    """The ranks of one group on several hosts, for an engine, a flight recorder and point to point.

    Args:
        rank: this rank in the group.
        layout: which ranks share a host.
        links: the connections to the other ranks.
        segment: the control segment of this host's ranks, who have met.
        gloo: moves large data between hosts.
        wire: the wire format of float sums between hosts.
        timeout_s: how long `close` waits for peers that have not read yet what they were sent.
        global_ranks: global rank of each rank of the group.

    Attributes:
        layout: which ranks share a host.
        interface: the network interface by which this rank reaches other hosts.
        links: the links to the other ranks.
        first_ranks: the first rank of each host, for large sums.
        gloo: Gloo's connections to the other ranks.
        local: the team of shared memory of this host.
        wire: the wire format of float sums between hosts.
        chunk_bytes: how many bytes of a large tensor move at a time; 0 before `prepare`.
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
        self._is_in_sum = False  # of the first ranks
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
                    self.links.interrupt()  # Another thread may wait for what was received here.

    def wake(self, peer: int) -> None:
        """Wake a rank that sleeps in `sleep`. Local."""
        self.send_message(peer, _WAKE)

    def wake_here(self) -> None:
        """End the sleep of this rank's other threads. Local."""
        self.links.interrupt()

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a message comes, or another thread of this rank has received one. Local."""
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
        """Those of these ranks that are not in a later collective already; the others have done their part in this."""
        return [rank for rank in ranks if self.blocks.number(rank) <= self._number]

    def note_finished(self, number: int) -> None:
        super().note_finished(number)
        self._late_ranks.say_to_go_on(number)

    def _tell_all(self, message: bytes) -> None:
        with self.lock:
            for peer in () if self.has_left else self.peers:
                self.send_message(peer, message)

    def _blamed(self, failure: PeerFailure) -> PeerFailure:
        """The same failure, of those for whom the late ones wait. See [Note: who is late] in `late_ranks.py`."""
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
        """Raise PeerFailure if a rank of this host that is awaited cannot come any more. Local.

        Args:
            missing: tells the local ranks that are awaited. Called after messages are received, since a rank that came
                and then left is awaited no more.
            waited_s: seconds waited so far.
            timeout_s: seconds until PeerFailure of kind LATE.
        """
        self.poll()
        dead = self.watch.dead()
        ranks = [self.near[local_rank] for local_rank in missing()]
        if ranks:
            kinds = dict.fromkeys(dead.intersection(ranks), FailureKind.DEAD)
            # What a rank said before it died says more than its death.
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
        """Make the slots of this host ready for a large tensor. Collective, after `arrive`, the first time.

        Then the ranks agree on the size of the chunks in which large tensors move.

        Raises:
            SharedMemoryError: on every rank, if a host could not make them.
            SetupError: this rank cannot have the memory again that its slots had given back. The others do not know.
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
        """Raise on every rank if a host has failed to make shared memory; bool of shape (world_size,) tells which."""
        if problem is not None:
            raise problem
        if bool(failed.any()):
            names = {self.layout.members[rank].identity.host for rank in failed.nonzero().view(-1).tolist()}
            raise SharedMemoryError(f"{what} cannot be had on {', '.join(sorted(names))}")

    def _gather_numbers(self, own: int, timeout_s: float) -> torch.Tensor:
        """A number of each rank, in order. Collective, after `arrive`."""
        numbers = torch.full((self.world_size,), own, device="cpu")
        sends = [(peer, numbers[self.rank : self.rank + 1]) for peer in self._others]
        self.exchange(sends, [(peer, numbers[peer : peer + 1]) for peer in self._others], timeout_s)
        return numbers

    def finish(self) -> None:
        """Say that this rank has read the slots of its host for the last time since `prepare`. Local."""
        self.local.finish(_LARGE_BYTES)

    def allocate(self, part_bytes: int, timeout_s: float) -> Region:
        """Memory that the ranks of each host share, with `part_bytes` for each of them. Collective.

        Raises:
            SharedMemoryError: on every rank, if a host could not make it.
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
        """Return when these transfers have finished.

        Raises:
            PeerFailure: a peer failed or left, or was not done in time.
        """
        try:
            self._watchdog.wait(transfers, timeout_s)
        except PeerFailure as failure:
            raise self._blamed(failure) from None

    def start_sum(self, tensor: torch.Tensor, timeout_s: float) -> GlooTransfer:
        """Begin to add up a flat contiguous tensor in place over the first rank of each host, which all call this.

        After `arrive`.

        Raises:
            PeerFailure: at the first sum, a rank failed or left before all were connected.
            RendezvousError: at the first sum, a host cannot be reached.
        """
        first_ranks, since = self.first_ranks, time.monotonic()

        def look() -> None:
            self._poll_and_look(first_ranks.others, time.monotonic() - since, timeout_s)

        if not first_ranks.are_connected:
            with self._in_sum():
                first_ranks.connect(timeout_s, look)
        return first_ranks.start_sum(tensor)

    def wait_for_sum(self, under_way: GlooTransfer, timeout_s: float) -> None:
        """Return when a sum of the first ranks has finished.

        Raises:
            PeerFailure: a peer failed or left, or was not done in time.
        """
        with self._in_sum():
            self._watchdog.wait([under_way], timeout_s)

    @contextlib.contextmanager
    def _in_sum(self) -> Iterator[None]:
        """This rank waits for some of the first ranks. See [Note: who is late] in `late_ranks.py`."""
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
        """Begin to send a part of a reduction: uint8, contiguous. Local."""
        return self._gloo.send(peer, memory, _CHUNK_TAG + phase)

    def receive_chunk(self, peer: int, memory: torch.Tensor, phase: int) -> GlooTransfer:
        """Begin to receive a part of a reduction, in the order of the peer's `send_chunk` of that phase. Local."""
        return self._gloo.receive(peer, memory, _CHUNK_TAG + phase)

    def take_buffer(self, num_bytes: int) -> torch.Tensor:
        """A uint8 tensor of that many bytes, from a pool. Local; fresh memory costs more than the work on it."""
        waiting = self._pool.get(num_bytes)
        if waiting:
            self._pool_bytes -= num_bytes
            return waiting.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def give_buffer(self, buffer: torch.Tensor) -> None:
        """Give a tensor back to the pool. Local."""
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
        """Whether these transfers have finished well. Local; waits for nothing.

        Those that failed never do: that their peer is gone ends the wait for them, with its name.
        """
        return all(transfer.is_done and not transfer.has_failed for transfer in requests)

    def abandon(self, memory: object) -> None:
        """Do nothing: Gloo's transport keeps the memory of what is under way."""

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
        """In a forked child: let go of the connections, so that the end of the parent ends them. Local."""
        super().disown()
        self.links.disown()

    @property
    def local_rank_of(self) -> Mapping[int, int]:
        """For each rank of this host its rank in the local team."""
        return {rank: local_rank for local_rank, rank in enumerate(self.near)}
