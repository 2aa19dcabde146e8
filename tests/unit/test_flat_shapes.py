"""Which shapes may meet in a collective, and when two ranks have changed sides."""

from __future__ import annotations

import pytest

from lockstep.comm import flat_shapes
from lockstep.comm.flat_shapes import FlatShapes, Shapes
from lockstep.comm.flight_recorder import fingerprint


def judge(shapes: FlatShapes, *texts: str) -> Shapes:
    return shapes.judge(tuple(map(fingerprint, texts)), texts)


@pytest.mark.parametrize(
    "texts",
    [
        ("broadcast(float32[2, 3], root=0)", "broadcast(float32[6], root=0)"),
        ("all_reduce(float32[6], SUM)", "all_reduce(float32[2, 3], SUM)", "all_reduce(float32[1, 2, 3], SUM)"),
        ("all_reduce(float32[2, 3], int64[4], SUM)", "all_reduce(float32[6], int64[4], SUM)"),
        ("gather(uint8[2, 0], root=1)", "gather(uint8[0], root=1)"),
    ],
)
def test_flat_tensors_meet_others_of_as_many_elements(texts: tuple[str, ...]) -> None:
    shapes = FlatShapes()
    assert not shapes.knows(tuple(map(fingerprint, texts)))
    assert judge(shapes, *texts) is Shapes.AGREE
    assert shapes.knows(tuple(map(fingerprint, texts)))


@pytest.mark.parametrize(
    "texts",
    [
        ("broadcast(float32[2, 3], root=0)", "broadcast(float32[3, 2], root=0)"),
        ("broadcast(float32[2, 3], root=0)", "broadcast(float32[6], root=0)", "broadcast(float32[3, 2], root=0)"),
        ("broadcast(float32[2, 3], root=0)", "broadcast(float32[5], root=0)"),
        ("broadcast(float32[2, 3], root=0)", "broadcast(float32[6], root=1)"),
        ("broadcast(float32[2, 3], root=0)", "broadcast(float64[6], root=0)"),
        ("all_reduce(float32[2, 3], SUM)", "all_reduce(float32[6], MAX)"),
        ("all_reduce(float32[2, 3], SUM)", "reduce(float32[6], SUM)"),
        ("all_reduce(sparse float32[2, 3], 1 sparse dimension(s), SUM)",) * 2,
        ("an engine's averaging(2 buckets: float32[2, 3])", "an engine's averaging(2 buckets: float32[6])"),
    ],
)
def test_all_else_stays_a_mismatch(texts: tuple[str, ...]) -> None:
    shapes = FlatShapes()
    assert judge(shapes, *texts) is Shapes.DIFFERENT
    assert not shapes.knows(tuple(map(fingerprint, texts)))


def test_two_tensors_in_another_order_change_sides() -> None:
    matrix, flat = "all_reduce(float32[2, 3], SUM)", "all_reduce(float32[6], SUM)"
    shapes = FlatShapes()
    assert judge(shapes, matrix, flat, matrix) is Shapes.AGREE
    assert judge(shapes, matrix, flat, flat) is Shapes.AGREE  # Nobody has changed to the matrix.
    assert judge(shapes, flat, matrix, flat) is Shapes.SWAPPED
    assert judge(shapes, matrix, flat, matrix) is Shapes.AGREE
    other = [text.replace("float32", "float64") for text in (flat, matrix, flat)]
    assert judge(shapes, *other) is Shapes.AGREE


def test_what_is_remembered_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_shapes, "_MAX_ACCEPTED", 2)
    shapes = FlatShapes()
    calls = [(f"reduce(int8[{size}, 2], SUM)", f"reduce(int8[{2 * size}], SUM)") for size in (2, 3, 4)]
    for call in calls:
        assert judge(shapes, *call) is Shapes.AGREE
    assert [shapes.knows(tuple(map(fingerprint, call))) for call in calls] == [False, True, True]
