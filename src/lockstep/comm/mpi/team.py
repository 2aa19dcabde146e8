"""The ranks of one group, connected by MPI: notices, exchanges of tensors, waits with a deadline.

[Note: one channel] All short messages of a group (`board.py`'s notices, and what point to point has to say) go through
one tag, into one receive from any source that is always posted. What one rank says, the others hear in order; its last
message is its final notice. Whoever waits for anything listens, so news of a rank that failed is heard in any wait.

[Note: arrival] A rank comes to a collective by sending its record to all peers, and goes on when it has
heard all of theirs. Only then do tensors move, straight between the memories of users, in messages whose sizes all
ranks know. A rank that gives up says so, and how many collectives it had finished: a peer that hears this
knows whether what it still waits for will come.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.comm.mpi.board import NOTICE_BYTES, MpiBoard, NoticeKind, notice_kind
from lockstep.comm.mpi.library import load
from lockstep.comm.mpi.waiter import MpiWaiter
from lockstep.shm.board import Failure
from lockstep.shm.liveness import PeerIdentity, Watch
from lockstep.shm.sync import PeerState, PeerTrouble, TroubleKind

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MESSAGE_BYTES", "MpiTeam"]

# Longest message through the one channel, notices included.
MESSAGE_BYTES = 8 << 10
assert MESSAGE_BYTES >= NOTICE_BYTES

_CHANNEL_TAG, _TENSOR_TAG, _MAIL_TAG = 1, 2, 3
_PIECE_BYTES = 1 << 30  # MPI counts in 32 bits
_ALIGNMENT_BYTES = 64
_FORGET_SENDS_AT = 64

_Transfers = Sequence[tuple[int, torch.Tensor]]


class _WaitingText:
    """What a rank waits for in a send or receive. Others are not told: it is not worth a message to each."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._text = ""

    def say_waiting(self, rank: int, text: str) -> None:
        """Keep what this rank waits for; empty for nothing."""
        assert rank == self._rank
        self._text = text

    def waiting(self, rank: int) -> str:
        """What that rank waits for; empty for nothing, or if this rank does not know."""
        return self._text if rank == self._rank else ""


class MpiTeam:
    """The ranks of one group, for an engine, a flight record and point to point.

    Args:
        comm: a communicator of this group's own.
        identities: the process of each rank.

    Attributes:
        rank: this rank in the group.
        world_size: ranks in the group.
        board: what all ranks have said.
        watch: liveness of the peers on this host.
        waiter: how to wait.
        lock: held around every call into MPI on this group's communicator.
        mail: messages for point to point that were heard, as (rank, bytes), in order.
        mail_area: what this rank waits for in point to point.
        after_step: called once when all have come to a collective, then forgotten; the flight record sets it.
        finished: number of the last collective that this rank has finished.
    """

    def __init__(self, comm: MPI.Intracomm, identities: Sequence[PeerIdentity]) -> None:
        self._mpi = load()
        self._comm = comm
        self.rank = comm.Get_rank()
        self.world_size = comm.Get_size()
        self._others = tuple(peer for peer in range(self.world_size) if peer != self.rank)
        self.board = MpiBoard(self.rank, identities, on_failure=self._tell_failure)
        host = identities[self.rank].host
        on_this_host = {peer: identities[peer] for peer in self._others if identities[peer].host == host}
        self.watch = Watch(on_this_host)
        self.waiter = MpiWaiter(len(on_this_host) + 1)
        self.lock = threading.RLock()
        self.mail: deque[tuple[int, bytes]] = deque()
        self.mail_area = _WaitingText(self.rank)
        self.after_step: Callable[[], None] | None = None
        self.finished = 0
        self._number = 0  # of the collective that this rank is in
        self._arrived = [0] * self.world_size  # number of the last collective that each rank came to
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._sending: list[MPI.Request] = []
        self._abandoned: list[object] = []  # requests that were given up, and the memory they may touch
        self._has_left = False
        self._buffer = bytearray(MESSAGE_BYTES)
        self._status = self._mpi.Status()
        self._receiving = comm.Recv_init([self._buffer, self._mpi.BYTE], self._mpi.ANY_SOURCE, _CHANNEL_TAG)
        self._is_listening = bool(self._others)
        if self._is_listening:
            self._receiving.Start()

    # ---- the one channel -----------------------------------------------------------------------------

    def send_message(self, peer: int, message: bytes) -> None:
        """Send at most `MESSAGE_BYTES` to a peer. Local."""
        assert len(message) <= MESSAGE_BYTES
        with self.lock:
            if len(self._sending) >= _FORGET_SENDS_AT:
                self._forget_sent()
            self._sending.append(self._comm.Isend([message, self._mpi.BYTE], peer, _CHANNEL_TAG))

    def _forget_sent(self) -> None:
        self._mpi.Request.Testsome(self._sending)
        self._sending = [request for request in self._sending if request]

    def listen(self) -> None:
        """Take in what the peers have said. Local; waits for nothing."""
        with self.lock:
            while self._is_listening and self._receiving.Test(self._status):
                num_bytes = self._status.Get_count(self._mpi.BYTE)
                self._hear(self._status.Get_source(), memoryview(self._buffer)[:num_bytes])
                if self._is_listening:
                    self._receiving.Start()

    def _hear(self, peer: int, message: memoryview) -> None:
        kind = notice_kind(message)
        if kind is None:
            self.mail.append((peer, bytes(message)))
            return
        self.board.hear(peer, message)
        if kind is NoticeKind.ENTER:
            self._arrived[peer] = self.board.number(peer)
        else:
            # Everybody's last message is a final notice.
            self._is_listening = not self.board.all_final(self._others)

    # ---- collectives ---------------------------------------------------------------------------------

    def arrive(self, timeout_s: float) -> None:
        """Wait until all ranks have come to this collective, if they have not yet. See [Note: arrival].

        Raises:
            PeerTrouble: a rank cannot come, or did not come in time.
            CollectiveMismatch: not all came for the same.
        """
        check = self.after_step
        if check is None:
            return
        self._number = number = self.board.number(self.rank)
        notice = self.board.enter_notice()
        for peer in self._others:
            self.send_message(peer, notice)

        def awaited() -> list[int]:
            self.listen()
            return [peer for peer in self._others if self._arrived[peer] < number]

        self._wait(awaited, timeout_s)
        # Whoever came first may have given up since.
        gave_up = [peer for peer in self._others if self._will_not_finish(peer) is TroubleKind.FAILED]
        if gave_up:
            raise PeerTrouble(dict.fromkeys(gave_up, TroubleKind.FAILED), 0.0)
        self.after_step = None
        check()

    def realign(self) -> None:
        """After a mismatch there is nothing to do: no tensor has moved yet."""

    def exchange(self, sends: _Transfers, receives: _Transfers, timeout_s: float) -> None:
        """Send and receive flat contiguous tensors, each to or from a peer. After `arrive`.

        Every tensor sent must meet a receive of as many bytes on that peer, in the same order for each pair of ranks.

        Raises:
            PeerTrouble: a peer failed or left, or was not done in time.
        """
        requests: list[tuple[MPI.Request, Sequence[int]]] = []
        with self.lock:
            for start, transfers in ((self._comm.Irecv, receives), (self._comm.Isend, sends)):
                for peer, tensor in transfers:
                    requests += ((start(piece, peer, _TENSOR_TAG), (peer,)) for piece in self.pieces(tensor))
        self._complete(requests, (sends, receives), timeout_s)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Copy the root's flat contiguous tensor to all ranks. After `arrive`.

        Raises:
            PeerTrouble: a peer failed or left, or was not done in time.
        """
        for piece in self.pieces(tensor):
            with self.lock:
                request = self._comm.Ibcast(piece, root)
            self._complete([(request, self._others)], tensor, timeout_s)

    def scratch(self, like: torch.Tensor) -> list[torch.Tensor]:
        """For each rank a tensor of `like`'s dtype and numel, in memory that the next call uses again. Local."""
        part_bytes = like.numel() * like.element_size()
        stride = -(-part_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._scratch.numel() < stride * self.world_size:
            self._scratch = torch.empty(stride * self.world_size, dtype=torch.uint8)
        starts = [rank * stride for rank in range(self.world_size)]
        return [self._scratch[start : start + part_bytes].view(like.dtype) for start in starts]

    def pieces(self, tensor: torch.Tensor) -> Iterator[Any]:
        """The memory of a flat contiguous tensor in pieces that MPI can count; none for an empty one. Local."""
        address, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for start in range(0, num_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, num_bytes - start)
            yield [self._mpi.buffer.fromaddress(address + start, size), self._mpi.BYTE]

    def _complete(self, requests: list[tuple[MPI.Request, Sequence[int]]], memory: object, timeout_s: float) -> None:
        """Wait for requests, each given with the peers on which it depends."""
        pending = [request for request, _ in requests]

        def awaited() -> list[int]:
            with self.lock:
                self._mpi.Request.Testsome(pending)
                if not any(pending):
                    return []
                self.listen()
                return sorted({peer for request, peers in requests if request for peer in peers})

        try:
            self._wait(awaited, timeout_s)
        except BaseException:
            self.abandon((pending, memory))
            raise

    # ---- point to point ------------------------------------------------------------------------------

    def start_send(self, peer: int, tensor: torch.Tensor) -> list[MPI.Request]:
        """Begin to send a flat contiguous tensor that the peer waits for with `start_receive`. Local."""
        with self.lock:
            return [self._comm.Isend(piece, peer, _MAIL_TAG) for piece in self.pieces(tensor)]

    def start_receive(self, peer: int, tensor: torch.Tensor) -> list[MPI.Request]:
        """Begin to receive a flat contiguous tensor, in the order of the peer's `start_send`. Local."""
        with self.lock:
            return [self._comm.Irecv(piece, peer, _MAIL_TAG) for piece in self.pieces(tensor)]

    def are_done(self, requests: list[MPI.Request]) -> bool:
        """Whether requests have finished. Local; waits for nothing."""
        with self.lock:
            return bool(self._mpi.Request.Testall(requests))

    def abandon(self, memory: object) -> None:
        """Give up requests: keep them, and the memory that they may touch, for as long as MPI is there. Local."""
        self._abandoned.append(memory)

    # ---- waiting -------------------------------------------------------------------------------------

    def _wait(self, awaited: Callable[[], list[int]], timeout_s: float) -> None:
        self.waiter.wait(awaited, lambda ranks, waited_s: self._look(ranks, waited_s, timeout_s))

    def _look(self, ranks: list[int], waited_s: float, timeout_s: float) -> None:
        """Raise PeerTrouble if one of these ranks will not do its part in this collective."""
        if self.waiter.closed:
            raise PeerTrouble({self.rank: TroubleKind.CLOSED}, waited_s)
        kinds = {rank: kind for rank in ranks if (kind := self._will_not_finish(rank)) is not None}
        if not kinds:
            kinds = dict.fromkeys(self.watch.dead().intersection(ranks), TroubleKind.DEAD)
        if not kinds and waited_s >= timeout_s:
            kinds = dict.fromkeys(ranks, TroubleKind.LATE)
        if kinds:
            raise PeerTrouble(kinds, waited_s)

    def _will_not_finish(self, rank: int) -> TroubleKind | None:
        """What is wrong with a rank that said it goes without finishing this collective, or None."""
        if self.board.finished.get(rank, self._number) >= self._number:
            return None
        return TroubleKind.FAILED if self.board.state(rank) == PeerState.FAILED else TroubleKind.LEFT

    # ---- end -----------------------------------------------------------------------------------------

    def _tell_failure(self, _: Failure) -> None:
        self._say_goodbye()

    @property
    def has_left(self) -> bool:
        """Whether this rank has said its last word in the group."""
        return self._has_left

    def _say_goodbye(self) -> None:
        with self.lock:
            if not self._has_left:
                self._has_left = True
                notice = self.board.final_notice(self.finished)
                for peer in self._others:
                    self.send_message(peer, notice)

    def close(self) -> None:
        """Leave, in good order unless this rank has failed. Local; peers that still need it raise RankLost."""
        self.waiter.closed = True
        self.watch.close()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._say_goodbye()

    @property
    def has_failed(self) -> bool:
        """Whether any rank has, so that others may never be done with this group."""
        return any(self.board.state(rank) == PeerState.FAILED for rank in range(self.world_size))

    def try_release(self) -> bool:
        """After `close`: give the communicator back if all ranks have left, and say whether that is so. Local."""
        with self.lock:
            if self._comm == self._mpi.COMM_NULL:
                return True
            self.listen()
            self._forget_sent()
            if self._is_listening or self._sending:
                return False
            if not self._abandoned:
                self._receiving.Free()
                self._comm.Free()
            return True
