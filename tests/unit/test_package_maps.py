"""The map in a package's docstring names each of its modules, and nothing else."""

from __future__ import annotations

import ast
import re

import pytest

from package_sources import Module, modules

HEADING = "General layout"
MAPPED_FROM = 3  # modules


def docstring_of(package: Module) -> str:
    return ast.get_docstring(package.tree) or ""


def modules_in(package: Module) -> set[str]:
    """The modules and packages directly in it."""
    inside = {name.removeprefix(f"{package.name}.") for name in modules() if name.startswith(f"{package.name}.")}
    return {name for name in inside if "." not in name and name != "__main__"}


PACKAGES = [each for each in modules().values() if each.is_package]
MAPPED = [each for each in PACKAGES if len(modules_in(each)) >= MAPPED_FROM or HEADING in docstring_of(each)]


def names_in_map(text: str) -> set[str]:
    """The modules that a map names: before a colon, first in an entry or after a semicolon; or in an indented line."""
    layout = text.partition(HEADING)[2]
    entries = re.findall(r"^\* ((?:.|\n(?=  ))*)", layout, re.MULTILINE)
    heads = [head for entry in entries for head in re.findall(r"(?:^|;\s+)((?:`\w+`(?:, )?)+)(?=:)", entry)]
    return {name for head in heads for name in re.findall(r"`(\w+)`", head)} | set(
        re.findall(r"^    (\w+)  ", layout, re.MULTILINE)
    )


@pytest.mark.parametrize("package", MAPPED, ids=lambda package: package.name)
def test_map_names_every_module(package: Module) -> None:
    assert HEADING in docstring_of(package), f"{len(modules_in(package))} modules and no map"
    assert names_in_map(docstring_of(package)) == modules_in(package)


def test_what_a_map_names() -> None:
    entries = "* `a`, `b`: both, as `c` does; `d`: more\n  of it;\n  `e`: the rest.\n* `f`: `g`, `h`.\n\nEnd `i`: j."
    assert names_in_map(f"{HEADING}:\n\n{entries}") == {"a", "b", "d", "e", "f"}
    assert names_in_map(f"{HEADING}:\n    case    what a case is\n    runner  runs them\n") == {"case", "runner"}
