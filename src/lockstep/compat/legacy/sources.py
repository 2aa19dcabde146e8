"""Parses a script and its own modules, without running them. Does not import torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "ScriptFile",
    "docstrings",
    "dotted_name",
    "keyword_of",
    "locate_target",
    "name_of",
    "nearest_first",
    "parse",
    "text_of",
]

_MAX_FILES = 300


@dataclass(frozen=True)
class ScriptFile:
    """A file, and where the script's own modules are.

    Attributes:
        file: path of the file.
        root: folder of these modules.
        package: package of the file.
        within: their package, if the folder has others too; None for all in the folder.
    """

    file: str
    root: str
    package: tuple[str, ...]
    within: str | None = None


def locate_target(target: str, is_module: bool, path: Sequence[str] | None = None) -> ScriptFile | None:
    """Locate the file of a target.

    Args:
        target: path of a script or of a folder with a `__main__.py`; or name of a module.
        is_module: whether `target` is the name of a module.
        path: folders to search for modules, in addition to the current one; by default `sys.path`.

    Returns:
        The file; None if it is not found, as in a zip file.
    """
    if not is_module:
        file = os.path.join(target, "__main__.py") if os.path.isdir(target) else target
        if not os.path.isfile(file):
            return None
        return ScriptFile(file, os.path.dirname(os.path.realpath(file)), ())
    parts = tuple(target.split("."))
    here = os.getcwd()
    for root in (here, *(sys.path if path is None else path)):
        for tail, package in ((("__main__",), parts), ((), parts[:-1])):
            file = os.path.join(root, *parts, *tail) + ".py"
            if os.path.isfile(file):
                return ScriptFile(file, root, package, None if root == here else parts[0])
    return None


def nearest_first(start: ScriptFile, limit: int = _MAX_FILES) -> Iterator[ScriptFile]:
    """Yield the script, its own modules that it imports, those that these import, and so on."""
    seen = {start.file}
    level = [start]
    while level:
        yield from level
        following = []
        for script in level:
            for found in _imported(script):
                if found.file not in seen and len(seen) < limit:
                    seen.add(found.file)
                    following.append(found)
        level = following


def _imported(script: ScriptFile) -> Iterator[ScriptFile]:
    tree = parse(script.file)
    for node in ast.walk(tree) if tree is not None else ():
        names: Iterable[tuple[str, ...]] = ()
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                origin = script.package[: len(script.package) - node.level + 1] + origin
            names = [origin, *((*origin, alias.name) for alias in node.names)]
        for name in names:
            if name and (found := _own_module(script, name)) is not None:
                yield found


def _own_module(script: ScriptFile, name: tuple[str, ...]) -> ScriptFile | None:
    """The file of one of the script's own modules; None for library modules."""
    if script.within not in (None, name[0]):
        return None
    for tail, package in (((), name[:-1]), (("__init__",), name)):
        file = os.path.join(script.root, *name, *tail) + ".py"
        if os.path.isfile(file):
            return dataclasses.replace(script, file=file, package=package)
    return None


def text_of(file: str) -> str:
    """Read a file.

    Raises:
        OSError: it cannot be read.
    """
    with open(file, encoding="utf-8", errors="replace") as opened:
        return opened.read()


@functools.lru_cache(maxsize=_MAX_FILES)
def parse(file: str) -> ast.Module | None:
    """The syntax tree of a file; None if it cannot be parsed."""
    try:
        return ast.parse(text_of(file))
    except (OSError, SyntaxError, ValueError):  # Python 2, or not text.
        return None


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    """Yield the docstrings."""
    for node in nodes:
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            yield body[0].value


def dotted_name(node: ast.expr) -> str:
    """The dotted name of an expression, such as `torch.distributed`; empty for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword in a call, or None."""
    return next((each.value for each in call.keywords if each.arg == name), None)
