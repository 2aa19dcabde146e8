"""Whether the code of a dataset is known to draw no random numbers.

Many datasets only look up: `return self.images[index], self.labels[index]`. Seeding the process-wide generators before
each of their samples takes longer than the samples.

[Note: code that cannot draw] `__getitem__` is read once for each class, as a syntax tree. It may assign and return
expressions of the index, constants, attributes of the dataset, operators, lookups and a few calls, all of which run no
code of the user's as long as what they are applied to is a number, a tensor or an array. Of which attributes that has
to hold is kept for the code; whether it does is looked up for each batch, and so is everything else that a script may
change at any time: attributes of the class, global names, the function's code (notebooks that reload a module put new
code into the functions that are there). Whatever the tree has besides means that nothing is known, and so does a tree
that does not compile to the code that runs, since a file may have changed after it was imported.
"""

from __future__ import annotations

import ast
import linecache
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

__all__ = ["are_indices", "is_plain_sample", "only_looks_up"]

_PLAIN = (torch.Tensor, np.ndarray, np.memmap, int, float, bool, str, bytes, range, type(None))
_NUMPYS_NUMBERS = (np.int64, np.int32, np.float64, np.float32, np.uint8, np.bool_)
_INDICES = (int, np.int64, np.int32)
# By identity: a metaclass may say of its classes that they equal others.
_ALWAYS_PLAIN = frozenset(map(id, (int, float, bool, str, bytes, range, type(None))))
_BUILTINS: dict[str, Any] = {one.__name__: one for one in (abs, bool, dict, float, int, len, list, tuple)}
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
_MAX_TEXT = 512 << 10  # characters of a source file; it is read once in each process that fetches samples
_MAX_KNOWN = 256  # functions
_OPERATIONS = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Slice, ast.UnaryOp)


@dataclass
class _Demands:
    """What has to hold of a dataset's attributes, by their names.

    Attributes:
        plain: those that must be numbers, tensors, arrays or texts: something is done with them, or with their items.
        containers: those that may be lists, tuples or dictionaries as well: their items are handed on as they are.
        any: those that are only handed on.
        none: those that must be None: what happens otherwise was not read.
        globals: the global names that were read, with what they stand for.
    """

    plain: set[str] = field(default_factory=set)
    containers: set[str] = field(default_factory=set)
    any: set[str] = field(default_factory=set)
    none: set[str] = field(default_factory=set)
    globals: dict[str, Any] = field(default_factory=dict)

    def hold(self, dataset: Any, getitem: FunctionType) -> bool:
        """Whether they hold of this dataset and its method now."""
        values = getattr(dataset, "__dict__", {})
        return (
            values.keys() >= self.names
            # What is an attribute of the class, too, may be a property: code.
            and all(vars(base).keys().isdisjoint(self.names) for base in type(dataset).__mro__)
            and all(_global(getitem, name) is meant for name, meant in self.globals.items())
            and all(values[name] is None for name in self.none)
            and all(_is_plain(values[name]) or _is_container(values[name]) for name in self.containers)
            and all(_is_plain(values[name]) for name in self.plain)
        )

    @cached_property
    def names(self) -> set[str]:
        """All these attributes, once the code is read."""
        return self.plain | self.containers | self.any | self.none


def _is_one_of(kind: type, kinds: Sequence[type]) -> bool:
    return any(kind is one for one in kinds)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if id(kind) in _ALWAYS_PLAIN:
        return True
    if kind is torch.Tensor:
        return not vars(value)  # which may be a method that somebody has put there
    return _is_one_of(kind, _PLAIN) and not (isinstance(value, np.ndarray) and value.dtype.hasobject)


def _is_container(value: Any) -> bool:
    return _is_one_of(type(value), (list, tuple, dict))


def _global(function: Any, name: str) -> Any:
    return function.__globals__.get(name, function.__builtins__.get(name))


def are_indices(values: Sequence[Any]) -> bool:
    """Whether these are whole numbers, and no objects with code of their own."""
    return all(_is_one_of(kind, _INDICES) for kind in set(map(type, values)))


def is_plain_sample(sample: Any) -> bool:
    """Whether a sample is made of numbers, tensors, arrays and texts alone: collating it runs no code of the user's."""
    if _is_plain(sample):
        return True
    if type(sample) is dict:
        return all(type(key) is str and is_plain_sample(value) for key, value in sample.items())
    if _is_container(sample):
        return all(map(is_plain_sample, sample))
    return _is_one_of(type(sample), _NUMPYS_NUMBERS)


def only_looks_up(dataset: Any, indices: Sequence[Any]) -> bool:
    """Whether `dataset[index]` is known to draw nothing for these indices; False when in doubt.

    See [Note: code that cannot draw].
    """
    kind: Any = type(dataset)
    # Not by getattr: a descriptor may show the class another function than it shows an instance.
    getitem = next((vars(base)["__getitem__"] for base in kind.__mro__ if "__getitem__" in vars(base)), None)
    if type(getitem) is not FunctionType or kind.__getattribute__ is not object.__getattribute__:
        return False
    demands = _demands(getitem)
    return demands is not None and are_indices(indices) and demands.hold(dataset, getitem)


# By the identity of the code, which is kept alive with it: a function would keep alive what its closure holds.
_known: dict[int, tuple[CodeType, _Demands | None]] = {}


def _demands(getitem: FunctionType) -> _Demands | None:
    """What has to hold for a dataset with this method; None if nothing is known of its code."""
    code = getitem.__code__
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        known = _known[id(code)] = code, _read(getitem)
    return known[1]


def _read(getitem: FunctionType) -> _Demands | None:
    if getitem.__code__.co_freevars:
        return None
    try:
        tree = _tree_of(getitem)
        if tree is None:
            return None
        reader = _Reader(tree, getitem)
        reader.read()
    except (_NotKnownError, OSError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError, SystemError):
        return None  # SystemError: Python 3.11, where a garbage collection within ast.parse upsets its count of calls
    return reader.demands


def _tree_of(getitem: FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a function of (self, index), if it is that of the code that runs."""
    code = getitem.__code__
    # Not by `inspect`, which asks every imported module for its file, and so wakes up those that load lazily.
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, getitem.__globals__))
    if not 0 < len(text) <= _MAX_TEXT:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The import has given them.
        tree = ast.parse(text)
        if not _contains(compile(text, code.co_filename, "exec", dont_inherit=True), code):
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


def _operands(node: ast.expr) -> Iterator[ast.expr]:
    return (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))


class _Reader:
    """Reads the syntax tree of a `__getitem__`. Raises `_NotKnownError` at what is not known to draw nothing.

    Args:
        tree: the function.
        getitem: the same, as it runs.

    Attributes:
        demands: what has to hold of the attributes of the dataset.
    """

    def __init__(self, tree: ast.FunctionDef, getitem: FunctionType) -> None:
        arguments = tree.args
        others = (arguments.posonlyargs, arguments.vararg, arguments.kwonlyargs, arguments.kwarg)
        if len(arguments.args) != 2 or any(others):
            raise _NotKnownError
        self._dataset, self._index = (argument.arg for argument in arguments.args)
        self._body = tree.body
        self._getitem = getitem
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
        is_read = False

        def use(is_used: bool) -> None:
            nonlocal is_read
            if is_read or not is_used:
                return
            is_read = True  # Once: `x = x * x` some times over would be read 2^n times.
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
            case ast.Subscript():
                self._subscript(node, is_used)
            case ast.Call():
                self._call(node)
            case _ if isinstance(node, _OPERATIONS):
                for part in _operands(node):
                    self._used(part)
            case _:
                raise _NotKnownError

    def _subscript(self, node: ast.Subscript, is_used: bool) -> None:
        container = self._attribute(node.value)
        if container is not None and not is_used:
            self.demands.containers.add(container)
        else:
            self._used(node.value)
        self._used(node.slice)

    def _call(self, node: ast.Call) -> None:
        self._called(node.func)
        for item in (*node.args, *(keyword.value for keyword in node.keywords)):
            if not self._is_dtype(item):
                self._used(item)

    def _used(self, node: ast.expr | None) -> None:
        if node is None:
            raise _NotKnownError
        self._value(node, is_used=True)

    def _called(self, function: ast.expr) -> None:
        match function:
            case ast.Name(id=name) if name in _BUILTINS and not self._is_local(name):
                if _global(self._getitem, name) is not _BUILTINS[name]:
                    raise _NotKnownError
                self.demands.globals[name] = _BUILTINS[name]
            case ast.Attribute(value=ast.Name(id=module), attr=name) if self._module(module) is not None:
                if name not in _FUNCTIONS[self._module(module)]:
                    raise _NotKnownError
            case ast.Attribute(value=value, attr=name) if name in _METHODS:
                self._used(value)
            case _:
                raise _NotKnownError

    def _module(self, name: str) -> Any:
        """torch or numpy, if that is what a global name stands for."""
        found = self._getitem.__globals__.get(name)
        if self._is_local(name) or not any(found is module for module in _FUNCTIONS):
            return None
        self.demands.globals[name] = found
        return found

    def _is_local(self, name: str) -> bool:
        return name in self._locals or name == self._dataset

    def _is_dtype(self, node: ast.expr) -> bool:
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if self._module(module) is not None:
                found = getattr(self._module(module), name, None)
                return isinstance(found, torch.dtype) or (isinstance(found, type) and issubclass(found, np.generic))
        return False
