"""Finds how a script spells the option for its local rank, from its source, without running it.

torch's launcher passed `--local_rank=N` until 2.0 and `--local-rank=N` since, and most scripts accept one of the two.
Signs of which, in order of precedence:

1. a declaration: `add_argument("--local_rank", …)` of argparse, `option(…)` of click, `add_option` of optparse,
   `DEFINE_integer("local_rank", …)` of absl, `typer.Option(…)`; in the script, or in its own modules that it
   imports, the nearest first;
2. a parser that derives options from names: `HfArgumentParser` (`TrainingArguments` has a `local_rank`), a field or
   parameter `local_rank` with dataclasses, fire or typer;
3. any other string with such an option: `sys.argv` parsed by hand, a usage text for docopt;
4. none of these, but a parser that rejects unknown options: no option is passed, since it would fail. The
   script has `LOCAL_RANK` in its environment;
5. nothing: `--local_rank`, as until torch 2.0.

A script that Python 3 cannot parse is searched as text.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lockstep.compat.legacy.sources import ScriptFile, docstrings, locate_target, name_of, nearest_first, parse, text_of

__all__ = ["DEFAULT_OPTION", "Spelling", "find_spelling"]

DEFAULT_OPTION = "--local_rank"

_OPTION = re.compile(r"-{1,2}local[_-]rank")
_IN_TEXT = re.compile(r"(?<![\w-])--local[_-]rank(?![\w-])")
_DECLARING = frozenset({"add_argument", "add_option", "option", "Option", "Argument"})
_NAME = "local_rank"


@dataclass(frozen=True)
class Spelling:
    """The option that a script expects.

    Attributes:
        option: `--local_rank` or `--local-rank`, or None if it should not be passed.
        reason: the reason, as text: where it is declared, or what was not found.
    """

    option: str | None
    reason: str


@dataclass
class _Findings:
    """Signs in the files read so far, nearest to the script first."""

    mentions: list[Spelling] = field(default_factory=list)
    derived: list[Spelling] = field(default_factory=list)
    is_strict: bool = False


def find_spelling(target: str, is_module: bool = False, path: Sequence[str] | None = None) -> Spelling:
    """Find how a script spells the option for its local rank. Local; reads files and runs nothing.

    Args:
        target: path of a script or of a folder with a `__main__.py`; or name of a module.
        is_module: whether `target` is the name of a module.
        path: folders to search for modules, in addition to the script's own; by default `sys.path`.
    """
    start = locate_target(target, is_module, path)
    if start is None:
        return Spelling(DEFAULT_OPTION, f"the source of {target} was not found")
    findings = _Findings()
    for file in nearest_first(start):
        declared = _read(file, findings)
        if declared is not None:
            return declared
    for found in (findings.derived, findings.mentions):
        if found:
            return found[0]
    if findings.is_strict:
        return Spelling(None, f"{target} has a parser without such an option; it finds LOCAL_RANK in its environment")
    return Spelling(DEFAULT_OPTION, f"{target} declares no such option")


# ---- signs in one file ---------------------------------------------------------------------------


def _read(script: ScriptFile, findings: _Findings) -> Spelling | None:
    """The declaration in a file, or None after noting weaker signs."""
    tree = parse(script.file)
    name = os.path.basename(script.file)
    if tree is None:
        if found := _IN_TEXT.search(text_of(script.file)):
            findings.mentions.append(Spelling(found[0], f"{name} has it in its text"))
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        if option := _declared_by(call):
            return Spelling(option, f"declared at {name}:{call.lineno}")
    called = {name_of(call.func) for call in calls}
    if option := _derived_from(tree, called):
        findings.derived.append(Spelling(option, f"{name} derives options from names"))
    for option, line in _mentioned_in(tree, reads_docstrings="docopt" in called):
        findings.mentions.append(Spelling(option, f"{name}:{line} has it in its text"))
    findings.is_strict |= "parse_args" in called and "ArgumentParser" in called
    return None


def _mentioned_in(tree: ast.Module, reads_docstrings: bool) -> Iterator[tuple[str, int]]:
    """Yield each spelling in a string of the file, with its line."""
    ignored = set() if reads_docstrings else {id(node) for node in docstrings(ast.walk(tree))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ignored:
            found = _IN_TEXT.search(node.value)
            if found:
                yield found[0], node.lineno


def _declared_by(call: ast.Call) -> str | None:
    function = name_of(call.func)
    texts = [node.value for node in call.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if function.startswith("DEFINE_"):
        return f"--{texts[0]}" if texts and texts[0].replace("-", "_") == _NAME else None
    if function not in _DECLARING:
        return None
    # click accepts several spellings in one string, such as "--local-rank/--no-local-rank".
    return next((text for text in texts if _OPTION.fullmatch(text)), None)


def _derived_from(tree: ast.Module, called: set[str]) -> str | None:
    """The spelling if a library derives options from names of fields or parameters."""
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
