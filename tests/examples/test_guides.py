"""The scripts of the guides run, and print the same numbers at any number of ranks."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from lockstep.testing import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
# Guide -> the numbers that it prints, with five digits.
GUIDES = {
    "guide-loop.md": 6,
    "guide-data.md": 2,
    "guide-evaluation.md": 4,
    "guide-checkpoints.md": 2,
    "guide-coming-from.md": 3,
}


def run_script(path: str) -> str:
    """What the script prints on this rank."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        runpy.run_path(path, run_name="__main__")
    return written.getvalue()


@pytest.mark.parametrize("page", GUIDES)
def test_numbers_do_not_depend_on_the_number_of_ranks(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = re.findall(r"```python\n(.+?)```", (DOCS / page).read_text(), re.DOTALL)
    path = tmp_path / page.replace(".md", ".py")
    path.write_text(script)
    numbers = []
    for world_size in (1, 2, 3):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        monkeypatch.chdir(folder)  # and with it the ranks
        output = run_ranks(run_script, world_size, str(path), init=False)[0]
        numbers.append([float(number) for number in re.findall(r"\d+\.\d{5}", output)])
    assert len(numbers[0]) == GUIDES[page]
    assert numbers[0][-1] > 0
    assert numbers[1:] == [pytest.approx(numbers[0], rel=0, abs=1.5e-5)] * 2
