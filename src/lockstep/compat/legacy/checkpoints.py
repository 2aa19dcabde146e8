"""Whether a file loads checkpoints that hold more than tensors, by what it saves."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.compat.legacy.sources import dotted_name, keyword_of, name_of

__all__ = ["loads_of_objects"]

_NAMESPACES = frozenset({"args", "opt", "opts", "options", "flags", "FLAGS"})


def loads_of_objects(nodes: list[ast.AST], calls: list[ast.Call]) -> Iterator[tuple[str, int]]:
    """A checkpoint that the file saves with its arguments or numpy's numbers in it, and loads without saying how.

    Args:
        nodes: all of the file's syntax tree.
        calls: those that are calls.

    Yields:
        "load" and the line that loads, once.
    """
    loads = [
        call for call in calls if dotted_name(call.func) == "torch.load" and keyword_of(call, "weights_only") is None
    ]
    if not loads:
        return
    from_numpy = {
        name_of(target)
        for node in nodes
        if isinstance(node, ast.Assign) and _calls_numpy(node.value)
        for target in node.targets
    }
    if any(name_of(each) in _NAMESPACES | from_numpy or _calls_numpy(each) for each in _saved(nodes, calls)):
        yield "load", loads[0].lineno


def _saved(nodes: list[ast.AST], calls: list[ast.Call]) -> Iterator[ast.expr]:
    """What is handed to `torch.save` or a function of the script's that saves: the values of dicts, one by one."""
    handed = [each for call in calls if "save" in name_of(call.func).lower() for each in call.args]
    names = {each.id for each in handed if isinstance(each, ast.Name)}
    held = list(handed)
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value) if any(name_of(target) in names for target in targets):
                held.append(value)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))], value=value) if name in names:
                held.append(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update")) if name in names:
                held += [*node.args, *(each.value for each in node.keywords)]
    for each in held:
        if isinstance(each, ast.Dict):
            yield from each.values
        elif isinstance(each, ast.Call) and name_of(each.func) == "dict":
            yield from (keyword.value for keyword in each.keywords)
        else:
            yield each


def _calls_numpy(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted_name(node.func).split(".")[0] in ("np", "numpy")
