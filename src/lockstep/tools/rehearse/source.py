"""Reads the text of a script around a line that ran. Never imports torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.compat.legacy.sources import name_of, parse

__all__ = [
    "argument_at",
    "assigned_values",
    "assignments_at",
    "divisors_at",
    "is_factor",
    "tests_around",
]


def _nodes(file: str) -> Iterator[ast.AST]:
    tree = parse(file)
    return iter(()) if tree is None else ast.walk(tree)


def _covers(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


def tests_around(file: str, line: int) -> list[frozenset[str]]:
    """For each `if` statement around the line, the names in its condition, in lower case."""
    return [
        frozenset(name.lower() for name in _names_in(node.test))
        for node in _nodes(file)
        if isinstance(node, ast.If) and _covers(node, line) and not _covers(node.test, line)
    ]


def _names_in(node: ast.expr) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def argument_at(file: str, line: int, function: str, name: str, position: int | None = None) -> ast.expr | None:
    """An argument of a call on that line.

    Args:
        file: path of the script.
        line: a line that the call covers.
        function: end of the called name; empty for any.
        name: name of the argument.
        position: position of the argument; None if it is keyword-only.

    Returns:
        Its expression; None unless exactly one such call has the argument.
    """
    calls = [
        node
        for node in _nodes(file)
        if isinstance(node, ast.Call) and _covers(node, line) and name_of(node.func).endswith(function)
    ]
    found: list[ast.expr] = []
    for call in calls:
        found.extend(keyword.value for keyword in call.keywords if keyword.arg == name)
        if (
            position is not None
            and len(call.args) > position
            and not any(isinstance(each, ast.Starred) for each in call.args)
        ):
            found.append(call.args[position])
    return found[0] if len(found) == 1 else None


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
        return [node.target]
    return []


def assigned_values(file: str, text: str) -> list[ast.expr | None]:
    """Everything that the file assigns to a name such as `rank` or `args.rank`.

    For a parameter, these are the arguments of calls in the file. None stands for an assignment without an expression:
    a loop variable, an element of a tuple, `+=`, a parameter of a function that is not called in the file.
    """
    found: list[ast.expr | None] = []
    for node in _nodes(file):
        for target in _targets(node):
            if ast.unparse(target) == text:
                plain = isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
                found.append(node.value if plain else None)  # type: ignore[attr-defined]
            elif isinstance(target, ast.Tuple | ast.List) and text in [ast.unparse(each) for each in target.elts]:
                found.append(None)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            found.extend(_passed_values(file, node.name, names, text) if text in names else ())
        elif isinstance(node, ast.Lambda) and text in [each.arg for each in node.args.args]:
            found.append(None)
    return found


def _passed_values(file: str, function: str, names: list[str], name: str) -> list[ast.expr | None]:
    """What calls in the file pass for one parameter of a function; None where that cannot be determined."""
    calls = [node for node in _nodes(file) if isinstance(node, ast.Call) and name_of(node.func) == function]
    found: list[ast.expr | None] = []
    for call in calls:
        position = names.index(name) - (names[0] == "self" and isinstance(call.func, ast.Attribute))
        value = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
        if value is None and not any(isinstance(each, ast.Starred) for each in call.args[: position + 1]):
            value = call.args[position] if position < len(call.args) else None
        found.append(value)
    return found or [None]


def assignments_at(file: str, line: int) -> list[tuple[str, ast.expr]]:
    """Names and values of the plain assignments on that line."""
    return [
        (ast.unparse(target), node.value)
        for node in _nodes(file)
        if isinstance(node, ast.Assign) and _covers(node, line)
        for target in node.targets
    ]


def divisors_at(file: str, line: int) -> list[ast.expr]:
    """The divisors of all divisions on that line: of `/`, `/=`, `.div()` and the like."""
    found: list[ast.expr] = []
    for node in _nodes(file):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div) and _covers(node, line):
            found.append(node.right if isinstance(node, ast.BinOp) else node.value)
        is_method = isinstance(node, ast.Call) and name_of(node.func) in ("div", "div_", "true_divide")
        if isinstance(node, ast.Call) and is_method and _covers(node, line):
            found.extend(node.args[-1:])
    return found


def is_factor(file: str, name: str) -> bool:
    """Whether the name is an operand of `*`, `%` or `//` in the file, with or without its owner (`args.`)."""
    last = name.rpartition(".")[2]
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult | ast.Mod | ast.FloorDiv)
        and not isinstance(node.left, ast.Constant | ast.JoinedStr)
        and last in (name_of(node.left), name_of(node.right))
        for node in _nodes(file)
    )
