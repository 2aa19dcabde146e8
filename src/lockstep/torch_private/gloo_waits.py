"""Ends a wait for a send or receive of Gloo from another thread.

[Note: waits that no error ends] When a connection breaks, Gloo wakes the threads that wait for a transfer which has not
begun, and forgets the one that was in the middle of its bytes: a thread that waits for that one waits for ever. The
class of such transfers has a method that ends the wait, and torch does not hand it to Python. So it is called where the
library has it, after a look whether the object is one of that class: its first word says so.
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
_VALUE_OFFSET = object.__basicsize__  # of the pointer to the C++ object, in an object of pybind11
_FUNCTIONS_OFFSET = 2 * ctypes.sizeof(ctypes.c_void_p)  # of what objects point to, in the table of their class


def end_wait(work: Any) -> bool:
    """End the wait of another thread for this work: `work.wait` returns False there. Local.

    Args:
        work: what `send` or `recv` of torch's ProcessGroupGloo returned, whose connection is gone.

    Returns:
        Whether it could be done.
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
    """Whether this torch has what ends a wait."""
    return len(_aborts()) == len(_CLASSES)


@functools.cache
def _aborts() -> dict[int, Callable[[int], None]]:
    """What ends a wait, by the first word of the objects that it is for; empty where torch has another form."""
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
