"""Linux calls that Python does not provide, through the C library of this process.

This module can be imported on every system. A call that the system lacks raises `OSError` (ENOSYS), as in a sandbox
that refuses it, so that callers have one case to handle and not two.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import weakref
from typing import Any

__all__ = ["advise", "call", "die_with_parent", "foreign_system", "function", "map_memory", "own", "remap", "unmap"]

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_FAILED = ctypes.c_void_p(-1).value


def _load() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except TypeError:  # on Windows
        return None


_library = _load()


def foreign_system() -> str | None:
    """The usual name of this system, such as "macOS"; None on Linux. Local."""
    return {"linux": None, "darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)


def function(name: str) -> Any:
    """The C function of that name, or None if there is none. Local."""
    return getattr(_library, name, None)


def call(name: str, *values: Any) -> int:
    """Call a C function that returns an int, and return its result, including -1. Local.

    Raises:
        OSError: there is no such function (ENOSYS).
    """
    found = function(name)
    if found is None:
        raise OSError(errno.ENOSYS, f"no {name} on this system")
    return int(found(*values))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; check afterwards that the parent is still alive.

    Raises:
        OSError: the kernel refuses.
    """
    if call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def map_memory(address: int | None, size_bytes: int, protection: int, flags: int, fd: int, offset: int = 0) -> int:
    """mmap(2); returns the address of the memory.

    Raises:
        OSError: it cannot be mapped.
    """
    if _mmap is None:
        raise OSError(errno.ENOSYS, "no mmap on this system")
    return _checked(_mmap(address, size_bytes, protection, flags, fd, offset))


def remap(address: int, size_bytes: int, new_size_bytes: int, flags: int, new_address: int | None = None) -> int:
    """mremap(2); returns the new address of the memory.

    Raises:
        OSError: it cannot be remapped.
    """
    if _mremap is None:
        raise OSError(errno.ENOSYS, "no mremap on this system")
    return _checked(_mremap(address, size_bytes, new_size_bytes, flags, new_address))


def _checked(address: Any) -> int:
    if address in (None, _FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(address)


def own(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """A mapping as an object, kept alive by tensors and memoryviews of it; unmapped when the last of them is freed."""
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, unmap, address, size_bytes).atexit = False
    return memory


def unmap(address: int, size_bytes: int) -> None:
    """munmap(2) of what `map_memory` returned."""
    _munmap(address, size_bytes)


def advise(address: int, size_bytes: int, advice: int) -> bool:
    """madvise(2); returns whether it succeeded."""
    return _madvise is not None and int(_madvise(address, size_bytes, advice)) == 0


_mmap, _munmap, _madvise = function("mmap"), function("munmap"), function("madvise")
_mremap = function("mremap")
if _mmap is not None:
    _mmap.restype = ctypes.c_void_p
    _mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
if _mremap is not None:
    _mremap.restype = ctypes.c_void_p
    _mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
if _munmap is not None:
    _munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
