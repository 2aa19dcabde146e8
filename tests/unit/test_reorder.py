"""When the order of two lines is an error, when a warning, and when nothing at all."""

from __future__ import annotations

from lockstep.comm.reorder import Order, ReorderDetector

A, B, C = 11, 22, 33
CALL, OTHER_CALL = 1 << 20, 2 << 20


def seen(*lines: int) -> ReorderDetector:
    """A rank that has come from these lines before, as all others have."""
    detector = ReorderDetector()
    for number, line in enumerate(lines, 1):
        detector.note_line(line, number)
    return detector


def test_swap_of_two_lines_that_were_common_is_an_error() -> None:
    detector = seen(A, B)
    assert detector.judge(3, CALL, [A, B, A]) is Order.ORDINARY
    assert detector.judge(4, CALL, [B, A, B]) is Order.REORDERED


def test_first_steps_may_be_swapped_on_purpose() -> None:
    detector = seen()
    detector.note_line(A, 1)
    detector.judge(1, CALL, [A, B])
    detector.note_line(B, 2)
    assert detector.judge(2, CALL, [B, A]) is Order.SUSPICIOUS


def test_turns_in_a_loop_stay_suspicious_at_most() -> None:
    """`for turn in range(3): all_reduce(x) if rank == turn else all_reduce(zeros)`"""
    detector = seen()
    found = []
    for number in range(1, 10):
        lines = [A if rank == (number - 1) % 3 else B for rank in range(3)]
        detector.note_line(lines[0], number)
        found.append(detector.judge(number, CALL, lines))
    assert Order.REORDERED not in found


def test_other_calls_and_gaps_are_no_swap() -> None:
    detector = seen(A, B, C)
    detector.judge(4, CALL, [A, B])
    assert detector.judge(5, OTHER_CALL, [B, A]) is Order.ORDINARY
    detector = seen(A, B, C)
    detector.judge(4, CALL, [A, B])
    assert detector.judge(6, CALL, [B, A]) is Order.ORDINARY
    detector = seen(A, B, C)
    detector.judge(4, CALL, [A, B])
    assert detector.judge(5, CALL, [C, A]) is Order.ORDINARY


def test_branch_of_each_rank_is_ordinary() -> None:
    detector = seen(A, B)
    assert [detector.judge(number, CALL, [A, B]) for number in range(3, 9)] == [Order.ORDINARY] * 6
