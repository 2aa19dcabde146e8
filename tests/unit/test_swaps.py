"""When the order of two lines is an error, when a warning, and when nothing at all."""

from __future__ import annotations

from lockstep.comm.swaps import Swaps, Verdict

A, B, C = 11, 22, 33
CALL, OTHER_CALL = 1 << 20, 2 << 20


def seen(*lines: int) -> Swaps:
    """A rank that has come from these lines before, as all others have."""
    swaps = Swaps()
    for number, line in enumerate(lines, 1):
        swaps.note_line(line, number)
    return swaps


def test_swap_of_two_lines_that_were_common_is_an_error() -> None:
    swaps = seen(A, B)
    assert swaps.judge(3, CALL, [A, B, A]) is Verdict.ORDINARY
    assert swaps.judge(4, CALL, [B, A, B]) is Verdict.SWAPPED


def test_first_steps_may_be_swapped_on_purpose() -> None:
    swaps = seen()
    swaps.note_line(A, 1)
    swaps.judge(1, CALL, [A, B])
    swaps.note_line(B, 2)
    assert swaps.judge(2, CALL, [B, A]) is Verdict.SUSPICIOUS


def test_turns_in_a_loop_stay_suspicious_at_most() -> None:
    """`for turn in range(3): all_reduce(x) if rank == turn else all_reduce(zeros)`"""
    swaps = seen()
    verdicts = []
    for number in range(1, 10):
        lines = [A if rank == (number - 1) % 3 else B for rank in range(3)]
        swaps.note_line(lines[0], number)
        verdicts.append(swaps.judge(number, CALL, lines))
    assert Verdict.SWAPPED not in verdicts


def test_other_calls_and_gaps_are_no_swap() -> None:
    swaps = seen(A, B, C)
    swaps.judge(4, CALL, [A, B])
    assert swaps.judge(5, OTHER_CALL, [B, A]) is Verdict.ORDINARY
    swaps = seen(A, B, C)
    swaps.judge(4, CALL, [A, B])
    assert swaps.judge(6, CALL, [B, A]) is Verdict.ORDINARY
    swaps = seen(A, B, C)
    swaps.judge(4, CALL, [A, B])
    assert swaps.judge(5, CALL, [C, A]) is Verdict.ORDINARY


def test_branch_of_each_rank_is_ordinary() -> None:
    swaps = seen(A, B)
    assert [swaps.judge(number, CALL, [A, B]) for number in range(3, 9)] == [Verdict.ORDINARY] * 6
