"""The map in a package's docstring names each of its modules, and nothing else."""

from __future__ import annotations

import ast
import re

import pytest

from package_sources import Module, modules

HEADING = "General layout"
MUST_HAVE_ONE = {
    f"lockstep.{name}"
    for name in (
        "comm",
        "comm.hosts",
        "comm.messages",
        "comm.mpi",
        "launch",
        "launch.hosts",
        "parallel",
        "recipes",
        "shm",
    )
}


def docstring_of(package: Module) -> str:
    return ast.get_docstring(package.tree) or ""


MAPPED = [each for each in modules().values() if each.is_package and HEADING in docstring_of(each)]


def names_in_map(text: str) -> set[str]:
    """The modules that a map names: before a colon, first in an entry or after a semicolon; or in an indented line."""
    layout = text.partition(HEADING)[2]
    entries = re.findall(r"^\* ((?:.|\n(?=  ))*)", layout, re.MULTILINE)
    heads = [head for entry in entries for head in re.findall(r"(?:^|; )((?:`\w+`(?:, )?)+)(?=:)", entry)]
    return {name for head in heads for name in re.findall(r"`(\w+)`", head)} | set(
        re.findall(r"^    (\w+)  ", layout, re.MULTILINE)
    )


def test_who_has_a_map() -> None:
    assert {package.name for package in MAPPED} >= MUST_HAVE_ONE


@pytest.mark.parametrize("package", MAPPED, ids=lambda package: package.name)
def test_map_names_every_module(package: Module) -> None:
    inside = {name.removeprefix(f"{package.name}.") for name in modules() if name.startswith(f"{package.name}.")}
    inside = {name for name in inside if "." not in name and name != "__main__"}
    assert names_in_map(docstring_of(package)) == inside


def test_what_a_map_names() -> None:
    entries = "* `a`, `b`: both, as `c` does; `d`: more\n  of it; `e`: the rest.\n* `f`: `g`, `h`.\n\nEnd `i`: j."
    assert names_in_map(f"{HEADING}:\n\n{entries}") == {"a", "b", "d", "e", "f"}
    assert names_in_map(f"{HEADING}:\n    case    what a case is\n    runner  runs them\n") == {"case", "runner"}
