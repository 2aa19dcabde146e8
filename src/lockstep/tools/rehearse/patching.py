"""How names of torch are replaced in a rehearsing process.

Rehearsals replace much of torch, and only in processes of their own; the one record for all of it is in
`lockstep.torch_private`, which does what the rest of the package replaces.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["replace", "wrap", "wrap_everywhere"]


def replace(owner: object, name: str, value: object) -> None:
    """Put `value` in the place of `owner.name`, which need not exist."""
    original = getattr(owner, name, None)
    setattr(owner, name, value)
    _tell_script(original, value)


def wrap(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(original)` in the place of the function `owner.name`. Nothing happens where there is none.

    Args:
        owner: a module or a class.
        name: name of the function.
        make: gets the function that is there and returns the one to put there; it keeps its name and docstring.
    """
    original = getattr(owner, name, None)
    if original is None:
        return
    replacement = make(original)
    functools.update_wrapper(replacement, original, assigned=("__name__", "__qualname__", "__doc__", "__module__"))
    setattr(owner, name, replacement)
    _tell_script(original, replacement)


def wrap_everywhere(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """`wrap`, also in the modules of torch that have taken the function over by name."""
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
    """Let `torch.jit.script` compile the replacement of an operator to the operator, as it would the original.

    TorchScript knows operators by the identity of the functions that stand for them in Python.
    """
    builtins = sys.modules.get("torch.jit._builtins")
    if builtins is not None:
        table = builtins._get_builtin_table()
        if id(original) in table:
            table[id(replacement)] = table[id(original)]
