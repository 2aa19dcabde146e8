"""`lockstep verify`, for tests of training scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lockstep.testing.limits import limit_s

__all__ = ["assert_one_answer"]

_LIMIT_S = 600.0


def assert_one_answer(
    script: str | os.PathLike[str],
    *args: str,
    nproc: int | Sequence[int] = (1, 2),
    steps: int = 4,
    double: bool = False,
) -> None:
    """Assert that a training script gives the same answer on N processes as on one. Local; starts processes.

    Args:
        script: path of the script.
        *args: its arguments; choose them such that it uses little data.
        nproc: numbers of processes to compare with one; 1 itself is optional.
        steps: optimizer steps to compare in an epoch of more than 40 batches; shorter epochs run in full.
        double: compute in float64, so that rounding hides no differences.

    Raises:
        AssertionError: the answers differ, or could not be compared; with the report of `lockstep verify`.

        >>> assert_one_answer("train.py", "--epochs", "1", nproc=(1, 2, 3))  # doctest: +SKIP
    """
    __tracebackhide__ = True  # pytest shows the test that called this
    numbers = [number for number in ([nproc] if isinstance(nproc, int) else nproc) if number > 1]
    assert numbers, f"nproc is {nproc}; expected a number of processes above 1 to compare with one"
    with tempfile.TemporaryDirectory(prefix="lockstep-one-answer-") as folder:
        report = Path(folder, "report.json")
        options = ["--nproc", ",".join(map(str, numbers)), "--steps", str(steps), "--json", str(report)]
        words = [*options, *(["--double"] if double else []), os.fspath(script), *map(str, args)]
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", "verify", *words],
            capture_output=True,
            text=True,
            timeout=limit_s(_LIMIT_S),
        )
        text = f"{done.stdout}{done.stderr}"
        assert report.exists(), text
        assert json.loads(report.read_text(encoding="utf-8"))["code"] == 0, text
