"""Each program of `another_answers.py` is found at its stage, and is one process's where it heeds its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from another_answers import ANOTHER_ANSWERS
from lockstep.tools.verify.report import format_text
from lockstep.tools.verify.settings import Verification
from lockstep.tools.verify.verification import verify
from test_mistakes import is_documented

SCRIPT = str(Path(__file__).with_name("run_row.py"))


@pytest.mark.parametrize("name", ANOTHER_ANSWERS)
def test_is_found(name: str) -> None:
    verdicts = verify(Verification(SCRIPT, (name,), nproc=(3,), steps=3))
    assert verdicts[0].first == ANOTHER_ANSWERS[name][1:], format_text(name, verdicts)
    assert is_documented(verdicts[0].differences[0])


@pytest.mark.parametrize("name", ANOTHER_ANSWERS)
def test_is_one_process_where_the_row_is_heeded(name: str) -> None:
    verdicts = verify(Verification(SCRIPT, (name, "heeded"), nproc=(3,), steps=3))
    assert verdicts[0].code == 0, format_text(name, verdicts)
