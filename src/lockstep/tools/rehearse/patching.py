"""Replaces names of torch in a rehearsing process.

A rehearsal replaces much of torch, but only in processes started for it. `lockstep.torch_private` has one record for
all of this, and makes the replacements of the rest of the package itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["replace", "wrap", "wrap_everywhere"]


def replace(owner: object, name: str, value: object) -> None:
    """Set `owner.name`, which need not exist, to `value`."""
    original = getattr(owner, name, None)
    setattr(owner, name, value)
    _tell_script(original, value)


def wrap(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function `owner.name` by `make(original)`. Does nothing if there is no such function.

    Args:
        owner: a module or a class.
        name: name of the function.
        make: gets the original and returns its replacement, which is given the original's name and docstring.
    """
    original = getattr(owner, name, None)
    if original is None:
        return
    replacement = make(original)
    functools.update_wrapper(replacement, original, assigned=("__name__", "__qualname__", "__doc__", "__module__"))
    setattr(owner, name, replacement)
    _tell_script(original, replacement)


def wrap_everywhere(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """`wrap`, also in modules of torch that have imported the function by name."""
    original = getattr(owner, name, None)
    wrap(owner, name, make)
    for module_name, module in list(sys.modules.items()):
        if (
            original is not None
            and module_name.startswith("torch.")
            and getattr(module, "__dict__", {}).get(name) is original
        ):
            setattr(module, name, getattr(owner, name))


def _tell_script(original: object, replacement: object) -> None:
    """Let `torch.jit.script` compile the replacement of an operator to that operator.

    TorchScript looks operators up by the identity of their Python functions.
    """
    builtins = sys.modules.get("torch.jit._builtins")
    if builtins is not None:
        table = builtins._get_builtin_table()
        if id(original) in table:
            table[id(replacement)] = table[id(original)]
