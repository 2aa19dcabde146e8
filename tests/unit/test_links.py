"""Links of several groups over the same connections: what is for whom, who is gone from where, and who is woken."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from lockstep.comm.hosts import connections
from lockstep.comm.hosts.links import Links
from lockstep.errors import NotInitialized
from lockstep.testing import limit_s


@contextlib.contextmanager
def linked() -> Iterator[tuple[Links, Links]]:
    """The links of two ranks in their first group."""
    ours, theirs = socket.socketpair()
    made = Links({1: _Quiet(ours)}), Links({0: _Quiet(theirs)})  # type: ignore[dict-item]
    try:
        yield made
    finally:
        for links in made:
            close_all(links)


@pytest.fixture
def pair():
    with linked() as made:
        yield made


def close_all(links: Links) -> None:
    for inbox, _ in list(links._connections._inboxes.values()):
        assert isinstance(inbox, Links)
        inbox.close()


class _Quiet:
    """One end of a pair of UNIX sockets, which take no options of TCP."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def __getattr__(self, name: str):
        return getattr(self._end, name)

    def getpeername(self) -> tuple[str, int]:
        return "here", 0

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if level == socket.SOL_SOCKET:
            self._end.setsockopt(level, option, value)


def read(links: Links) -> list[tuple[int, bytes]]:
    return [(rank, bytes(message)) for rank, message in links.poll()]


def await_messages(links: Links, count: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    deadline_s = time.monotonic() + limit_s(10)
    while len(found) < count and time.monotonic() < deadline_s:
        found += read(links)
        links.wait(0.01)
    return found


def test_messages_are_for_their_group_by_its_ranks(pair) -> None:
    zero, one = pair
    turned = zero.share("turned", [1, 0]), one.share("turned", [1, 0])
    turned[0].send(0, b"to rank 1 of the first group")
    zero.send(1, b"first")
    turned[0].send(0, b"second")
    assert await_messages(one, 1) == [(0, b"first")]
    assert await_messages(turned[1], 2) == [(1, b"to rank 1 of the first group"), (1, b"second")]


def test_messages_wait_for_a_group_that_is_not_made_yet(pair) -> None:
    zero, one = pair
    early = zero.share("group", [0, 1])
    early.send(1, b"one")
    early.send(1, b"two")
    early.close()
    assert read(one) == []
    late = one.share("group", [0, 1])
    assert read(late) == [(0, b"one"), (0, b"two")]
    assert late.lost == {0}
    assert one.lost == set()


def test_groups_of_one_name_are_told_apart(pair) -> None:
    zero, one = pair
    first = zero.share("group", [0, 1]), one.share("group", [0, 1])
    second = zero.share("group", [0, 1]), one.share("group", [0, 1])
    first[0].send(1, b"of the first")
    second[0].send(1, b"of the second")
    assert await_messages(second[1], 1) == [(0, b"of the second")]
    assert await_messages(first[1], 1) == [(0, b"of the first")]


def test_a_rank_is_gone_once_all_that_it_said_was_read(pair) -> None:
    """Who saw the end before the last words took a rank that had left for one that died."""
    zero, one = pair
    group = zero.share("group", [0, 1]), one.share("group", [0, 1])
    group[0].send(1, b"I leave")
    group[0].close()
    read(one)  # the first group reads for all
    assert group[1].lost == set()
    (first, *_) = group[1].poll()
    assert bytes(first[1]) == b"I leave"
    assert read(group[1]) == []
    assert group[1].lost == {0}
    assert one.lost == set()
    zero.send(1, b"still here")
    assert await_messages(one, 1) == [(0, b"still here")]


def test_what_comes_for_a_group_that_was_closed_is_not_kept(pair) -> None:
    zero, one = pair
    group = zero.share("group", [0, 1]), one.share("group", [0, 1])
    group[1].close()
    group[1].close()
    group[1].send(0, b"after the end")
    group[0].send(1, b"too late")
    zero.send(1, b"for the first group")
    assert await_messages(one, 1) == [(0, b"for the first group")]
    assert not one._connections._early
    assert read(group[0]) == []
    assert group[0].lost == {1}
    assert read(group[1]) == []


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_the_last_group_closes_the_connections(pair, first_to_close: int) -> None:
    zero, one = pair
    mine = [zero, zero.share("group", [0, 1])]
    theirs = one.share("group", [0, 1])
    mine.pop(first_to_close).close()
    (last,) = mine
    last.send(1, b"last words")
    last.close()
    other = [theirs, one][first_to_close]
    assert await_messages(other, 1) == [(0, b"last words")]
    for links in (one, theirs):
        await_lost(links)


def await_lost(links: Links) -> None:
    deadline_s = time.monotonic() + limit_s(10)
    while not links.lost and time.monotonic() < deadline_s:
        assert read(links) == []
        links.wait(0.01)
    assert links.lost == {0}


def test_the_end_of_a_process_is_seen_by_all_its_groups() -> None:
    ours, theirs = socket.socketpair()
    one = Links({0: _Quiet(theirs)})  # type: ignore[dict-item]
    group = one.share("group", [0, 1])
    ours.close()
    await_lost(group)
    await_lost(one)
    await_lost(one.share("made later", [0, 1]))
    started_s = time.monotonic()
    group.wait(0.05)
    assert time.monotonic() - started_s > 0.04, "a closed connection does not keep anybody awake"
    close_all(one)


def test_bytes_that_no_rank_sends_end_the_connection() -> None:
    ours, theirs = socket.socketpair()
    one = Links({0: _Quiet(theirs)})  # type: ignore[dict-item]
    ours.sendall(b"\x7f" * 100)
    await_lost(one)
    one.close()
    ours.close()


def test_who_reads_for_another_group_wakes_it(pair) -> None:
    zero, one = pair
    group = zero.share("group", [0, 1]), one.share("group", [0, 1])
    got: list[tuple[int, bytes]] = []

    def sleep() -> None:
        while not got:
            group[1].wait(limit_s(10))
            got.extend(read(group[1]))

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    group[0].send(1, b"wake up")
    while not got and sleeper.is_alive():
        read(one)
    sleeper.join()
    assert got == [(0, b"wake up")]
    # What another group has read before anybody slept is not slept on.
    group[0].send(1, b"again")
    while not group[1].messages:
        read(one)
    started_s = time.monotonic()
    group[1].wait(limit_s(10))
    assert time.monotonic() - started_s < limit_s(5)
    assert read(group[1]) == [(0, b"again")]


def test_groups_of_several_threads_keep_their_order(pair) -> None:
    """Messages longer than the buffers, from both sides, while all groups read for each other."""
    count, names = 400, ["a", "b", "c"]
    ends = {name: (pair[0].share(name, [0, 1]), pair[1].share(name, [0, 1])) for name in names}
    expected = {name: [name.encode() * (number * 97 % 20_000) for number in range(count)] for name in names}
    got: dict[tuple[str, int], list[tuple[int, bytes]]] = {}

    def talk(name: str, rank: int) -> None:
        links, heard = ends[name][rank], []
        for message in expected[name]:
            links.send(1 - rank, message)
            heard += read(links)
        got[name, rank] = heard
        deadline_s = time.monotonic() + limit_s(30)
        while sum(map(len, got.values())) < 2 * len(names) * count and time.monotonic() < deadline_s:
            links.wait(0.01)
            heard += read(links)

    threads = [threading.Thread(target=talk, args=(name, rank)) for name in names for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(threads)
    for (name, rank), heard in got.items():
        assert heard == [(1 - rank, message) for message in expected[name]]


def test_what_was_sent_comes_though_its_sender_never_reads(pair) -> None:
    """More than the sockets hold, to a rank that begins to read when the sender does nothing any more."""
    zero, one = pair
    sent = [bytes([number % 256]) * 8000 for number in range(2000)]
    for message in sent:
        zero.send(1, message)
    assert zero._connections._full
    assert await_messages(one, len(sent)) == [(0, message) for message in sent]


def test_the_end_waits_for_a_peer_that_has_not_read_yet(pair) -> None:
    zero, one = pair
    sent = [bytes([number % 256]) * 8000 for number in range(500)]
    for message in sent:
        zero.send(1, message)
    closing = threading.Thread(target=zero.close, args=(limit_s(60),))
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    assert await_messages(one, len(sent)) == [(0, message) for message in sent]
    closing.join(limit_s(20))
    assert not closing.is_alive()
    await_lost(one)


def test_the_end_gives_up_a_peer_that_does_not_read(pair) -> None:
    zero, _ = pair
    for _ in range(500):
        zero.send(1, bytes(8000))
    zero.close(0.01)
    assert not zero._connections._inboxes


def test_no_group_is_made_of_one_that_was_closed(pair) -> None:
    zero, _ = pair
    zero.close()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(NotInitialized, match="shut down"):
        zero.share("late", [0, 1])
    assert os.listdir("/proc/self/fd") == before


def test_a_rank_without_descriptors_tells_the_others(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(24, "Too many open files")

    zero, one = pair
    group = one.share("group", [0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd", refuse)
        with pytest.raises(OSError, match="Too many"):
            zero.share("group", [0, 1])
    await_lost(group)
    assert one.lost == set()
    # The next one of that name is the same on both.
    again = one.share("group", [0, 1]), zero.share("group", [0, 1])
    again[1].send(1, b"hello")
    assert await_messages(again[0], 1) == [(0, b"hello")]


def test_threads_that_sleep_end_their_sleep_at_the_end(pair) -> None:
    """Each sleeps on descriptors that may not be another file's before it has woken."""
    zero, _ = pair
    group = zero.share("group", [0, 1])
    threads = [threading.Thread(target=group.wait, args=(limit_s(60),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(group._sleepers) < 3:
        pass
    group.close()
    for thread in threads:
        thread.join(limit_s(20))
        assert not thread.is_alive()
    assert group._poll.closed


class Alarm(Exception):
    """What the handler of a signal raises."""


def interrupted(at: int, call: Callable[[], object]) -> bool:
    """Make a call, and raise before its instruction of that number in connections.py; whether there was one."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        nonlocal count
        if frame.f_code.co_filename != connections.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
            if count == at:
                raise Alarm
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 heeds the other frames' only if one had it before settrace
    sys.settrace(trace)
    try:
        call()
    except Alarm:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_handler_that_raises_while_this_rank_reads_loses_and_repeats_nothing() -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        with linked() as (zero, one):
            group = zero.share("group", [0, 1]), one.share("group", [0, 1])
            for number in range(2):
                zero.send(1, b"first %d" % number)
                group[0].send(1, b"second %d" % number)
            group[0].close()
            goes_on = interrupted(at, lambda: one._connections.receive(one))
            assert read(one) == [(0, b"first 0"), (0, b"first 1")], at
            assert read(group[1]) == [(0, b"second 0"), (0, b"second 1")], at
            assert group[1].lost == {0}, at
    assert at > 100


def test_a_handler_that_raises_while_this_rank_sends_harms_no_other_message() -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        with linked() as (zero, one):
            zero.send(1, b"before")
            goes_on = interrupted(at, lambda: zero.send(1, b"now"))
            zero.send(1, b"then")
            heard = [message for _, message in read(one)]
            assert heard in ([b"before", b"now", b"then"], [b"before", b"then"]), at
    assert at > 30


_SILENT = """
import socket, subprocess, sys, time
from lockstep.comm.hosts import connections
from lockstep.comm.hosts.links import Links
connections._SILENT_MS, connections._LOOK_FOR_SILENT_EVERY_S = 1000, 0.0
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(listener.getsockname())
theirs, _ = listener.accept()
zero, one = Links({1: ours}), Links({0: theirs})
for _ in range(20000):
    zero.send(1, bytes(4000))  # one reads nothing, which is no silence
time.sleep(1.5)
zero.lose_silent()
list(zero.poll())
print("busy peer is lost:", zero.lost)
while zero._connections._full:
    list(one.poll())
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
zero.send(1, b"is anybody there?")
since_s = time.monotonic()
while not zero.lost and time.monotonic() < since_s + float(sys.argv[1]):
    zero.lose_silent()
    list(zero.poll())
    time.sleep(0.01)
print("silent peer is lost:", zero.lost)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"),
    reason="needs root, unshare of util-linux and ip of iproute2",
)
def test_a_host_that_answers_nothing_is_gone() -> None:
    """Keepalive does not probe while bytes are on their way."""
    command = ["unshare", "--net", sys.executable, "-c", _SILENT, str(limit_s(30))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s(90), check=False)
    assert done.stdout == "busy peer is lost: set()\nsilent peer is lost: {1}\n", done.stderr
