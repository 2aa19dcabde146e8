"""Who only asks whether a package is installed, by `importlib.util.find_spec`, and has a way without it.

[Note: who only asks] Apex is a choice of many programs, and `find_spec("apex") is not None` makes it. Told yes, a
program takes another way than it takes without Lockstep: other optimizers, other layers, its own branch for Apex, which
nobody may have run for years. Without Apex it has a way, and that is the one that it takes under `python`, too. So it
is told no. But a program that has no other way must run: one whose code that asks, or whose file as a whole, imports
Apex in any case. It is told yes; so is everybody with `--compat`. Who was told no, and ends with an error about that,
hears of `--compat`. An import finds the shim whatever was asked before.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from lockstep import env
from lockstep.compat.legacy.sources import name_of, parse

__all__ = ["hears_no", "hint_for_told"]

_IMPORTERS = ("importlib._bootstrap", "_frozen_importlib")
_ASKERS = ("importlib.util", "pkgutil")
_EXITS = ("exit", "_exit", "quit", "abort")
_told: set[str] = set()


def hears_no(package: str, depth: int) -> bool:
    """Whether a finder is being asked about a package by somebody who has a way without it. Local.

    Args:
        package: a top package that is not installed.
        depth: how many callers of this function belong to the finder.
    """
    if env.LOCKSTEP_COMPAT.get():
        return False
    asker = _find_asker(sys._getframe(depth + 1))
    if asker is None or _must_import(asker, package):
        return False
    _told.add(package)
    return True


def hint_for_told(error: BaseException) -> str | None:
    """The package that an error is about, if somebody was told that it is not installed; else None. Local."""
    return next((name for name in _told if re.search(rf"\b{name}\b", str(error), re.IGNORECASE)), None)


def _find_asker(frame: FrameType | None) -> FrameType | None:
    """The caller of `find_spec` above a finder's frame; None if the finder is asked for an import."""
    while frame is not None and frame.f_globals.get("__name__") in _IMPORTERS:
        frame = frame.f_back
    is_asked = False
    while frame is not None and frame.f_globals.get("__name__") in _ASKERS:
        is_asked, frame = True, frame.f_back
    return frame if is_asked else None


def _must_import(asker: FrameType, package: str) -> bool:
    """Whether the code that asks, or its file, imports the package in any case; False where there is no text."""
    tree = parse(asker.f_code.co_filename)
    if tree is None:
        return False
    name, line = asker.f_code.co_name, asker.f_lineno
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    asking = [each.body for each in functions if each.name == name and each.lineno <= line <= (each.end_lineno or 0)]
    return any(_imports(body, package) for body in (tree.body, *asking))


def _imports(body: Sequence[ast.stmt], package: str) -> bool:
    return any(package in _packages(each) or _imports_or_ends(each, package) for each in body)


def _imports_or_ends(statement: ast.stmt, package: str) -> bool:
    """Whether it is an `if` that imports the package, or ends the program."""
    if not isinstance(statement, ast.If):
        return False
    ways = (statement.body, statement.orelse)
    return any(_imports(one, package) and _ends(other) for one, other in (ways, ways[::-1]))


def _ends(body: Sequence[ast.stmt]) -> bool:
    last = body[-1] if body else None
    is_call = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and name_of(last.value.func) in _EXITS
    return isinstance(last, ast.Raise) or is_call


def _packages(statement: ast.stmt) -> Iterator[str]:
    """The top packages that a statement imports by absolute names."""
    if isinstance(statement, ast.Import):
        yield from (alias.name.split(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
        yield statement.module.split(".")[0]
