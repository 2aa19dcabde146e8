"""The scripts of the guides run, and print the same numbers at any number of ranks."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from docs.samples import GUIDES, masked, samples_in, script_in
from lockstep.testing import run_ranks

# Guide -> the numbers that it prints, with five digits.
NUMBERS = {"loop": 6, "data": 2, "evaluation": 4, "checkpoints": 2, "coming": 3}


def run_script(path: str) -> str:
    """What the script prints on this rank."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        runpy.run_path(path, run_name="__main__")
    return written.getvalue()


def numbers_in(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d{4,5}", output)]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_do_not_depend_on_the_number_of_ranks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are those that the page shows: run `python -m docs.samples` after a change of what is printed.

    All runs are in one folder: none takes up what the one before has left.
    """
    page = GUIDES[name].read_text()
    path = tmp_path / f"{name}.py"
    path.write_text(script_in(page))
    (shown,) = samples_in(page).values()
    numbers = [numbers_in(shown)]
    monkeypatch.chdir(tmp_path)  # and with it the ranks
    for world_size in (1, 2, 3):
        output = run_ranks(run_script, world_size, str(path), init=False)[0]
        assert masked(output) == masked(shown)
        numbers.append(numbers_in(output))
    assert len(numbers[0]) == NUMBERS[name]
    assert numbers[0][-1] > 0
    if name == "checkpoints":  # steps and loss of a run with a break are those of the run without one
        assert len({line.partition(": ")[2] for line in shown.splitlines()}) == 1
    assert numbers[1:] == [pytest.approx(numbers[0], rel=0, abs=1.5e-5)] * 3
