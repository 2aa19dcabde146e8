"""Ends a wait for a send or receive of Gloo from another thread.

[Note: waits that no error ends] When a connection breaks, Gloo wakes the threads that wait for a transfer which has not
begun, but not for the one that was in progress: a thread that waits for that one waits for ever. The class of such
transfers has a method that ends the wait, which torch does not expose to Python. So it is called at its address in the
library, after a check that the object is of that class: its first word says so.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["can_end_waits", "end_wait"]

_CLASSES = ("RecvWork", "SendWork")
_VALUE_OFFSET = object.__basicsize__  # of the pointer to the C++ object, in a pybind11 object
_FUNCTIONS_OFFSET = 2 * ctypes.sizeof(ctypes.c_void_p)  # of the entries to which objects point, in the vtable


def end_wait(work: Any) -> bool:
    """End the wait of another thread for this work: `work.wait` returns False there. Local.

    Args:
        work: the return value of `send` or `recv` of torch's ProcessGroupGloo, whose connection is gone.

    Returns:
        Whether this was possible.
    """
    if type(work) is not torch.distributed.Work:
        return False
    value = ctypes.c_void_p.from_address(id(work) + _VALUE_OFFSET).value
    if value is None:
        return False
    abort = _aborts().get(ctypes.c_void_p.from_address(value).value or 0)
    if abort is None:
        return False
    abort(value)
    return True


def can_end_waits() -> bool:
    """Whether this torch has the method that ends a wait."""
    return len(_aborts()) == len(_CLASSES)


@functools.cache
def _aborts() -> dict[int, Callable[[int], None]]:
    """The methods that end a wait, by the first word of their objects; empty if torch's layout differs."""
    found: dict[int, Callable[[int], None]] = {}
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        for name in _CLASSES:
            mangled = f"N4c10d16ProcessGroupGloo{len(name)}{name}"
            table = ctypes.addressof(ctypes.c_void_p.in_dll(library, f"_ZTV{mangled}E"))
            abort = getattr(library, f"_Z{mangled}5abortEv")
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[table + _FUNCTIONS_OFFSET] = abort
    except (OSError, ValueError, AttributeError):
        return {}
    return found
