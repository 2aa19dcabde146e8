"""Waits for transfers of Gloo end when the peer dies, also in the middle of the bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.hosts.gloo_connections import GlooConnections
from lockstep.comm.hosts.gloo_transport import GlooTransport
from lockstep.comm.hosts.watchdog import Watchdog
from lockstep.shm.sync import FailureKind, PeerFailure
from lockstep.testing import limit_s
from lockstep.torch_private import gloo_waits

NUM_BYTES = 128 << 20  # far more than a socket holds
_PEER = f"""
import sys, torch, torch.distributed as dist
from lockstep.comm.hosts.gloo_connections import GlooConnections
from lockstep.comm.hosts.gloo_transport import GlooTransport
connections = GlooConnections(dist.FileStore(sys.argv[1], 2), 1, 2, "127.0.0.1", None, 60.0)
transport = GlooTransport(connections, range(2), 0)
memory = torch.zeros({NUM_BYTES}, dtype=torch.uint8)
for line in sys.stdin:
    transport.send(0, memory, 1).wait()
"""


class Pair:
    """This process and another one, connected by Gloo, and the watchdog of this one."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", _PEER, str(folder / "store")]
        self.peer = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        store = dist.FileStore(str(folder / "store"), 2)
        connections = GlooConnections(store, 0, 2, "127.0.0.1", None, limit_s(60))
        self.transport = GlooTransport(connections, range(2), 0)
        self.watchdog = Watchdog(self.look, self.transport.abort)

    def look(self, ranks: Sequence[int], waited_s: float, timeout_s: float) -> None:
        if self.peer.poll() is not None:
            raise PeerFailure({1: FailureKind.DEAD}, waited_s)

    def tell_peer_to_send(self) -> None:
        assert self.peer.stdin is not None
        self.peer.stdin.write("now\n")
        self.peer.stdin.flush()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.watchdog.close()
    made.transport.close(in_good_order=False)
    made.peer.kill()
    made.peer.communicate()


def wait_in_thread(pair: Pair, memory: torch.Tensor) -> tuple[threading.Thread, list[BaseException]]:
    """Receive in another thread, since a wait that never ends would take pytest along; what the wait raised."""
    raised: list[BaseException] = []
    transfer = pair.transport.receive(1, memory, 1)

    def wait() -> None:
        try:
            pair.watchdog.wait([transfer], limit_s(60))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, raised


def check_ended(thread: threading.Thread, raised: list[BaseException]) -> None:
    thread.join(limit_s(20))
    assert not thread.is_alive(), "the wait continues"
    assert [type(error) for error in raised] == [PeerFailure]


def test_peer_that_dies_before_it_sends(pair: Pair) -> None:
    thread, raised = wait_in_thread(pair, torch.empty(NUM_BYTES, dtype=torch.uint8))
    pair.peer.kill()
    check_ended(thread, raised)


def stop_in_the_middle(pair: Pair) -> tuple[threading.Thread, list[BaseException]] | None:
    """Receive from the peer, and stop it when the first bytes are here; None if more had been sent by then.

    What a stopped peer has sent still comes out of the sockets, which hold far less than half of the memory.
    """
    memory = torch.ones(NUM_BYTES, dtype=torch.uint8)
    thread, raised = wait_in_thread(pair, memory)
    pair.tell_peer_to_send()
    while memory[0]:  # the first of its zeros
        time.sleep(0)  # for the thread that begins to wait
    pair.peer.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, pair.peer.pid, os.WSTOPPED | os.WNOWAIT)
    if memory[NUM_BYTES // 2]:
        return thread, raised
    pair.peer.send_signal(signal.SIGCONT)
    thread.join(limit_s(60))
    assert not raised
    return None


def test_peer_that_dies_in_the_middle(pair: Pair) -> None:
    waiting = next(filter(None, (stop_in_the_middle(pair) for _ in range(100))), None)
    assert waiting, "in 100 tries the peer had always sent the half before it could be stopped"
    pair.peer.kill()
    check_ended(*waiting)


def test_what_is_no_work_of_gloo_is_left_alone() -> None:
    assert not gloo_waits.end_wait(None)
    assert not gloo_waits.end_wait(object())


def test_torch_has_what_ends_a_wait() -> None:
    assert len(gloo_waits._aborts()) == 2
