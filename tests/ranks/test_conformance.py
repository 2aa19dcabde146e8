"""The conformance suite on the backends there are, and on one that is broken on purpose."""

from __future__ import annotations

import pytest

from lockstep.testing.conformance import BACKEND_GAPS, CASES, run_conformance
from lockstep.testing.conformance.gaps import reason_to_skip


@pytest.mark.parametrize("world_size", [1, *(pytest.param(size, marks=pytest.mark.core) for size in (2, 3)), 5])
@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_backend_conforms(backend: str, world_size: int) -> None:
    report = run_conformance(backend, world_size)
    print(report)
    assert not report.failures, str(report)


@pytest.mark.parametrize("backend", BACKEND_GAPS)
def test_gaps_are_still_there(backend: str) -> None:
    """A gap that a newer version of the backend has closed must leave the table."""
    skipped = [case for case in CASES if reason_to_skip(case, backend)]
    report = run_conformance(backend, 3, cases=skipped, skip_gaps=False)
    failed = {result.name for result in report.failures}
    for gap in BACKEND_GAPS[backend]:
        with_it = [case.name for case in skipped if gap in case.requires]
        assert failed.intersection(with_it), f"{backend} passes all of {with_it}: remove the gap {gap!r}"


def test_every_gap_names_a_feature() -> None:
    features = frozenset().union(*(case.requires for case in CASES))
    for gaps in BACKEND_GAPS.values():
        assert gaps.keys() <= features


def test_broken_backend_is_found_out() -> None:
    names = (
        "all_reduce[op=SUM,dtype=float32,shape=17]",
        "all_gather[dtype=float32,shape=13]",
        "broadcast[dtype=float32,shape=13]",
        "barrier[async_op=False]",
    )
    cases = [next(case for case in CASES if case.name == name) for name in names]
    report = run_conformance("gloo", 2, cases=cases, register="conformance_saboteur", collective_timeout=1.0)
    wrong, raising, right, killed = report.results
    assert [result.status for result in report.results] == ["failed", "failed", "passed", "failed"]
    assert wrong.detail.startswith("rank 1: the tensor differs at 17 of 17 positions, first at (0,): got ")
    assert "rank 1: ValueError: sabotage (data_movement.py:" in raising.detail
    assert right.detail == "", "a group that a failure has left out of step is not used again"
    assert "rank 1: WorkerDied: its process was killed by SIGKILL" in killed.detail
    assert "FAILED  barrier[async_op=False]" in str(report)
