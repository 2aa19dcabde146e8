"""The group over MPI, under a real mpirun."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import mpi_programs as programs
from lockstep.testing import limit_s
from lockstep.testing.conformance import run_conformance
from mpi_harness import launch, mpirun, needs_mpi

pytestmark = needs_mpi

# From the moment the trouble is there until every waiting rank must have raised, on a busy machine.
AT_ONCE_S = 1.0

PROGRAM = str(Path(programs.__file__))


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.core), 3])
def test_backend_conforms(world_size: int) -> None:
    report = run_conformance("mpi4py", world_size, launch=launch)
    print(report)
    assert not report.failures, str(report)
    assert not [result for result in report.results if result.status == "skipped"]


@pytest.fixture(scope="module")
def well() -> list[dict[str, Any]]:
    """What `programs.without_failures` found on each of three ranks."""
    ranks = launch(programs.without_failures, 3, timeout=120.0)
    assert all(isinstance(of_rank, dict) for of_rank in ranks), ranks
    return ranks


def test_ways_in(well: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(well):
        found = of_rank["ways in"]
        place = (rank, 3, rank, 3, 0)
        ours = {"backend": "mpi4py", "actual": "mpi4py", "launcher": "mpirun", "place": place, "sum": 6.0}
        assert found["auto"] == ours | {"backend": "lockstep", "actual": "lockstep"}
        assert found["env gloo"] == {"actual": "gloo", "rank": rank, "sum": 6.0}
        assert not found["mpi imported by then"], "ranks on one host that want no group over MPI need no MPI"
        assert found["init"] == found["init again"] == ours
        assert found["env"] == found["url"] == {"actual": "mpi4py", "rank": rank, "sum": 6.0}
        assert found["hosts"] == {"place": (0, 1, 1) if rank == 2 else (rank, 2, 0), "sum": 6.0}
        assert found["left in temp"] == []


def test_sums_have_the_bits_of_shared_memory(well: list[dict[str, Any]]) -> None:
    for of_rank in well:
        assert of_rank["bits"]["mpi"] == of_rank["bits"]["lockstep"] == well[0]["bits"]["mpi"]


def test_numbers(well: list[dict[str, Any]]) -> None:
    for of_rank in well:
        found = of_rank["numbers"]
        assert found["weights"] == well[0]["numbers"]["weights"]
        for dtype in ("float8_e4m3fn", "float8_e5m2", "float16", "complex64"):
            assert found[dtype] == [3.0] * 5, dtype
        assert found["bool"] == [1.0] * 5
        assert found["average"] == [1.0] * 4
        assert found["large"] == (3.0, 3.0)


def test_random_programs(well: list[dict[str, Any]]) -> None:
    assert [of_rank["random programs"] for of_rank in well] == ["no mismatch"] * 3


def test_sharded_optimizer(well: list[dict[str, Any]]) -> None:
    """Ranks of one host have the parameters once, over MPI, too."""
    for of_rank in well:
        found = of_rank["sharded"]
        assert 0.3 < found["held"] < 0.4
        assert found["sharded"] == found["plain"] == well[0]["sharded"]["plain"]


def test_threads_and_groups(well: list[dict[str, Any]]) -> None:
    for of_rank in well:
        assert of_rank["threads"] == [True] * 120


def test_troubles(tmp_path: Path) -> None:
    """The odd rank is the last of three."""
    ranks = launch(programs.troubles, 3, str(tmp_path))
    assert all(isinstance(of_rank, dict) for of_rank in ranks), ranks
    expected = {
        # case: what the usual ranks raise, what the odd one does, what the usual ones say, within how many seconds
        "shape": ("CollectiveMismatch", "CollectiveMismatch", "all_reduce(float32[4], SUM) at ", AT_ONCE_S),
        "operation": ("CollectiveMismatch", "CollectiveMismatch", "broadcast(float32[3], root=0) at ", AT_ONCE_S),
        "reduce op": ("CollectiveMismatch", "CollectiveMismatch", "all_reduce(float32[3], MAX) at ", AT_ONCE_S),
        "left": ("RankLost", "", "left the group while others still needed it", AT_ONCE_S),
        "aborted": ("RankLost", "", "failed: it ran out of patience", AT_ONCE_S),
        "aborted, message": ("RankLost", "", "failed: it ran out of patience", AT_ONCE_S),
        "late": ("CollectiveTimeout", "CollectiveTimeout", " s in collective #", 1.0 + AT_ONCE_S),
        "late barrier": ("CollectiveTimeout", "CollectiveTimeout", " s in collective #", 1.0 + AT_ONCE_S),
        "late message": ("CollectiveTimeout", "", "recv(float32[3], src=2, tag=0)", 1.0 + AT_ONCE_S),
        "interrupted": ("RankLost", "KeyboardInterrupt", "raised KeyboardInterrupt", 0.5 + AT_ONCE_S),
        "symmetric": ("InputError", "InputError", "only lockstep groups have symmetric memory", AT_ONCE_S),
        "sparse": ("InputTypeError", "InputTypeError", "takes dense tensors", AT_ONCE_S),
    }
    for name, (usual, odd, text, within_s) in expected.items():
        for rank in (0, 1):
            kind, said, seconds, culprits = ranks[rank][name]
            assert kind == usual, (name, said)
            assert text in said, name
            assert seconds < limit_s(within_s), (name, seconds)
            if usual.startswith(("Collective", "Rank")):
                assert "mpi_programs.py:" in said, (name, said)
                assert culprits == (2,), (name, said)
        assert ranks[2][name][0] == odd, (name, ranks[2][name])
    for name in ("late", "late barrier"):
        for rank in (0, 1):
            waited = re.search(r" waited (\d+\.\d) s in ", ranks[rank][name][1])
            assert waited is not None, ranks[rank][name][1]
            assert float(waited[1]) >= 1.0, ranks[rank][name][1]
        assert "had given up" in ranks[2][name][1]
    assert ranks[0]["message"][0] == "CollectiveMismatch"
    assert "send(float32[4], tag=0) of rank 2" in ranks[0]["message"][1]


def test_uncaught_exception_is_told_to_all_and_ends_the_job() -> None:
    """Rank 1 raises. Rank 0 learns of it in a collective; rank 2, which comes to none any more, is ended."""
    done = mpirun(3, [PROGRAM, "raise_on_one"], timeout_s=60.0)
    assert done.returncode != 0
    assert "[rank1]: ValueError: out of cheese" in done.stderr
    assert "[rank0]: lockstep.errors.RankLost: rank 1 (" in done.stderr
    assert "raised ValueError: out of cheese at " in done.stderr
    assert "has waited 2 s after a failure for the other ranks to leave MPI" in done.stderr
