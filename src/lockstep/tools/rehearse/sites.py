"""Where in the user's code something happened, and the lines that called it.

[Note: whose call] Frames of installed libraries (Accelerate, Fabric, …) are skipped: a chain begins at the user's line
that called them. The user is only held responsible for the arguments of a call (`weights_only`), and for making it at
all (a scheduler's step), if `is_own(frame)` holds for its direct caller.
"""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType

from lockstep.comm.callsite import is_users
from lockstep.frames import is_library_file, library_folders
from lockstep.tools.rehearse.line import Site

__all__ = ["chain", "is_own", "is_own_file", "site"]

_MAX_DEPTH = 4


@functools.lru_cache(maxsize=4096)
def is_own_file(name: str) -> bool:
    """Whether a name is that of a real file that does not belong to an installed library.

    A script that has itself been installed counts as the user's, and so do the files in its folder.
    """
    if name.startswith("<"):
        return False
    folders = library_folders()
    if not is_library_file(name, folders):
        return True
    script = os.path.abspath(sys.argv[0])
    return is_library_file(script, folders) and os.path.dirname(name) == os.path.dirname(script)


def is_own(frame: FrameType) -> bool:
    """Whether this frame's code is the user's, not torch's, Lockstep's or an installed library's."""
    return is_users(frame.f_code) and is_own_file(frame.f_code.co_filename)


def chain(depth: int = _MAX_DEPTH) -> tuple[Site, ...]:
    """The last `depth` lines of the user's code on the stack, innermost first."""
    found: list[Site] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < depth:
        if is_own(frame):
            found.append(Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def site() -> Site | None:
    """The innermost line of the user's code on the stack, or None."""
    found = chain(1)
    return found[0] if found else None
