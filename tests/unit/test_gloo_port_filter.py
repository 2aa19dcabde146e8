"""Who may connect to the port at which Gloo listens."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
import torch

from lockstep.comm.hosts.gloo_port_filter import GlooPortFilter, _from_only
from lockstep.comm.hosts.link_store import LinkStore
from lockstep.comm.hosts.links import Links
from lockstep.errors import RankLost
from lockstep.testing import limit_s
from lockstep.torch_private.groups import gloo_group

# Packets are dropped, so no answer comes: this only has to be longer than a connection takes.
SOON_S = 0.3


def listening_ports(address: str) -> set[int]:
    """The ports at which this process listens at an address."""
    sockets = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.ip == address}


@contextlib.contextmanager
def door(address: str, admitted: list[str] | None) -> Iterator[tuple[GlooPortFilter, int]]:
    before = listening_ports(address)
    made = GlooPortFilter(address, admitted)
    (port,) = listening_ports(address) - before
    yield made, port


def can_connect(port: int, address: str, source: str) -> bool:
    try:
        socket.create_connection((address, port), SOON_S, (source, 0)).close()
    except TimeoutError:
        return False
    return True


def test_only_the_hosts_of_the_group_may_connect() -> None:
    """Whoever reached the port could keep Gloo's process from opening anything, which ended it (SIGABRT)."""
    with door("127.0.0.3", ["127.0.0.1", "10.1.2.3", "127.0.0.7"]) as (made, port):
        assert can_connect(port, "127.0.0.3", "127.0.0.1")
        assert can_connect(port, "127.0.0.3", "127.0.0.7")
        assert not can_connect(port, "127.0.0.3", "127.0.0.8")
        made.close()
        assert not can_connect(port, "127.0.0.3", "127.0.0.1")


def test_where_addresses_are_translated_anybody_may_until_all_have_come() -> None:
    with door("127.0.0.4", None) as (made, port):
        assert can_connect(port, "127.0.0.4", "127.0.0.8")
        made.close()
        assert not can_connect(port, "127.0.0.4", "127.0.0.8")


def test_filter_of_long_addresses() -> None:
    """By the kernel's rules: two steps for each word, and one that passes the packet."""
    words = [0x20010DB8, 0, 0, 1]
    program = _from_only(["2001:db8::1", "127.0.0.1"], is_v6=True)
    assert [step[3] for step in program if step[0] == 0x15] == words
    for place, step in enumerate(program):
        if step[0] == 0x15:
            assert program[place + 1 + step[2]] == (0x06, 0, 0, 0), "another word leads past the address"
    assert program[-2] == (0x06, 0, 0, 0xFFFFFFFF)


def test_kernel_takes_the_filter_of_long_addresses() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    for admitted, expected in ((["::1"], True), (["2001:db8::1"], False)):
        with door("::1", admitted) as (made, port):
            assert can_connect(port, "::1", "::1") is expected
            made.close()


# ---- the store over the connections ---------------------------------------------------------------------------------


def stores(count: int) -> tuple[list[LinkStore], list[Links]]:
    """Of as many ranks, in one process, with addresses as hosts have them."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for one in range(count):
            for other in range(one):
                ends[one][other] = socket.create_connection(server.getsockname())
                ends[other][one] = server.accept()[0]
    links = [Links(each) for each in ends]
    numbers = [10 + rank for rank in range(count)]
    made = [LinkStore(links[rank], rank, numbers, limit_s(20), lambda: None) for rank in range(count)]
    return made, links


def on_all(stores: list[LinkStore], act) -> list[object]:  # type: ignore[no-untyped-def]
    """What each rank's action gives, all at the same time."""
    outcomes: list[object] = [None] * len(stores)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = act(rank, stores[rank])
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_gloo_meets_without_the_store_of_the_ranks() -> None:
    """Gloo's addresses stood where everybody could write others in their place."""
    made, links = stores(3)

    def meet(rank: int, store: LinkStore) -> float:
        opened = GlooPortFilter("127.0.0.1", ["127.0.0.1"])
        group = gloo_group(store, rank, 3, opened.device, timedelta(seconds=limit_s(20)))
        opened.close()
        store.close()
        value = torch.ones(1)
        group.allreduce([value]).wait()
        return value.item()

    assert on_all(made, meet) == [3.0, 3.0, 3.0]
    for one in links:
        one.close()


def test_long_values_arrive_whole() -> None:
    made, links = stores(2)
    value = bytes(range(256)) * 500
    shared = on_all(made, lambda rank, store: store.share("topic", value[rank:]))
    assert shared == [{1: value[1:]}, {0: value}]
    for one in links:
        one.close()


def test_messages_of_the_group_are_handed_back_in_order() -> None:
    """A rank that is through sends what the group is for, while others still wait for the last to come."""
    made, (zero, one) = stores(2)
    one.send(0, b"before")
    one.send(0, b"later")
    on_all(made, lambda rank, store: store.share("topic", b""))
    made[0].close()
    zero.wait(limit_s(5))  # returns at once
    assert [(peer, bytes(message)) for peer, message in zero.poll()] == [(1, b"before"), (1, b"later")]
    assert list(zero.poll()) == []
    zero.close()
    one.close()


def test_rank_that_is_gone_is_named() -> None:
    made, (zero, one) = stores(2)
    one.close()
    with pytest.raises(RankLost, match="rank 11 connected and then ended while the group was being made"):
        made[0].share("topic", b"")
    with pytest.raises(RankLost, match="rank 11"):
        made[0].get("0/1")
    zero.close()
