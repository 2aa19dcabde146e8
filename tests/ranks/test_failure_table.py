"""Every case of docs/failures.md on the lockstep group: each other rank raises in time, and says all there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.failures.cases import CASES, CULPRIT, WORLD_SIZE, Case, observe
from lockstep.testing import WorkerDied, limit_s, run_ranks

AT_ONCE_S = 1.0
DEADLINE_S = 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_other_rank_names_the_culprit(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deadline_s = DEADLINE_S if case.is_at_deadline else None
    outcomes = run_ranks(observe, WORLD_SIZE, case.name, str(tmp_path), deadline_s, expect_errors=True)
    culprit_pid = int((tmp_path / f"pid-{CULPRIT}").read_text())
    for rank, outcome in enumerate(outcomes):
        if rank == CULPRIT:
            assert isinstance(outcome, WorkerDied) or outcome.error.startswith("lockstep.errors."), outcome
            continue
        assert outcome.error == f"lockstep.errors.{case.error}", outcome
        named = outcome.names(case, culprit_pid)
        missing = [what for what, is_named in named.items() if not is_named]
        assert not missing, f"not named: {missing} in: {outcome.message}"
        assert outcome.seconds < limit_s(AT_ONCE_S) + (deadline_s or 0.0), outcome
        assert outcome.seconds > (deadline_s or 0.0) / 2, outcome
