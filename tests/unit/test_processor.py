"""What depends on the make of the processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.shm import processor
from lockstep.shm.team import SMALL_SLOT_BYTES


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    processor.bytes_reduced_by_all.cache_clear()
    yield
    processor.bytes_reduced_by_all.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", {2: 64, 4: 64, 8: 32, 16: 16, 64: 16}),
        ("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n", {2: 16, 4: 16, 64: 16}),
        ("CPU implementer\t: 0x41\n", {2: 64, 64: 16}),
        (None, {1: 64, 2: 64}),
    ],
    ids=["intel", "amd", "arm", "unreadable"],
)
def test_who_adds_up_depends_on_ranks_and_make(
    text: str | None, expected: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(processor, "CPUINFO", path)
    assert {n: processor.bytes_reduced_by_all(n) >> 10 for n in expected} == expected
    assert processor.writes_lines_by_turns() is ("AMD" in (text or ""))


def test_what_every_rank_adds_up_fits_a_small_slot() -> None:
    assert max(processor.bytes_reduced_by_all(n) for n in range(1, 65)) <= SMALL_SLOT_BYTES
