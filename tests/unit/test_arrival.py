"""How notices reach all ranks, without ranks: who hands what on to whom, and what a rank does that waits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from lockstep.comm.messages import arrival
from lockstep.comm.messages.arrival import Arrival, Entries, forwardings_of
from lockstep.comm.messages.notices import (
    MessageControlBlocks,
    NoticeKind,
    forwarded_notices,
    join_notices,
    notice_kind,
)
from lockstep.shm.control_blocks import Failure
from lockstep.shm.liveness import own_identity


def hosts_of(*sizes: int) -> list[list[int]]:
    """Hosts with so many ranks each, ranks in order."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def expected_hops(hosts: Sequence[Sequence[int]]) -> int:
    """Messages that follow each other until all ranks have all notices."""
    parents = arrival._parents(hosts)
    if len(parents) < arrival._FEW_RANKS:
        return min(len(parents), 1)
    depths = dict.fromkeys([hosts[0][0]], 0)

    def depth(rank: int) -> int:
        if rank not in depths:
            depths[rank] = depth(parents[rank]) + 1
        return depths[rank]

    return 2 * max(map(depth, parents))


SHAPES = [
    hosts_of(*sizes) for sizes in [(4,), (2, 2), (1,) * 8, (3, 1, 2), (2,) * 8, (1,) * 30, (12, 1, 20), (1,) * 90]
]
SHAPES.append([[0, 3], [1, 4, 5], [2]])


@pytest.mark.parametrize("hosts", SHAPES, ids=lambda hosts: "+".join(str(len(ranks)) for ranks in hosts))
def test_along_the_tree_everybody_gets_every_notice(hosts: list[list[int]]) -> None:
    everybody = sorted(rank for ranks in hosts for rank in ranks)
    left = {rank: list(forwardings_of(rank, hosts)) for rank in everybody}
    has = {rank: {rank} for rank in everybody}
    num_sent = num_hops = 0
    while any(left.values()):
        ready = [
            (rank, left[rank].pop(0)) for rank in everybody if left[rank] and set(left[rank][0].awaited) <= has[rank]
        ]
        assert ready, "nobody waits for what does not come"
        num_hops += 1
        for rank, one in ready:
            assert set(one.given) <= has[rank], "nobody hands on what has not come"
            num_sent += len(one.peers)
        for _, one in ready:
            for peer in one.peers:
                has[peer] |= set(one.given)
    assert all(has[rank] == set(everybody) for rank in everybody)
    assert num_sent == 2 * (len(everybody) - 1)
    assert num_hops == expected_hops(hosts)
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    sent = [(rank, peer) for rank in everybody for one in forwardings_of(rank, hosts) for peer in one.peers]
    assert sum(host_of[rank] != host_of[peer] for rank, peer in sent) == 2 * (len(hosts) - 1), "few between hosts"
    assert max(len(one.peers) for rank in everybody for one in forwardings_of(rank, hosts)) <= 2 * arrival._FAN_OUT


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_few_ranks_tell_each_other(world_size: int) -> None:
    rank = Rank(hosts_of(*[1] * world_size))
    assert rank.sent == [(peer, "alone") for peer in range(1, world_size)]
    rank.comes(*range(1, world_size))
    assert rank.arrival.go_on() == []
    assert len(rank.sent) == world_size - 1


class Rank:
    """A rank, with what it sends.

    Attributes:
        sent: (peer, ranks whose notices it got), in order; "alone" instead for this rank's own notice as such.
        arrival: at collective 7.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], rank: int = 0) -> None:
        self.sent: list[tuple[int, object]] = []
        world_size = sum(map(len, hosts))
        self.entries = Entries(world_size)
        self.comes(rank)
        others = [peer for peer in range(world_size) if peer != rank]
        self.arrival = Arrival(rank, 7, self.entries, others, forwardings_of(rank, hosts), self._send, 8 << 10)

    def comes(self, *ranks: int, number: int = 7, text: bool = True) -> None:
        """The notices of ranks have come, with or without a text."""
        for rank in ranks:
            self.entries.add(rank, number, bytes([rank]) * 40 + (bytes(8) if text else bytes([255] * 8)), b"")

    def _send(self, peer: int, message: bytes | memoryview) -> None:
        kind = notice_kind(memoryview(message))
        ranks: object = "alone"
        if kind is NoticeKind.FORWARDED:
            ranks = tuple(rank for rank, _ in forwarded_notices(memoryview(message)))
        elif kind is NoticeKind.JOINED:
            ranks = "joined"
        self.sent.append((peer, ranks))


def test_a_rank_waits_for_those_below_it() -> None:
    rank = Rank([[0, 1], [2, 3, 4], [5]], 2)
    assert rank.sent == []
    rank.comes(3, 0)
    assert rank.arrival.go_on() == [1, 4, 5]
    assert rank.sent == []
    rank.comes(4)
    assert rank.arrival.go_on() == [1, 5]
    assert rank.sent == [(0, (2, 3, 4))]
    rank.comes(1, 5)
    assert rank.arrival.go_on() == []
    assert rank.arrival.go_on() == []
    assert rank.sent[1:] == [(3, (0, 1, 2, 3, 4, 5)), (4, (0, 1, 2, 3, 4, 5))], "once"


def test_notices_without_texts_go_down_joined() -> None:
    rank = Rank([[0], [1], [2], [3]])
    rank.comes(*range(4), text=False)
    assert rank.arrival.go_on() == []
    assert rank.sent == [(peer, "joined") for peer in (1, 2, 3)]


def test_what_has_come_joined_goes_on_as_it_is() -> None:
    rank = Rank([[0, 1], [2, 3]], 2)
    rank.comes(3)
    assert rank.arrival.go_on() == [0, 1]
    message = NoticeKind.JOINED.to_bytes(8, "little") + b"as it came"
    rank.entries.add_joined(7, message, [b"a", b"b", b"c", b"d"])
    assert rank.arrival.go_on() == []
    assert rank.sent == [(0, (2, 3)), (3, "joined")]
    assert [bytes(rank.entries.attachment(peer, 7)) for peer in range(4)] == [b"a", b"b", b"", b""]


def test_joined_notices_change_only_records_that_are_older() -> None:
    identities = [own_identity() for _ in range(3)]
    made = [MessageControlBlocks(rank, identities, on_failure=_nothing) for rank in range(3)]
    notices = []
    for rank, blocks in enumerate(made):
        for number in (6, 7):
            word = blocks.record_words[rank] + 8 * (number & 1)
            blocks.words[word : word + 4] = memoryview(_words(100 + rank, number, 1, 2))
            notice = blocks.enter_notice()
        notices.append(notice + bytes([rank]) * rank)
    message = join_notices(7, notices, 1 << 10)
    assert message is not None
    assert join_notices(7, notices, len(message) - 1) is None, "too long"
    ahead = made[0]
    word = ahead.record_words[2] + 8
    ahead.words[word : word + 4] = memoryview(_words(555, 9, 3, 4))
    number, attachments = ahead.receive_joined(memoryview(message))
    assert (number, list(map(bytes, attachments))) == (7, [b"", b"\x01", b"\x02\x02"])
    assert [ahead.record(rank, 7).fingerprint for rank in range(3)] == [100, 101, 555]
    for broken in (message[:-1], message[:20], message + b"x"):
        with pytest.raises(ValueError, match="notices of 3 ranks"):
            ahead.receive_joined(memoryview(broken))


def _words(*values: int) -> array[int]:
    return array("q", values)


def _nothing(_: Failure) -> None:
    """Do nothing."""


def test_who_is_one_ahead_has_not_come_for_that() -> None:
    rank = Rank(hosts_of(1, 1, 1, 1))
    rank.comes(*range(1, 4), number=8)
    assert rank.arrival.go_on() == [1, 2, 3]
    assert rank.sent == []
    rank.comes(*range(1, 4))
    assert rank.arrival.go_on() == []


def test_who_waits_long_tells_all_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(hosts_of(2, 2), 1)
    rank.arrival.go_on()
    assert rank.sent == [(0, "alone")]
    now = arrival.time.monotonic() + 2 * arrival._PATIENCE_S
    monkeypatch.setattr(arrival.time, "monotonic", lambda: now)
    rank.arrival.go_on()
    rank.arrival.go_on()
    assert rank.sent[1:] == [(peer, "alone") for peer in (0, 2, 3)]
