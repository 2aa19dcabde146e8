"""The control blocks: what a rank writes is what its peers read, cut to its field, never torn from its owner."""

from __future__ import annotations

import pytest

from lockstep.rank_status import RING, TEXT_BYTES
from lockstep.shm.control_blocks import BLOCK_BYTES, Failure, Record, SharedControlBlocks
from lockstep.shm.liveness import PeerIdentity
from lockstep.shm.segment import PAGE_BYTES, Segment
from lockstep.shm.sync import PeerState

ME = PeerIdentity(4711, 123_456_789, "node-7.cluster", 4_026_531_836)


@pytest.fixture
def blocks_of() -> list[SharedControlBlocks]:
    """Three ranks' views of one segment, each through a mapping of its own."""
    segment = Segment.create(SharedControlBlocks.size_bytes(3))
    views = [Segment.attach(segment.handle) for _ in range(3)]
    for one in (segment, *views):
        one.release()
    return [SharedControlBlocks(view, rank, 3) for rank, view in enumerate(views)]


def enter(blocks: SharedControlBlocks, number: int, call: int, site: int) -> None:
    """Write a record as the flight record does."""
    word = blocks.record_words[blocks.rank] + (number & 1) * 8
    for offset, value in enumerate((number, call, site), 1):
        blocks.words[word + offset] = value
    blocks.words[blocks.fingerprint_words[blocks.rank][number & 1]] = number * 1000


def test_size_is_whole_pages() -> None:
    assert SharedControlBlocks.size_bytes(1) % PAGE_BYTES == 0
    assert SharedControlBlocks.size_bytes(5) - SharedControlBlocks.size_bytes(4) == BLOCK_BYTES


def test_ranks_introduce_themselves(blocks_of: list[SharedControlBlocks]) -> None:
    assert [blocks_of[0].state(rank) for rank in range(3)] == [PeerState.ABSENT] * 3
    blocks_of[1].introduce(ME)
    assert [blocks_of[2].state(rank) for rank in range(3)] == [PeerState.ABSENT, PeerState.READY, PeerState.ABSENT]
    assert blocks_of[0].identity(1) == ME


def test_blocks_do_not_overlap(blocks_of: list[SharedControlBlocks]) -> None:
    """Fill every field of rank 1 to the brim: its neighbours' blocks stay zero, its own fields stay apart."""
    blocks = blocks_of[1]
    blocks.introduce(PeerIdentity(1, 2, "h" * 1000, 3))
    blocks.announce("a" * 10_000)
    blocks.publish_wait("b" * 10_000)
    blocks.confirm_wait(77)
    calls = [blocks.add_call(f"{number:02d}" + "c" * 1000) for number in range(RING - 1)]
    sites = [blocks.add_site(f"{number:02d}" + "s" * 1000) for number in range(RING - 1)]
    blocks.fail(Failure("K", (0, 2), "f" * 10_000))
    start = 4096 + BLOCK_BYTES
    memory = blocks_of[0]._bytes
    assert not any(memory[64:start])
    assert not any(memory[start + BLOCK_BYTES :])
    assert blocks_of[0].identity(1) == PeerIdentity(1, 2, "h" * 254, 3)
    assert blocks_of[0].announcement(1) == "a" * 1022
    assert blocks_of[0].wait_of(1) == (1, 77, "b" * 510)
    assert blocks_of[0].failure(1) == Failure("K", (0, 2), "f" * (2046 - len("K|0,2|")))
    for number, (call, site) in enumerate(zip(calls, sites, strict=True)):
        enter(blocks, number + 1, call, site)
        record = blocks_of[0].record(1, number + 1)
        assert record.call == f"{number:02d}" + "c" * (TEXT_BYTES - 4)
        assert record.site == f"{number:02d}" + "s" * (TEXT_BYTES - 4)


def test_text_cut_inside_a_character_stays_readable(blocks_of: list[SharedControlBlocks]) -> None:
    blocks_of[0].announce("é" * 2000)
    assert blocks_of[1].announcement(0) == "é" * 511
    blocks_of[0].announce("x" + "é" * 2000)
    assert blocks_of[1].announcement(0) == "x" + "é" * 510
    blocks_of[0].announce("\udcff")  # what Python makes of a file name that is no UTF-8
    assert blocks_of[1].announcement(0) == "?"


def test_shorter_text_replaces_a_longer_one(blocks_of: list[SharedControlBlocks]) -> None:
    blocks_of[0].announce("a long announcement")
    blocks_of[0].announce("short")
    assert blocks_of[1].announcement(0) == "short"
    blocks_of[0].announce("")
    assert blocks_of[1].announcement(0) == ""


def test_rings_wrap(blocks_of: list[SharedControlBlocks]) -> None:
    for number in range(1, 3 * RING):
        enter(blocks_of[0], number, blocks_of[0].add_call(f"call {number}"), blocks_of[0].add_site(f"site {number}"))
        assert blocks_of[1].record(0, number) == Record(number * 1000, number, f"call {number}", f"site {number}")
        assert blocks_of[1].latest_record(0) == blocks_of[1].record(0, number)


def test_text_that_a_record_names_is_not_overwritten(blocks_of: list[SharedControlBlocks]) -> None:
    """A call made once, and again after the ring is nearly full of others."""
    old_call, old_site = blocks_of[0].add_call("old call"), blocks_of[0].add_site("old site")
    enter(blocks_of[0], 1, old_call, old_site)
    for number in range(2, 5 * RING):
        enter(blocks_of[0], 2 * number, old_call, old_site)
        enter(blocks_of[0], 2 * number + 1, blocks_of[0].add_call(f"new {number}"), blocks_of[0].add_site("new site"))
        assert blocks_of[1].record(0, 2 * number).call == "old call"
        assert blocks_of[1].record(0, 2 * number).site == "old site"
        assert blocks_of[1].record(0, 2 * number + 1).call == f"new {number}"


def test_two_collectives_have_a_record_each(blocks_of: list[SharedControlBlocks]) -> None:
    assert blocks_of[1].latest_record(0) is None
    enter(blocks_of[0], 7, blocks_of[0].add_call("seventh"), blocks_of[0].add_site("here"))
    enter(blocks_of[0], 8, blocks_of[0].add_call("eighth"), blocks_of[0].add_site("there"))
    assert blocks_of[1].record(0, 7) == Record(7000, 7, "seventh", "here")
    assert blocks_of[1].record(0, 8) == Record(8000, 8, "eighth", "there")
    assert blocks_of[1].latest_record(0) == blocks_of[1].record(0, 8)


def test_first_failure_stays(blocks_of: list[SharedControlBlocks]) -> None:
    blocks_of[0].introduce(ME)
    blocks_of[0].fail(Failure("RankLost", (2,), "rank 2 died | so it was"))
    blocks_of[0].fail(Failure("", (0,), "a consequence"))
    blocks_of[0].leave()
    assert blocks_of[1].state(0) == PeerState.FAILED
    assert blocks_of[1].failure(0) == Failure("RankLost", (2,), "rank 2 died | so it was")


def test_leaving_in_good_order(blocks_of: list[SharedControlBlocks]) -> None:
    blocks_of[0].introduce(ME)
    blocks_of[0].leave()
    assert blocks_of[1].state(0) == PeerState.LEFT
    blocks_of[2].leave()
    assert blocks_of[1].state(2) == PeerState.ABSENT, "who never came cannot leave"


def test_failure_without_culprits(blocks_of: list[SharedControlBlocks]) -> None:
    blocks_of[0].fail(Failure("", (), "raised ValueError"))
    assert blocks_of[1].failure(0) == Failure("", (), "raised ValueError")


def test_each_wait_has_a_number_of_its_own(blocks_of: list[SharedControlBlocks]) -> None:
    assert blocks_of[1].wait_of(0) is None
    for number in (1, 2):
        blocks_of[0].publish_wait("1|the default group|barrier()")
        blocks_of[0].confirm_wait(number)
        assert blocks_of[1].wait_of(0) == (number, number, "1|the default group|barrier()")
    blocks_of[0].withdraw_wait()
    assert blocks_of[1].wait_of(0) is None
