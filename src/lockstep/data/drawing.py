"""Whether the code of a dataset is known to draw no random numbers.

Many datasets only look up: `return self.images[index], self.labels[index]`. Seeding the process-wide generators before
each of their samples takes longer than the samples.

[Note: code that cannot draw] `__getitem__` is read once for each class, as a syntax tree. It may assign and return
expressions of the index, constants, attributes of the dataset, operators, lookups and a few calls, all of which run no
code of the user's as long as what they are applied to is a number, a tensor or an array. Of which attributes that has
to hold is the answer for the class; whether it does is looked up for each batch, since a script may assign attributes
at any time. Whatever the tree has besides means that nothing is known, and so does a tree that does not compile to the
code that runs, since a file may have changed after it was imported.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

__all__ = ["only_looks_up"]

_PLAIN = (torch.Tensor, np.ndarray, np.memmap, int, float, bool, str, bytes, range, type(None))
_CONTAINERS = (*_PLAIN, list, tuple, dict)
_BUILTINS = frozenset({"abs", "bool", "dict", "float", "int", "len", "list", "tuple"})
_FUNCTIONS = {
    torch: frozenset({"as_tensor", "asarray", "from_numpy", "tensor"}),
    np: frozenset({"array", "asarray", "float32", "float64", "int32", "int64"}),
}
_METHODS = frozenset(
    {
        *("astype", "bool", "double", "float", "half", "int", "long", "to"),
        *("clone", "contiguous", "copy", "item", "numpy"),
        *("flatten", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view"),
    }
)
_OPERATIONS = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Slice, ast.UnaryOp)


@dataclass
class _Demands:
    """What has to hold of a dataset's attributes, by their names.

    Attributes:
        plain: those that must be numbers, tensors, arrays or texts: something is done with them, or with their items.
        containers: those that may be lists, tuples or dictionaries as well: their items are handed on as they are.
        any: those that are only handed on.
        none: those that must be None: what happens otherwise was not read.
    """

    plain: set[str] = field(default_factory=set)
    containers: set[str] = field(default_factory=set)
    any: set[str] = field(default_factory=set)
    none: set[str] = field(default_factory=set)

    def hold(self, dataset: Any) -> bool:
        """Whether they hold of this dataset now."""
        values = getattr(dataset, "__dict__", {})
        return (
            all(name in values for name in self.any)
            and all(values.get(name, self) is None for name in self.none)
            and all(type(values.get(name, self)) in _CONTAINERS for name in self.containers)
            and all(_is_plain(values.get(name, self)) for name in self.plain)
        )

    @property
    def names(self) -> set[str]:
        """All these attributes."""
        return self.plain | self.containers | self.any | self.none


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN and not (isinstance(value, np.ndarray) and value.dtype.hasobject)


def only_looks_up(dataset: Any, indices: Sequence[Any]) -> bool:
    """Whether `dataset[index]` is known to draw nothing for these indices; False when in doubt.

    See [Note: code that cannot draw].
    """
    kind: Any = type(dataset)
    demands = _demands(kind, getattr(kind, "__getitem__", None))
    return demands is not None and all(type(index) is int for index in indices) and demands.hold(dataset)


@lru_cache(maxsize=256)
def _demands(kind: Any, getitem: Any) -> _Demands | None:
    """What has to hold of the attributes of a dataset of this class; None if nothing is known of its code."""
    if not isinstance(getitem, FunctionType) or kind.__getattribute__ is not object.__getattribute__:
        return None
    tree = _tree_of(getitem.__code__)
    if tree is None:
        return None
    try:
        reader = _Reader(tree, getitem.__globals__)
        reader.read()
    except _NotKnownError:
        return None
    # What is an attribute of the class, too, may be a property: code.
    is_shadowed = any(name in vars(base) for base in kind.__mro__ for name in reader.demands.names)
    return None if is_shadowed else reader.demands


def _tree_of(code: CodeType) -> ast.FunctionDef | None:
    """The syntax tree of a function of (self, index), if it is that of the code that runs."""
    try:
        text = "".join(inspect.findsource(code)[0])
        tree = ast.parse(text)
        if not _contains(compile(text, code.co_filename, "exec", dont_inherit=True), code):
            return None
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.lineno == code.co_firstlineno and node.name == code.co_name:
            return node
    return None


def _contains(module: CodeType, code: CodeType) -> bool:
    inner = [one for one in module.co_consts if isinstance(one, CodeType)]
    return code in inner or any(_contains(one, code) for one in inner)


class _NotKnownError(Exception):  # never leaves the module
    """The code has something of which nothing is known."""


class _Reader:
    """Reads the syntax tree of a `__getitem__`. Raises `_NotKnownError` at what is not known to draw nothing.

    Args:
        tree: the function.
        names: its global names.

    Attributes:
        demands: what has to hold of the attributes of the dataset.
    """

    def __init__(self, tree: ast.FunctionDef, names: dict[str, Any]) -> None:
        arguments = tree.args
        if len(arguments.args) != 2 or arguments.vararg or arguments.kwonlyargs or arguments.kwarg:
            raise _NotKnownError
        self._dataset, self._index = (argument.arg for argument in arguments.args)
        self._body = tree.body
        self._names = names
        self._locals: dict[str, Callable[[bool], None]] = {self._index: lambda is_used: None}
        self.demands = _Demands()

    def read(self) -> None:
        """Read the whole function."""
        for statement in self._body:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Return(value=None):
                pass
            case ast.Return(value=ast.expr() as value):
                self._value(value, is_used=False)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in (self._dataset, self._index):
                self._assign(name, value)
            case ast.If(test=test, body=_, orelse=[]) if (attribute := self._optional(test)) is not None:
                self.demands.none.add(attribute)
            case _:
                raise _NotKnownError

    def _assign(self, name: str, value: ast.expr) -> None:
        before = dict(self._locals)  # the names that the value speaks of
        self._value(value, is_used=False)

        def use(is_used: bool) -> None:
            now, self._locals = self._locals, before
            try:
                self._value(value, is_used)
            finally:
                self._locals = now

        self._locals[name] = use

    def _optional(self, test: ast.expr) -> str | None:
        """The attribute that a statement asks to be not None, as in `if self.transform is not None:`."""
        match test:
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return self._attribute(left)
        return self._attribute(test)

    def _attribute(self, node: ast.expr) -> str | None:
        """The name of an attribute of the dataset; None if it is something else."""
        match node:
            case ast.Attribute(value=ast.Name(id=self._dataset), attr=name):
                return name
        return None

    def _value(self, node: ast.expr, is_used: bool) -> None:
        """Read an expression; `is_used`: something is done with its value, which therefore has to be plain."""
        name = self._attribute(node)
        if name is not None:
            (self.demands.plain if is_used else self.demands.any).add(name)
            return
        match node:
            case ast.Constant():
                pass
            case ast.Name(id=name) if name in self._locals:
                self._locals[name](is_used)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                for item in items:
                    self._value(item, is_used)
            case ast.Dict(keys=keys, values=values):
                for item in values:
                    self._value(item, is_used)
                for key in keys:
                    self._used(key)
            case ast.Subscript(value=value, slice=place):
                container = self._attribute(value)
                if container is not None and not is_used:
                    self.demands.containers.add(container)
                else:
                    self._used(value)
                self._used(place)
            case ast.Call(func=function, args=values, keywords=keywords):
                self._called(function)
                for item in (*values, *(keyword.value for keyword in keywords)):
                    if not self._is_dtype(item):
                        self._used(item)
            case _ if isinstance(node, _OPERATIONS):
                for part in ast.iter_child_nodes(node):
                    if isinstance(part, ast.expr):
                        self._used(part)
            case _:
                raise _NotKnownError

    def _used(self, node: ast.expr | None) -> None:
        if node is None:
            raise _NotKnownError
        self._value(node, is_used=True)

    def _called(self, function: ast.expr) -> None:
        match function:
            case ast.Name(id=name) if name in _BUILTINS and name not in self._locals:
                if self._names.get(name, getattr(builtins, name)) is not getattr(builtins, name):
                    raise _NotKnownError
            case ast.Attribute(value=ast.Name(id=module), attr=name) if self._module(module) is not None:
                if name not in _FUNCTIONS[self._module(module)]:
                    raise _NotKnownError
            case ast.Attribute(value=value, attr=name) if name in _METHODS:
                self._used(value)
            case _:
                raise _NotKnownError

    def _module(self, name: str) -> Any:
        """torch or numpy, if that is what a global name stands for."""
        found = self._names.get(name)
        return found if name not in self._locals and any(found is module for module in _FUNCTIONS) else None

    def _is_dtype(self, node: ast.expr) -> bool:
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if self._module(module) is not None:
                found = getattr(self._module(module), name, None)
                return isinstance(found, torch.dtype) or (isinstance(found, type) and issubclass(found, np.generic))
        return False
