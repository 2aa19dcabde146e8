"""Through which interface hosts talk, who may connect, and which ranks share a host."""

from __future__ import annotations

import socket
import threading

import pytest

from lockstep import network_interfaces
from lockstep.comm.hosts.layout import Layout, Member
from lockstep.comm.hosts.links import Links
from lockstep.comm.hosts.peer_listener import PeerListener
from lockstep.errors import RendezvousError
from lockstep.network_interfaces import (
    Interface,
    ProbeListener,
    candidates,
    interfaces,
    name_for_engines,
    reachable,
    source_towards,
)
from lockstep.shm.liveness import PeerIdentity

LOOPBACK = Interface("lo", "127.0.0.1", True)
FOUND = [
    LOOPBACK,
    Interface("docker0", "172.17.0.1", False),
    Interface("eth0", "203.0.113.5", False),
    Interface("eth10", "203.0.113.9", False),
    Interface("ib0", "198.51.100.7", False),
]


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ["ib0"]),
        ({"GLOO_SOCKET_IFNAME": "ib0,eth0"}, ["ib0", "eth0"]),
        ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "eth0"}, ["ib0"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ["eth0", "eth10"]),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, ["eth0"]),
        ({"NCCL_SOCKET_IFNAME": "^docker,ib"}, ["eth0", "eth10"]),
        ({"GLOO_SOCKET_IFNAME": "lo"}, ["lo"]),
        ({}, ["docker0", "eth0", "eth10", "ib0"]),
    ],
)
def test_variables_choose(variables: dict[str, str], names: list[str]) -> None:
    assert [one.name for one in candidates(variables, FOUND)] == names


def test_loopback_only_where_there_is_nothing_else() -> None:
    assert candidates({}, [LOOPBACK]) == [LOOPBACK]
    with pytest.raises(RendezvousError, match="no network interface that is up"):
        candidates({}, [])


def test_name_that_is_not_there() -> None:
    with pytest.raises(RendezvousError, match=r"GLOO_SOCKET_IFNAME=ib7, but on .* there are: lo \(127\.0\.0\.1\)"):
        candidates({"GLOO_SOCKET_IFNAME": "ib7"}, [LOOPBACK])


def test_route_comes_first() -> None:
    """The address by which this host reaches the master ranks before all others."""
    assert source_towards("127.0.0.1") == "127.0.0.1"
    own = Interface("tun0", "127.0.0.1", False)
    assert candidates({"MASTER_ADDR": "127.0.0.1"}, [*FOUND[1:], own])[0] == own
    assert LOOPBACK in interfaces()


@pytest.mark.parametrize(
    ("found", "towards_master", "towards_far_away", "name"),
    [
        (FOUND, "198.51.100.7", "203.0.113.5", "ib0"),
        (FOUND, "127.0.0.1", "203.0.113.5", "eth0"),  # rank 0's host, whose name is that of 127.0.1.1
        (FOUND, "127.0.0.1", None, None),
        (FOUND, None, None, None),
        ([LOOPBACK], "127.0.0.1", None, "lo"),
    ],
)
def test_engines_are_not_bound_to_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch,
    found: list[Interface],
    towards_master: str | None,
    towards_far_away: str | None,
    name: str | None,
) -> None:
    """No other host reaches it, and NCCL would tell all of them to come there."""
    monkeypatch.setattr(network_interfaces, "interfaces", lambda: found)
    monkeypatch.setattr(
        network_interfaces,
        "source_towards",
        lambda address: towards_master if address == "node0" else towards_far_away,
    )
    assert name_for_engines("node0") == name


def test_only_listeners_with_the_nonce_count() -> None:
    listener, other = ProbeListener([LOOPBACK]), ProbeListener([LOOPBACK])
    try:
        ((_, address, port),) = listener.endpoints
        ((_, _, strange),) = other.endpoints
        found = reachable(
            {1: (listener.nonce, [(address, strange), (address, port)]), 2: (other.nonce, [(address, port)])}
        )
        assert found == {1: [1], 2: []}
    finally:
        listener.close()
        other.close()
    assert reachable({1: (listener.nonce, [(address, port)])}) == {1: []}


def test_addresses_that_are_silent_keep_nobody_from_the_next() -> None:
    """More hosts than could be tried at once by threads, each with a first address where nothing ever answers."""
    listener = ProbeListener([LOOPBACK])
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=128) as silent:
            ((_, address, port),) = listener.endpoints
            endpoints = [silent.getsockname(), (address, port)]
            hosts = {host: (listener.nonce, list(endpoints)) for host in range(60)}
            assert reachable(hosts) == {host: [1] for host in hosts}
    finally:
        listener.close()


def connected() -> tuple[Links, Links]:
    """The links of two ranks; a stranger tries to be let in first."""
    listeners = [PeerListener("127.0.0.1") for _ in range(2)]
    address, port, _ = listeners[0].endpoint
    stranger = socket.create_connection((address, port))
    stranger.sendall(bytes(20))
    made: dict[int, Links] = {}

    def join(rank: int) -> None:
        made[rank] = listeners[rank].connect(rank, {1 - rank: listeners[1 - rank].endpoint}, 10.0, lambda: None)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stranger.recv(1) == b"", "who cannot prove who it is is turned away"
    stranger.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port))
    return made[0], made[1]


def heard(links: Links, count: int, sender: Links | None = None) -> list[tuple[int, bytes]]:
    """So many messages, or all until the peer is gone; meanwhile the sender sends what did not go at once."""
    found: list[tuple[int, bytes]] = []
    while len(found) < count and not links.lost:
        if sender is not None:
            list(sender.poll())
        found += [(peer, bytes(message)) for peer, message in links.poll()]
        links.wait(0.01)
    return found


def test_messages_in_order_and_the_end_of_a_peer() -> None:
    one, other = connected()
    messages = [bytes([number % 251]) * (number * 7 % 8000) for number in range(3000)]
    for message in messages:
        one.send(1, message)
    got = heard(other, len(messages), sender=one)
    assert [message for _, message in got] == messages
    assert {peer for peer, _ in got} == {0}
    one.send(1, b"last word")
    one.close()
    assert heard(other, 1) == [(0, b"last word")]
    heard(other, 1)
    assert other.lost == {0}
    other.close()


def test_layout() -> None:
    def member(host: int) -> Member:
        return Member(PeerIdentity(1, 1, f"node{host}", 1), host, f"10.0.0.{host}", "eth0")

    layout = Layout.of([member(host) for host in (0, 0, 2, 0, 2, 5)])
    assert layout.hosts == ((0, 1, 3), (2, 4), (5,))
    assert layout.host_of == (0, 0, 1, 0, 1, 2)
    assert layout.local_rank_of == (0, 1, 0, 2, 1, 0)
    assert layout.num_channels == 3
    assert [layout.channels_of(rank) for rank in range(6)] == [[0], [1], [0, 2], [2], [1], [0, 1, 2]]
    described = layout.describe()
    assert described.startswith("node0 (ranks 0, 1, 3) eth0 10.0.0.0 | node2 (ranks 2, 4) eth0 10.0.0.2 | ")
    assert described.endswith("node5 (rank 5) eth0 10.0.0.5")
