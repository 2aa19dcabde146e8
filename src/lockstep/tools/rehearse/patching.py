"""How names of torch are replaced in a rehearsing process.

Rehearsals replace much of torch, and only in processes of their own; the one record for all of it is in
`lockstep.torch_private`, which does what the rest of the package replaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["replace", "wrap"]


def replace(owner: object, name: str, value: object) -> None:
    """Put `value` in the place of `owner.name`, which need not exist."""
    setattr(owner, name, value)


def wrap(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(original)` in the place of the function `owner.name`. Nothing happens where there is none.

    Args:
        owner: a module or a class.
        name: of the function.
        make: gets the function that is there and returns the one to put there; it keeps its name and docstring.
    """
    original = getattr(owner, name, None)
    if original is None:
        return
    replacement = make(original)
    functools.update_wrapper(replacement, original, assigned=("__name__", "__qualname__", "__doc__", "__module__"))
    setattr(owner, name, replacement)
