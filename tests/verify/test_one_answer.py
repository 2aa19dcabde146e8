"""`lockstep.testing.assert_one_answer`, as tests of users call it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.testing import assert_one_answer, limit_s

SCRIPT = Path(__file__).with_name("mistakes.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_it_passes_on_the_answer_of_one_process(tmp_path: Path) -> None:
    assert_one_answer(SCRIPT, "plain", str(tmp_path), nproc=(1, 2), steps=2)


def test_it_passes_where_one_gradient_is_nothing_but_rounding() -> None:
    """That of the bias before a batch norm, in float16: two runs of one process differ there by as much as it is."""
    assert_one_answer(EXAMPLES / "apex_amp.py", "--opt-level", "O1")


def test_it_raises_with_the_report_on_another_answer(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        assert_one_answer(SCRIPT, "sum", str(tmp_path), steps=2)
    assert "NOT the answer of one process" in str(raised.value)
    assert "lockstep.sum(loss)" in str(raised.value)


def test_it_raises_where_nothing_can_be_told(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('no data here')")
    with pytest.raises(AssertionError, match=r"(?s)cannot\s+tell.*no data here"):
        assert_one_answer(tmp_path / "fails.py")


def test_a_script_that_trains_nothing_is_not_said_to_have_been_given_other_arguments(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import torch\n")
    with pytest.raises(AssertionError, match=r"no\s+optimizer\s+took\s+a\s+step") as raised:
        assert_one_answer(tmp_path / "idle.py", "--lr", "3")
    assert "through its arguments" not in str(raised.value)


def test_it_wants_a_number_of_processes_to_compare() -> None:
    with pytest.raises(AssertionError, match=r"nproc is \(1,\)"):
        assert_one_answer(SCRIPT, nproc=(1,))


def test_it_says_why_a_file_of_another_user_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise OSError(75, 'Value too large for defined data type')")
    with pytest.raises(AssertionError, match=r"(?s)other\s+users\s+cannot\s+be\s+written"):
        assert_one_answer(tmp_path / "fails.py")


def test_a_signal_ends_the_command_and_not_only_the_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal, sys, time\nos.kill(int(sys.argv[1]), signal.SIGTERM)\ntime.sleep(60)\n")
    command = f"exec {sys.executable} -m lockstep verify {script} $$"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=limit_s(100), check=False)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
