"""The ranks of one group, connected by MPI: control messages, exchanges of tensors, waits with a deadline.

`lockstep.comm.messages.message_team` has the part common to all teams that exchange messages. Here, short messages use
one tag, and one receive from any source that is always posted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.comm.messages.message_team import MESSAGE_BYTES, MessageTeam, Parts
from lockstep.comm.mpi.waiter import MpiWaiter
from lockstep.mpi_library import load
from lockstep.shm.liveness import PeerIdentity, Watch

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTeam"]

_CHANNEL_TAG, _TENSOR_TAG, _MAIL_TAG = 1, 2, 3
_PIECE_BYTES = 1 << 30  # MPI counts are 32-bit
_FORGET_SENDS_AT = 64


class MpiTeam(MessageTeam["MPI.Request"]):
    """The ranks of one group, for an engine, a flight recorder and point to point.

    Args:
        comm: a communicator that only this group uses.
        identities: the process of each rank.
        local_peers: the other ranks on this host.
    """

    def __init__(self, comm: MPI.Intracomm, identities: Sequence[PeerIdentity], local_peers: Collection[int]) -> None:
        self._mpi = load()
        self._comm = comm
        rank = comm.Get_rank()
        super().__init__(
            rank, identities, Watch({peer: identities[peer] for peer in local_peers}), sorted({rank, *local_peers})
        )
        self._waiter = MpiWaiter(len(local_peers) + 1)
        self._sending: list[MPI.Request] = []
        self._abandoned: list[object] = []  # abandoned requests, and the memory that they may access
        self._buffer = bytearray(MESSAGE_BYTES)
        self._status = self._mpi.Status()
        self._receiving = comm.Recv_init([self._buffer, self._mpi.BYTE], self._mpi.ANY_SOURCE, _CHANNEL_TAG)
        if self._is_listening:
            self._receiving.Start()

    @property
    def waiter(self) -> MpiWaiter:
        """Waits without blocking in MPI."""
        return self._waiter

    # ---- the one channel -----------------------------------------------------------------------------

    def send_message(self, peer: int, message: bytes | memoryview) -> None:
        """Send at most `MESSAGE_BYTES` to a peer. Local."""
        assert len(message) <= MESSAGE_BYTES
        with self.lock:
            if len(self._sending) >= _FORGET_SENDS_AT:
                self._forget_sent()
            self._sending.append(self._comm.Isend([message, self._mpi.BYTE], peer, _CHANNEL_TAG))

    def _forget_sent(self) -> None:
        self._mpi.Request.Testsome(self._sending)
        self._sending = [request for request in self._sending if request]

    def poll(self) -> None:
        with self.lock:
            while self._is_listening and self._receiving.Test(self._status):
                num_bytes = self._status.Get_count(self._mpi.BYTE)
                self._receive_message(self._status.Get_source(), memoryview(self._buffer)[:num_bytes])
                if self._is_listening:
                    self._receiving.Start()

    # ---- collectives ---------------------------------------------------------------------------------

    def exchange(self, sends: Parts, receives: Parts, timeout_s: float) -> None:
        """Send and receive flat contiguous tensors, each to or from a peer. After `arrive`."""
        requests: list[tuple[MPI.Request, Sequence[int]]] = []
        with self.lock:
            for start, transfers in ((self._comm.Irecv, receives), (self._comm.Isend, sends)):
                for peer, tensor in transfers:
                    requests += ((start(piece, peer, _TENSOR_TAG), (peer,)) for piece in self.pieces(tensor))
        self._complete(requests, (sends, receives), timeout_s)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Copy the root's flat contiguous tensor to all ranks. After `arrive`."""
        for piece in self.pieces(tensor):
            with self.lock:
                request = self._comm.Ibcast(piece, root)
            self._complete([(request, self._others)], tensor, timeout_s)

    def pieces(self, tensor: torch.Tensor) -> Iterator[Any]:
        """The memory of a flat contiguous tensor in pieces that MPI can count; none for an empty one. Local."""
        address, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for start in range(0, num_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, num_bytes - start)
            yield [self._mpi.buffer.fromaddress(address + start, size), self._mpi.BYTE]

    def _complete(self, requests: list[tuple[MPI.Request, Sequence[int]]], memory: object, timeout_s: float) -> None:
        """Wait for requests, each given with the peers that it depends on."""
        pending = [request for request, _ in requests]

        def awaited() -> list[int]:
            with self.lock:
                self._mpi.Request.Testsome(pending)
                if not any(pending):
                    return []
                self.poll()
                return sorted({peer for request, peers in requests if request for peer in peers})

        try:
            self._wait(awaited, timeout_s)
        except BaseException:
            self.abandon((pending, memory))
            raise

    # ---- point to point ------------------------------------------------------------------------------

    def start_send(self, peer: int, tensor: torch.Tensor) -> list[MPI.Request]:
        with self.lock:
            return [self._comm.Isend(piece, peer, _MAIL_TAG) for piece in self.pieces(tensor)]

    def start_receive(self, peer: int, tensor: torch.Tensor) -> list[MPI.Request]:
        with self.lock:
            return [self._comm.Irecv(piece, peer, _MAIL_TAG) for piece in self.pieces(tensor)]

    def are_done(self, requests: list[MPI.Request]) -> bool:
        """Whether these requests have finished. Local; does not wait."""
        with self.lock:
            return bool(self._mpi.Request.Testall(requests))

    def abandon(self, memory: object) -> None:
        """Give up requests, but keep them and the memory that they may access until MPI is finalized. Local."""
        self._abandoned.append(memory)

    # ---- waiting -------------------------------------------------------------------------------------

    def _wait(self, awaited: Callable[[], list[int]], timeout_s: float) -> None:
        self._waiter.wait(awaited, lambda ranks, waited_s: self._look(ranks, waited_s, timeout_s))

    @property
    def _is_closed(self) -> bool:
        return self._waiter.closed

    # ---- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        self._waiter.close()
        self.watch.close()
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._send_final_notice()

    def try_release(self) -> bool:
        """After `close`: free the communicator if all ranks have left; returns whether they have. Local."""
        with self.lock:
            if self._comm == self._mpi.COMM_NULL:
                return True
            self.poll()
            self._forget_sent()
            if self._is_listening or self._sending:
                return False
            if not self._abandoned:
                self._receiving.Free()
                self._comm.Free()
            return True
