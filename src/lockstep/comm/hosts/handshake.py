"""The handshake by which two newly connected ranks authenticate each other.

The client has connected to the listener of the server::

    client → server    its rank, and a random challenge
    server → client    an HMAC over both ranks and the challenge, and a second challenge
    client → server    an HMAC over the same and the server's challenge
    server → client    whether it is admitted

The key of both HMACs is derived from the job's secret and from the nonce of the server's listener, which is published
in the store. The secret itself is not in the store, so a process that reads the store can neither impersonate a rank
nor make one talk to it. If the job has no secret, the nonce is all that a client needs to know; it must then also
connect from the address that its rank has published.

Nothing here blocks: it reads bytes as they arrive, and none beyond the end of the next message.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from enum import Enum, auto

from lockstep.errors import RendezvousError
from lockstep.secret import MAC_BYTES, Secret

__all__ = ["IncomingHandshake", "OutgoingHandshake", "Stranger"]

_MAGIC = b"LSG1"
_CHALLENGE_BYTES = 16
_HELLO = struct.Struct(f"!4sI{_CHALLENGE_BYTES}s")
_ANSWER_BYTES = MAC_BYTES + _CHALLENGE_BYTES
_ADMITTED, _REFUSED = b"\x01", b"\x00"
_SAY_WITHIN_S = 15.0
_TRY_AGAIN_AFTER_S = 0.05


class Stranger(Exception):
    """The peer is not a rank that is expected here. The message is a clause."""


class _SocketReader:
    """Collects the bytes of a message of known length."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._data = bytearray()

    def take(self, size: int) -> bytes | None:
        """The next `size` bytes, or None until all have arrived.

        Raises:
            OSError: the connection is closed.
        """
        while len(self._data) < size:
            try:
                piece = self._link.recv(size - len(self._data))
            except (BlockingIOError, InterruptedError):
                return None
            if not piece:
                raise ConnectionError("it closed the connection")
            self._data += piece
        data, self._data = bytes(self._data), bytearray()
        return data


def _proof(key: Secret, role: bytes, server: int, client: int, challenge: bytes, answer: bytes) -> bytes:
    return key.mac(b"handshake", role, str(server).encode(), str(client).encode(), challenge, answer)


class IncomingHandshake:
    """The server's side of a handshake.

    Args:
        link: the accepted connection.
        address: the client's address.
        rank: this rank in the group.
        key: the key of this listener.
        admits: raises Stranger if a rank from that address is not expected.
    """

    def __init__(
        self, link: socket.socket, address: str, rank: int, key: Secret, admits: Callable[[int, str], None]
    ) -> None:
        link.setblocking(False)
        self.socket = link
        self.address = address
        self.deadline = time.monotonic() + _SAY_WITHIN_S
        self._rank = rank
        self._key = key
        self._admits = admits
        self._reader = _SocketReader(link)
        self._hello: tuple[int, bytes, bytes] | None = None

    def advance(self) -> int | None:
        """Process the bytes received so far; returns the client's rank once it is authenticated, else None.

        Raises:
            Stranger: the client is not a rank that is expected here.
        """
        try:
            if self._hello is None and (data := self._reader.take(_HELLO.size)) is not None:
                self._answer(data)
            if self._hello is not None and (proof := self._reader.take(MAC_BYTES)) is not None:
                return self._judge(proof)
        except OSError as error:
            raise Stranger(str(error)) from None
        return None

    def _answer(self, data: bytes) -> None:
        magic, peer, challenge = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise Stranger("it did not send a handshake")
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        self._hello = (peer, challenge, own)
        self.socket.send(_proof(self._key, b"server", self._rank, peer, challenge, own) + own)

    def _judge(self, proof: bytes) -> int:
        assert self._hello is not None
        peer, challenge, own = self._hello
        try:
            if not hmac.compare_digest(proof, _proof(self._key, b"client", self._rank, peer, challenge, own)):
                raise Stranger(f"it claims to be rank {peer}, but does not have this job's token")
            self._admits(peer, self.address)
        except Stranger:
            with contextlib.suppress(OSError):
                self.socket.send(_REFUSED)
            raise
        self.socket.send(_ADMITTED)
        return peer


class _Step(Enum):
    CONNECT = auto()
    ANSWER = auto()
    ADMISSION = auto()


class OutgoingHandshake:
    """The client's side of a handshake; reconnects if the connection breaks before the server has answered.

    Args:
        rank: this rank in the group.
        peer: the rank to connect to.
        endpoint: address and port of that rank.
        key: the key of its listener.
        source: the address of this host from which to connect.
    """

    def __init__(self, rank: int, peer: int, endpoint: tuple[str, int], key: Secret, source: str) -> None:
        self.peer = peer
        self._rank = rank
        self._endpoint = endpoint
        self._key = key
        self._source = source
        self._challenge = b""
        self._again_s = 0.0
        self.socket: socket.socket | None = None
        self._connect()

    def _connect(self) -> None:
        family = socket.AF_INET6 if ":" in self._endpoint[0] else socket.AF_INET
        self.socket = link = socket.socket(family, socket.SOCK_STREAM)
        link.setblocking(False)
        with contextlib.suppress(OSError):  # otherwise from any address that the kernel chooses
            link.bind((self._source, 0))
        self._step, self._reader = _Step.CONNECT, _SocketReader(link)
        with contextlib.suppress(BlockingIOError):
            link.connect(self._endpoint)

    @property
    def events(self) -> int:
        """The events for which to poll the socket."""
        return select.POLLOUT if self._step is _Step.CONNECT else select.POLLIN

    def begin_again(self, now_s: float) -> None:
        """Reconnect if it is time to."""
        if self.socket is not None or now_s < self._again_s:
            return
        try:
            self._connect()
        except OSError:
            self._break(now_s)

    def _break(self, now_s: float) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket, self._again_s = None, now_s + _TRY_AGAIN_AFTER_S

    def advance(self) -> bool:
        """Process the bytes received so far; returns whether both ranks are authenticated.

        Raises:
            RendezvousError: the listener is not that rank, or rejects this one.
            OSError: nothing is reachable there.
        """
        link = self.socket
        assert link is not None
        if self._step is _Step.CONNECT:
            failure = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure:
                raise OSError(failure, os.strerror(failure))
            self._challenge = secrets.token_bytes(_CHALLENGE_BYTES)
            link.send(_HELLO.pack(_MAGIC, self._rank, self._challenge))
            self._step = _Step.ANSWER
            return False
        try:
            return self._receive(link)
        except OSError:
            self._break(time.monotonic())
            return False

    def _receive(self, link: socket.socket) -> bool:
        if self._step is _Step.ANSWER:
            answer = self._reader.take(_ANSWER_BYTES)
            if answer is None:
                return False
            proof, challenge = answer[:MAC_BYTES], answer[MAC_BYTES:]
            wanted = _proof(self._key, b"server", self.peer, self._rank, self._challenge, challenge)
            if not hmac.compare_digest(proof, wanted):
                raise RendezvousError(f"the listener has another token than this rank ({self._key.name})")
            link.send(_proof(self._key, b"client", self.peer, self._rank, self._challenge, challenge))
            self._step = _Step.ADMISSION
        admission = self._reader.take(1)
        if admission is not None and admission != _ADMITTED:
            raise RendezvousError(f"it rejected rank {self._rank}")
        return admission is not None
