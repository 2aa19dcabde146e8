"""How a script spells the option for its local rank, read from its source. Nothing of the script is run.

torch's launcher passed `--local_rank=N` until 2.0 and `--local-rank=N` since, and most scripts declare one of the two.
What they declare can be seen in their text, in this order:

1. a declaration: `add_argument("--local_rank", …)` of argparse, `option(…)` of click, `add_option` of optparse,
   `DEFINE_integer("local_rank", …)` of absl, `typer.Option(…)`; in the script, or in modules of its own that it
   imports, the nearest first;
2. a parser that makes options of names: `HfArgumentParser` (its `TrainingArguments` has a `local_rank`), a field or
   parameter `local_rank` where dataclasses, fire or typer are at work;
3. any other text that is such an option: `sys.argv` taken apart by hand, a usage text for docopt;
4. none of these, but a parser that refuses what it does not know: then no option is passed, as it could only fail. The
   script has `LOCAL_RANK` in its environment;
5. nothing at all: `--local_rank`, as until torch 2.0.

A script that Python 3 cannot parse is searched as text.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["DEFAULT_OPTION", "Spelling", "find_spelling"]

DEFAULT_OPTION = "--local_rank"

_MAX_FILES = 300
_OPTION = re.compile(r"-{1,2}local[_-]rank")
_IN_TEXT = re.compile(r"(?<![\w-])--local[_-]rank(?![\w-])")
_DECLARING = frozenset({"add_argument", "add_option", "option", "Option", "Argument"})
_NAME = "local_rank"


@dataclass(frozen=True)
class Spelling:
    """What a script expects.

    Attributes:
        option: `--local_rank` or `--local-rank`, or None where it should not be passed.
        reason: why, for a reader: where it is declared, or what was not found.
    """

    option: str | None
    reason: str


@dataclass
class _Findings:
    """What the files say that have been read so far, the nearest to the script first."""

    mentions: list[Spelling] = field(default_factory=list)
    derived: list[Spelling] = field(default_factory=list)
    is_strict: bool = False


def find_spelling(target: str, is_module: bool = False, path: Sequence[str] | None = None) -> Spelling:
    """How a script spells the option for its local rank. Local; reads files and runs nothing.

    Args:
        target: path of a script or of a folder with a `__main__.py`; or name of a module.
        is_module: `target` is the name of a module.
        path: folders in which modules are looked for, besides the script's own; default `sys.path`.
    """
    start = _locate_target(target, is_module, sys.path if path is None else path)
    if start is None:
        return Spelling(DEFAULT_OPTION, f"the source of {target} was not found")
    findings = _Findings()
    for file in _nearest_first(start):
        declared = _read(file, findings)
        if declared is not None:
            return declared
    for found in (findings.derived, findings.mentions):
        if found:
            return found[0]
    if findings.is_strict:
        return Spelling(None, f"{target} has a parser without such an option; it finds LOCAL_RANK in its environment")
    return Spelling(DEFAULT_OPTION, f"{target} declares no such option")


# ---- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A file, and which of the modules that it imports are the script's own.

    Attributes:
        file: its path.
        root: the folder in which these modules lie.
        package: that of the file.
        within: the package they are part of, where others lie there too; None for all in the folder.
    """

    file: str
    root: str
    package: tuple[str, ...]
    within: str | None = None


def _locate_target(target: str, is_module: bool, path: Sequence[str]) -> _Source | None:
    if not is_module:
        file = os.path.join(target, "__main__.py") if os.path.isdir(target) else target
        if not os.path.isfile(file):
            return None
        return _Source(file, os.path.dirname(os.path.realpath(file)), ())
    parts = tuple(target.split("."))
    here = os.getcwd()
    for root in (here, *path):
        for tail, package in ((("__main__",), parts), ((), parts[:-1])):
            file = os.path.join(root, *parts, *tail) + ".py"
            if os.path.isfile(file):
                return _Source(file, root, package, None if root == here else parts[0])
    return None


def _nearest_first(start: _Source) -> Iterator[_Source]:
    """The script, the modules of its own that it imports, those that these import, and so on."""
    seen = {start.file}
    level = [start]
    while level:
        yield from level
        following = []
        for source in level:
            for found in _imported(source):
                if found.file not in seen and len(seen) < _MAX_FILES:
                    seen.add(found.file)
                    following.append(found)
        level = following


def _imported(source: _Source) -> Iterator[_Source]:
    tree = _parse(source.file)
    for node in ast.walk(tree) if tree is not None else ():
        names: Iterable[tuple[str, ...]] = ()
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                origin = source.package[: len(source.package) - node.level + 1] + origin
            names = [origin, *((*origin, alias.name) for alias in node.names)]
        for name in names:
            if name and (found := _own_module(source, name)) is not None:
                yield found


def _own_module(source: _Source, name: tuple[str, ...]) -> _Source | None:
    """The file of one of the script's own modules; None for those of libraries."""
    if source.within not in (None, name[0]):
        return None
    for tail, package in (((), name[:-1]), (("__init__",), name)):
        file = os.path.join(source.root, *name, *tail) + ".py"
        if os.path.isfile(file):
            return dataclasses.replace(source, file=file, package=package)
    return None


def _text(file: str) -> str:
    with open(file, encoding="utf-8", errors="replace") as opened:
        return opened.read()


def _parse(file: str) -> ast.Module | None:
    try:
        return ast.parse(_text(file))
    except (OSError, SyntaxError, ValueError):  # Python 2, or no text at all.
        return None


# ---- what one file says --------------------------------------------------------------------------


def _read(source: _Source, findings: _Findings) -> Spelling | None:
    """The declaration in a file, or None after noting what else it says."""
    tree = _parse(source.file)
    name = os.path.basename(source.file)
    if tree is None:
        if found := _IN_TEXT.search(_text(source.file)):
            findings.mentions.append(Spelling(found[0], f"{name} has it in its text"))
        return None
    docstrings = {id(node) for node in _docstrings(tree)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        if option := _declared_by(call):
            return Spelling(option, f"declared at {name}:{call.lineno}")
    called = {_name_of(call.func) for call in calls}
    if option := _derived_from(tree, called):
        findings.derived.append(Spelling(option, f"{name} makes options of names"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_usage = id(node) in docstrings and "docopt" in called
            found = _IN_TEXT.search(node.value)
            if found and (is_usage or id(node) not in docstrings):
                findings.mentions.append(Spelling(found[0], f"{name}:{node.lineno} has it in its text"))
    findings.is_strict |= "parse_args" in called and "ArgumentParser" in called
    return None


def _declared_by(call: ast.Call) -> str | None:
    function = _name_of(call.func)
    texts = [node.value for node in call.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if function.startswith("DEFINE_"):
        return f"--{texts[0]}" if texts and texts[0].replace("-", "_") == _NAME else None
    if function not in _DECLARING:
        return None
    # click takes several spellings in one text: "--local-rank/--no-local-rank" and the like.
    return next((text for text in texts if _OPTION.fullmatch(text)), None)


def _derived_from(tree: ast.Module, called: set[str]) -> str | None:
    """The spelling where a library makes options of the names of fields or parameters."""
    if "HfArgumentParser" in called:
        return "--local_rank"
    modules = {
        alias.name.split(".")[0] if isinstance(node, ast.Import) else (node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    has_name = any(
        (isinstance(node, ast.arg) and node.arg == _NAME)
        or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == _NAME)
        for node in ast.walk(tree)
    )
    if not has_name:
        return None
    if modules & {"typer", "tyro"}:
        return "--local-rank"
    return "--local_rank" if modules & {"fire", "simple_parsing", "jsonargparse", "dataclasses"} else None


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            yield body[0].value
