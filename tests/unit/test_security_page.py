"""Every line of the tables of docs/security.md is held by a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def rows() -> list[list[str]]:
    """Cells of all rows of all tables, without heads and rules."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[-1] != "test" and not set(row[-1]) <= set("- ")]


def test_every_row_names_a_test_that_is_there() -> None:
    assert len(rows()) > 30
    for row in rows():
        found = re.fullmatch(r"`(tests/[a-z_/]+\.py)::(test_[a-z_]+)`", row[-1])
        assert found is not None, row
        path, name = found.groups()
        functions = [
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions, f"{path} has no {name}"


def test_every_parser_of_the_fuzz_has_a_row_of_its_page() -> None:
    assert PAGE.count("tests/fuzz/test_parsers.py::test_parser") == 1


def test_what_listens_is_complete() -> None:
    """Whoever opens another socket that listens adds a row, and the module here."""
    listens = {
        str(path.relative_to(ROOT / "src/lockstep"))
        for path in (ROOT / "src/lockstep").rglob("*.py")
        if re.search(
            r"listener\.listen\(|tcp\.listen\(|(?<!def )serve_tcp_store\(|create_server\(|TCPStore\([^)]*, True, ",
            path.read_text(),
        )
    }
    assert listens == {"launch/hosts/job_store.py", "network_interfaces.py", "rendezvous/mpi.py", "rendezvous/tcp.py"}
