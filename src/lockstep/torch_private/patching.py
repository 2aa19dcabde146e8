"""Replaces names of torch; the only module that does, except for rehearsals. Does not import torch by itself.

Every replaced name has a record in the table with `Use.PATCH` or `Use.ADD`. A name that torch lacks is not patched: one
warning says which feature is off, and torch is unchanged.

[Note: what the compiler knows] Dynamo has a list of functions of torch.distributed that it compiles in special ways,
made when the module with that list is first imported. A function that replaces a listed one takes over its entry, as if
it had been there then; otherwise Dynamo would trace into it, and fail at the listed one.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

from lockstep.torch_private.lookup import MISSING, owner_of, resolve, warn_missing
from lockstep.torch_private.record import Use
from lockstep.torch_private.table import record_of

__all__ = ["add", "add_module", "patch", "replace_attribute", "wrap", "wrap_once"]

_MARK = "knows_lockstep"
_LISTING = "torch.distributed._functional_collectives"


def patch(name: str, value: object, alias: str | None = None) -> bool:
    """Replace a name of torch by a value. Local.

    Args:
        name: full name; in the table with `Use.PATCH`.
        value: the new value.
        alias: another module that has imported the same object, such as "torch.distributed"; changed too, if it has.

    Returns:
        Whether it was done; False, and one warning, if torch has no such name.
    """
    record_of(name, Use.PATCH)
    owner, last = owner_of(name)
    original = MISSING if owner is MISSING else getattr(owner, last, MISSING)
    if original is MISSING:
        warn_missing(name)
        return False
    setattr(owner, last, value)
    _take_entry(original, value)
    package = None if alias is None else sys.modules.get(alias)
    if package is not None and getattr(package, last, None) is original:
        setattr(package, last, value)
    return True


def _take_entry(original: object, value: object) -> None:
    """See [Note: what the compiler knows]. No warning, because older releases list fewer functions, or none."""
    name = f"{_LISTING}.traceable_collective_remaps"
    listed = resolve(name) if _LISTING in sys.modules else MISSING
    if isinstance(listed, dict) and inspect.isfunction(original) and original in listed:
        record_of(name, Use.PATCH)
        listed[value] = listed.pop(original)


def wrap(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], alias: str | None = None) -> bool:
    """Replace a function of torch by `make(original)`, keeping its name and docstring. Local.

    Args:
        name: as for `patch`.
        make: receives the current function and returns its replacement.
        alias: as for `patch`.

    Returns:
        As `patch`.
    """
    owner, last = owner_of(name)
    original = None if owner is MISSING else getattr(owner, last, None)
    return patch(name, None if original is None else functools.wraps(original)(make(original)), alias)


def wrap_once(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], alias: str | None = None) -> bool:
    """Like `wrap`, unless it was done before, even by another copy of this package. Local.

    If this torch lacks the name, there is nothing to wrap, and no warning: other releases have it.

    Returns:
        Whether it was done now.
    """
    owner, last = owner_of(name)
    original = None if owner is MISSING else getattr(owner, last, None)
    if original is None or hasattr(original, _MARK):
        return False

    def marked(found: Callable[..., Any]) -> Callable[..., Any]:
        made: Any = make(found)
        setattr(made, _MARK, True)
        return cast("Callable[..., Any]", made)

    return wrap(name, marked, alias)


def add(name: str, value: object) -> bool:
    """Add a name to torch, unless it exists. Local.

    Args:
        name: full name; in the table with `Use.ADD`.
        value: its value.

    Returns:
        Whether it was done.
    """
    record_of(name, Use.ADD)
    owner, last = owner_of(name)
    if owner is MISSING or hasattr(owner, last):
        return False
    setattr(owner, last, value)
    return True


def add_module(name: str, content: Mapping[str, Any], doc: str) -> bool:
    """Add a module to torch, unless it exists. Local.

    Args:
        name: full name; in the table with `Use.ADD`.
        content: its names.
        doc: its docstring.

    Returns:
        Whether it was done.
    """
    record_of(name, Use.ADD)
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return False
    module = ModuleType(name, doc)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(content)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, module)
    return True


def replace_attribute(owner: Any, name: str, value: object) -> None:
    """Replace an attribute of a module that the user has named, or restore it. Local.

    For Apex's amp, whose users register functions of any module to be cast.
    """
    setattr(owner, name, value)
