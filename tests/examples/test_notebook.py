"""The example notebook runs in a real kernel, and its cells show what ranks print and raise."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lockstep.testing import limit_s

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    """What each cell of code shows, once all have run."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=round(limit_s(60)), kernel_name="python3").execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


def test_ranks_print_into_the_cell(outputs: list[str]) -> None:
    lines = outputs[1].splitlines()
    assert [line.partition(": loss ")[0] for line in lines] == [f"[0] epoch {epoch}" for epoch in range(5)]


def test_the_demonstration_learns(outputs: list[str]) -> None:
    losses = [float(line.rpartition(" ")[2]) for line in outputs[1].splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 5


def test_two_processes_have_the_curve_of_one(outputs: list[str]) -> None:
    *epochs, last = outputs[2].splitlines()
    assert epochs == outputs[1].splitlines()
    count, _, apart = last.partition(" processes, at most ")
    assert count == "2"
    assert float(apart.split()[0]) < 1e-12


def test_failure_of_a_rank_is_raised_in_the_cell(outputs: list[str]) -> None:
    assert outputs[3].splitlines()[-1] == "raised here: rank 1 has had enough"


def test_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    assert all(not cell.get("outputs") for cell in notebook.cells)
