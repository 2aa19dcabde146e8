"""Finds signs in a file's syntax tree that it was written for an old release of torch.

A sign counts only if current torch may reject the call or lacks the name: `batch_size=args.batch_size / n`,
but not `int(args.batch_size / n)`; an import of `torch._six`, but not one whose ImportError is caught. The source
does not show values, such as the path in `"file://{}".format(path)` or the contents of a checkpoint: those changes are
announced when a call occurs that torch rejects (`needs.SAID_AT_USE`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.compat.legacy.sources import docstrings, dotted_name, keyword_of, name_of

__all__ = ["MODULES", "OLD_FILE_URL", "Signs", "signs_in"]

OLD_FILE_URL = re.compile(r"file://[^/?]+(\?.*)?")
"""A rendezvous file without a folder."""

MODULES = ("torch._six", "torch.cuda.comm", "torch.distributed.deprecated", "torch.nn.parallel.deprecated")
_LAST_PARTS = frozenset(module.rpartition(".")[2] for module in MODULES)
_MULTIGPU = re.compile(r"(all_reduce|broadcast|reduce|all_gather|reduce_scatter)_multigpu")
_BATCH_SIZE = re.compile(r"(.*_)?(batch_?size|bsz?)", re.IGNORECASE)
_SCHEDULERS = frozenset(
    {
        "ChainedScheduler",
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LambdaLR",
        "LinearLR",
        "MultiStepLR",
        "MultiplicativeLR",
        "OneCycleLR",
        "PolynomialLR",
        "ReduceLROnPlateau",
        "SequentialLR",
        "StepLR",
    }
)
_SCHEDULER_BASE = re.compile(r"_?LRScheduler|" + "|".join(sorted(_SCHEDULERS)))
_CATCHING = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})

_Found = Iterator[tuple[str, int]]


@dataclass(frozen=True)
class Signs:
    """The signs in a file.

    Attributes:
        needs: names of changes to torch, each with the line that shows it.
        calls_init_process_group: whether it calls that function.
    """

    needs: tuple[tuple[str, int], ...]
    calls_init_process_group: bool


def signs_in(tree: ast.Module) -> Signs:
    """Find the signs in a syntax tree. Pure."""
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    finders: tuple[Callable[[list[ast.AST], list[ast.Call]], _Found], ...] = (
        _old_modules,
        _old_functions,
        _old_backends,
        _float_batch_arguments,
        _float_batch_variables,
        _samplers_with_data,
        _views_of_eq,
        _verbose_schedulers,
        _bare_loads,
    )
    needs = tuple(found for finder in finders for found in finder(nodes, calls))
    return Signs(needs, any(name_of(call.func) == "init_process_group" for call in calls))


# ---- names that torch lacks ------------------------------------------------------------------------


def _old_modules(nodes: list[ast.AST], _: list[ast.Call]) -> _Found:
    guarded = _inside_guarded_imports(nodes)
    for node in nodes:
        names = [] if id(node) in guarded else _full_names(node)
        for module in MODULES:
            if any(f"{name}.".startswith(f"{module}.") for name in names):
                yield module, getattr(node, "lineno", 0)


def _inside_guarded_imports(nodes: list[ast.AST]) -> set[int]:
    """The ids of all nodes in a `try` whose handlers catch missing modules."""
    return {
        id(node)
        for attempt in nodes
        if isinstance(attempt, ast.Try) and any(map(_catches_missing_module, attempt.handlers))
        for statement in attempt.body
        for node in ast.walk(statement)
    }


def _full_names(node: ast.AST) -> list[str]:
    """The dotted names of an import, or of an attribute with the name of an old module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute) and node.attr in _LAST_PARTS:
        return [dotted_name(node)]
    return []


def _catches_missing_module(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or name_of(kind) in _CATCHING for kind in kinds)


def _old_functions(nodes: list[ast.AST], _: list[ast.Call]) -> _Found:
    aliases = _aliases_of_distributed(nodes)
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute) and dotted_name(node.value) in aliases:
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            names = [alias.name for alias in node.names]
        for name in names:
            if _MULTIGPU.fullmatch(name):
                yield "multigpu", getattr(node, "lineno", 0)
            elif name == "reduce_op":
                yield "reduce_op", getattr(node, "lineno", 0)
            elif name in ("_backend", "dist_backend"):
                yield "dist_backend", getattr(node, "lineno", 0)


def _aliases_of_distributed(nodes: list[ast.AST]) -> set[str]:
    """The names of the package torch.distributed in a file."""
    aliases = {"torch.distributed"}
    for node in nodes:
        if isinstance(node, ast.Import):
            aliases |= {each.asname for each in node.names if each.asname and each.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {each.asname or each.name for each in node.names if each.name == "distributed"}
    return aliases


# ---- calls that torch rejects ----------------------------------------------------------------------


def _old_backends(nodes: list[ast.AST], calls: list[ast.Call]) -> _Found:
    for call in calls:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if _takes_backend(call) and any(map(_is_tcp, values)):
            yield "init_process_group", call.lineno
    ignored = {id(node) for node in docstrings(nodes)}
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value) if _is_tcp(value):
                is_old = any("backend" in name_of(target).lower() for target in targets)
            case ast.Constant(value=str(text)) if id(node) not in ignored:
                is_old = OLD_FILE_URL.fullmatch(text) is not None
            case _:
                continue
        if is_old:
            yield "init_process_group", node.lineno


def _takes_backend(call: ast.Call) -> bool:
    """Whether a call has a backend as argument: `init_process_group`, or the declaration of an option for it."""
    function = name_of(call.func)
    texts = (str(each.value) for each in call.args if isinstance(each, ast.Constant))
    return function == "init_process_group" or (function == "add_argument" and any("backend" in text for text in texts))


def _is_tcp(node: object) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lower() == "tcp"


def _float_batch_arguments(_: list[ast.AST], calls: list[ast.Call]) -> _Found:
    for call in calls:
        given = [keyword_of(call, "batch_size")]
        if name_of(call.func) in ("DataLoader", "BatchSampler"):
            given += call.args[1:2]
        if any(value is not None and _is_float(value) for value in given):
            yield "batch_size", call.lineno
        is_option = any(isinstance(each, ast.Constant) and _is_batch_option(each.value) for each in call.args)
        kind = keyword_of(call, "type")
        if name_of(call.func) == "add_argument" and is_option and kind is not None and name_of(kind) == "float":
            yield "batch_size", call.lineno


def _float_batch_variables(nodes: list[ast.AST], _: list[ast.Call]) -> _Found:
    for node in nodes:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign) and _is_float(node.value):
            targets = node.targets
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            targets = [node.target]
        if any(_BATCH_SIZE.fullmatch(name_of(target)) for target in targets):
            yield "batch_size", getattr(node, "lineno", 0)


def _is_batch_option(value: object) -> bool:
    return isinstance(value, str) and _BATCH_SIZE.fullmatch(value.lstrip("-").replace("-", "_")) is not None


def _is_float(node: ast.expr) -> bool:
    """Whether an expression is a float, judging by its outermost operation."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "float"
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def _bare_loads(_: list[ast.AST], calls: list[ast.Call]) -> _Found:
    for call in calls:
        if dotted_name(call.func) == "torch.load" and keyword_of(call, "weights_only") is None:
            yield "load", call.lineno


def _samplers_with_data(nodes: list[ast.AST], _: list[ast.Call]) -> _Found:
    for kind in nodes:
        if not isinstance(kind, ast.ClassDef):
            continue
        bases = {name_of(base.value if isinstance(base, ast.Subscript) else base) for base in kind.bases}
        if "Sampler" not in bases:
            continue
        for call in _base_init_calls(kind, "Sampler"):
            of_self = 0 if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call) else 1
            if len(call.args) > of_self or call.keywords:
                yield "sampler", call.lineno


def _base_init_calls(kind: ast.ClassDef, base: str) -> Iterator[ast.Call]:
    """Calls of `super().__init__(…)` and `Base.__init__(self, …)` in a class."""
    for call in ast.walk(kind):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"):
            continue
        owner = call.func.value
        if (isinstance(owner, ast.Call) and name_of(owner.func) == "super") or name_of(owner) == base:
            yield call


def _views_of_eq(nodes: list[ast.AST], calls: list[ast.Call]) -> _Found:
    """Find `correct = pred.eq(…)` with `correct[:k].view(…)` anywhere in the file; or both in one expression."""
    compared = {
        name_of(target)
        for node in nodes
        if isinstance(node, ast.Assign) and _comes_from_eq(node.value)
        for target in node.targets
    } - {""}
    for call in calls:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "view"):
            continue
        inner = call.func.value
        while isinstance(inner, ast.Subscript):
            inner = inner.value
        if name_of(inner) in compared or _comes_from_eq(inner) or name_of(_start_of(inner)) in compared:
            yield "eq", call.lineno


def _comes_from_eq(node: ast.expr) -> bool:
    """Whether a chain of methods and slices, such as `a.eq(b)[:k].float()`, contains `eq`."""
    while isinstance(node, ast.Call | ast.Subscript | ast.Attribute):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "eq":
                return True
            node = node.func
        else:
            node = node.value
    return False


def _start_of(node: ast.expr) -> ast.expr:
    """The start of a chain: `correct` in `correct[:k].float()`."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return node


def _verbose_schedulers(nodes: list[ast.AST], calls: list[ast.Call]) -> _Found:
    for call in calls:
        if name_of(call.func) in _SCHEDULERS and keyword_of(call, "verbose") is not None:
            yield "verbose", call.lineno
    for kind in nodes:
        if isinstance(kind, ast.ClassDef) and (base := _scheduler_among(kind.bases)):
            for call in _base_init_calls(kind, base):
                if keyword_of(call, "verbose") is not None:
                    yield "verbose", call.lineno


def _scheduler_among(bases: list[ast.expr]) -> str | None:
    return next((name_of(base) for base in bases if _SCHEDULER_BASE.fullmatch(name_of(base))), None)
