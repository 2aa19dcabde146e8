"""The control blocks: what a rank writes is what its peers read, cut to its field, never torn from its owner."""

from __future__ import annotations

import pytest

from lockstep.shm.board import BLOCK_BYTES, RING, TEXT_BYTES, Board, Failure, Record
from lockstep.shm.liveness import PeerIdentity
from lockstep.shm.segment import PAGE_BYTES, Segment
from lockstep.shm.sync import PeerState

ME = PeerIdentity(4711, 123_456_789, "node-7.cluster", 4_026_531_836)


@pytest.fixture
def boards() -> list[Board]:
    """Three ranks' views of one segment, each through a mapping of its own."""
    segment = Segment.create(Board.size_bytes(3))
    views = [Segment.attach(segment.handle) for _ in range(3)]
    for one in (segment, *views):
        one.release()
    return [Board(view, rank, 3) for rank, view in enumerate(views)]


def enter(board: Board, number: int, call: int, site: int) -> None:
    """Write a record as the flight record does."""
    word = board.record_words[board.rank] + (number & 1) * 8
    for offset, value in enumerate((number, call, site), 1):
        board.words[word + offset] = value
    board.words[board.stamp_words[board.rank][number & 1]] = number * 1000


def test_size_is_whole_pages() -> None:
    assert Board.size_bytes(1) % PAGE_BYTES == 0
    assert Board.size_bytes(5) - Board.size_bytes(4) == BLOCK_BYTES


def test_ranks_introduce_themselves(boards: list[Board]) -> None:
    assert [boards[0].state(rank) for rank in range(3)] == [PeerState.ABSENT] * 3
    boards[1].introduce(ME)
    assert [boards[2].state(rank) for rank in range(3)] == [PeerState.ABSENT, PeerState.READY, PeerState.ABSENT]
    assert boards[0].identity(1) == ME


def test_blocks_do_not_overlap(boards: list[Board]) -> None:
    """Fill every field of rank 1 to the brim: its neighbours' blocks stay zero, its own fields stay apart."""
    board = boards[1]
    board.introduce(PeerIdentity(1, 2, "h" * 1000, 3))
    board.announce("a" * 10_000)
    board.say_blocked("b" * 10_000)
    board.beat(77)
    calls = [board.add_call(f"{number:02d}" + "c" * 1000) for number in range(RING - 1)]
    sites = [board.add_site(f"{number:02d}" + "s" * 1000) for number in range(RING - 1)]
    board.fail(Failure("K", (0, 2), "f" * 10_000))
    start = 4096 + BLOCK_BYTES
    memory = boards[0]._bytes
    assert not any(memory[64:start])
    assert not any(memory[start + BLOCK_BYTES :])
    assert boards[0].identity(1) == PeerIdentity(1, 2, "h" * 254, 3)
    assert boards[0].announcement(1) == "a" * 1022
    assert boards[0].blocked(1) == (1, 77, "b" * 510)
    assert boards[0].failure(1) == Failure("K", (0, 2), "f" * (2046 - len("K|0,2|")))
    for number, (call, site) in enumerate(zip(calls, sites, strict=True)):
        enter(board, number + 1, call, site)
        record = boards[0].record(1, number + 1)
        assert record.call == f"{number:02d}" + "c" * (TEXT_BYTES - 4)
        assert record.site == f"{number:02d}" + "s" * (TEXT_BYTES - 4)


def test_text_cut_inside_a_character_stays_readable(boards: list[Board]) -> None:
    boards[0].announce("é" * 2000)
    assert boards[1].announcement(0) == "é" * 511
    boards[0].announce("x" + "é" * 2000)
    assert boards[1].announcement(0) == "x" + "é" * 510
    boards[0].announce("\udcff")  # what Python makes of a file name that is no UTF-8
    assert boards[1].announcement(0) == "?"


def test_shorter_text_replaces_a_longer_one(boards: list[Board]) -> None:
    boards[0].announce("a long announcement")
    boards[0].announce("short")
    assert boards[1].announcement(0) == "short"
    boards[0].announce("")
    assert boards[1].announcement(0) == ""


def test_rings_wrap(boards: list[Board]) -> None:
    for number in range(1, 3 * RING):
        enter(boards[0], number, boards[0].add_call(f"call {number}"), boards[0].add_site(f"site {number}"))
        assert boards[1].record(0, number) == Record(number * 1000, number, f"call {number}", f"site {number}")
        assert boards[1].latest_record(0) == boards[1].record(0, number)


def test_text_that_a_record_names_is_not_overwritten(boards: list[Board]) -> None:
    """A call made once, and again after the ring is nearly full of others."""
    old_call, old_site = boards[0].add_call("old call"), boards[0].add_site("old site")
    enter(boards[0], 1, old_call, old_site)
    for number in range(2, 5 * RING):
        enter(boards[0], 2 * number, old_call, old_site)
        enter(boards[0], 2 * number + 1, boards[0].add_call(f"new {number}"), boards[0].add_site("new site"))
        assert boards[1].record(0, 2 * number).call == "old call"
        assert boards[1].record(0, 2 * number).site == "old site"
        assert boards[1].record(0, 2 * number + 1).call == f"new {number}"


def test_two_collectives_have_a_record_each(boards: list[Board]) -> None:
    assert boards[1].latest_record(0) is None
    enter(boards[0], 7, boards[0].add_call("seventh"), boards[0].add_site("here"))
    enter(boards[0], 8, boards[0].add_call("eighth"), boards[0].add_site("there"))
    assert boards[1].record(0, 7) == Record(7000, 7, "seventh", "here")
    assert boards[1].record(0, 8) == Record(8000, 8, "eighth", "there")
    assert boards[1].latest_record(0) == boards[1].record(0, 8)


def test_first_failure_stays(boards: list[Board]) -> None:
    boards[0].introduce(ME)
    boards[0].fail(Failure("RankLost", (2,), "rank 2 died | so it was"))
    boards[0].fail(Failure("", (0,), "a consequence"))
    boards[0].leave()
    assert boards[1].state(0) == PeerState.FAILED
    assert boards[1].failure(0) == Failure("RankLost", (2,), "rank 2 died | so it was")


def test_leaving_in_good_order(boards: list[Board]) -> None:
    boards[0].introduce(ME)
    boards[0].leave()
    assert boards[1].state(0) == PeerState.LEFT
    boards[2].leave()
    assert boards[1].state(2) == PeerState.ABSENT, "who never came cannot leave"


def test_failure_without_culprits(boards: list[Board]) -> None:
    boards[0].fail(Failure("", (), "raised ValueError"))
    assert boards[1].failure(0) == Failure("", (), "raised ValueError")


def test_each_wait_has_a_number_of_its_own(boards: list[Board]) -> None:
    assert boards[1].blocked(0) is None
    for number in (1, 2):
        boards[0].say_blocked("1|the default group|barrier()")
        boards[0].beat(number)
        assert boards[1].blocked(0) == (number, number, "1|the default group|barrier()")
    boards[0].end_blocked()
    assert boards[1].blocked(0) is None
