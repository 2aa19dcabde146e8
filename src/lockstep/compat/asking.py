"""Who only asks whether a package is installed, by `importlib.util.find_spec`, and has a way without it.

[Note: who only asks] Apex is a choice of many programs, and `find_spec("apex") is not None` makes it. Told yes, a
program takes another way than it takes without Lockstep: other optimizers, other layers, its own branch for Apex, which
nobody may have run for years. Without Apex it has a way, and that is the one that it takes under `python`, too. So it
is told no. But a program that has no other way must run: one in which the function that asks, the module-level code of
its file or that of the main file imports Apex in any case. It is told yes; so is every program with `--compat`. A
program that was told no, and ends with an error about that, gets a line that names `--compat`. An import finds the shim
whatever was asked before.

In any case means: not in a function that is called, in a branch, or in a `try` that continues without. A `try` or a
branch counts whose other ways raise or exit. The text comes by `linecache`, which has that of zip files and of cells of
notebooks, too.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType

from lockstep import env
from lockstep.compat.legacy.sources import name_of

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
    """The package that an error is about, if somebody was told that it is not installed; else None. Local.

    Its text is about it, or the line that raised it: an `assert has_apex`, or a use of what its file would have
    imported, `amp`, which is now no name, or None.
    """
    return next((package for package in _told if _is_about(error, package)), None)


def _is_about(error: BaseException, package: str) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file, line = ("", "") if trace is None else (trace.tb_frame.f_code.co_filename, "")
    if trace is not None and trace.tb_lineno:
        line = linecache.getline(file, trace.tb_lineno, trace.tb_frame.f_globals)
    text = f"{error} {line}" if isinstance(error, AssertionError) else str(error)
    if re.search(rf"(?<![^\W_]){package}(?![^\W_])", text, re.IGNORECASE):
        return True
    is_unbound = isinstance(error, NameError) or "'NoneType'" in text
    return is_unbound and any(re.search(rf"\b{name}\b", line) for name in _bound_by(package, file))


def _bound_by(package: str, file: str) -> set[str]:
    """The names that a file's imports of the package would bind."""
    tree = _parse(file)
    found = [each for each in ast.walk(tree) if isinstance(each, ast.stmt)] if tree is not None else []
    imports = [each for each in found if isinstance(each, ast.Import | ast.ImportFrom)]
    aliases = [alias for each in imports if package in _packages(each) for alias in each.names]
    return {alias.asname or alias.name.split(".")[0] for alias in aliases} - {"*"}


def _find_asker(frame: FrameType | None) -> FrameType | None:
    """The caller of `find_spec` above a finder's frame; None if the finder is asked for an import."""
    while frame is not None and frame.f_globals.get("__name__") in _IMPORTERS:
        frame = frame.f_back
    is_asked = False
    while frame is not None and frame.f_globals.get("__name__") in _ASKERS:
        is_asked, frame = True, frame.f_back
    return frame if is_asked else None


def _must_import(asker: FrameType, package: str) -> bool:
    """Whether the code that asks, its file, or the main file imports the package in any case; False without a text."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    linecache.getlines(asker.f_code.co_filename, asker.f_globals)  # so that a loader's text is found by name
    where = (asker.f_code.co_filename, asker.f_code.co_name, asker.f_lineno or 0)
    return _imports_there(package, *where) or (main is not None and _imports_there(package, main))


@functools.cache
def _imports_there(package: str, file: str, function: str = "", line: int = 0) -> bool:
    """Whether a file, or its function of this name around this line, imports the package in any case."""
    tree = _parse(file)
    if tree is None:
        return False
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    asking = [
        each.body for each in functions if each.name == function and each.lineno <= line <= (each.end_lineno or 0)
    ]
    return any(_imports(body, package) for body in (tree.body, *asking))


def _parse(file: str) -> ast.Module | None:
    """The syntax tree of a file, or of what `linecache` has under this name; None where there is none to be had."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports(body: Sequence[ast.stmt], package: str) -> bool:
    return any(package in _packages(each) or _imports_inside(each, package) for each in body)


def _imports_inside(statement: ast.stmt, package: str) -> bool:
    """Whether it is a block that imports the package in any case, or ends the program."""
    if isinstance(statement, ast.With):
        return _imports(statement.body, package)
    if isinstance(statement, ast.Try):
        tried = _imports(statement.body, package) and all(_ends(each.body) for each in statement.handlers)
        return tried or _imports(statement.finalbody, package)
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
