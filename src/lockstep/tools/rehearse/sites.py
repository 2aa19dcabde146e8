"""Where in the user's code something happened, and who called that.

[Note: whose call] What installed libraries (Accelerate, Fabric, …) do is theirs: a chain skips their frames and begins
at the user's line that called them. What a call was given (`weights_only`), and that it was made at all (a step of a
scheduler), concerns the user only where `is_own(frame)` of its direct caller.
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
    """Whether a file is neither an installed library's nor none at all.

    A script that has itself been installed is the user's all the same, and what lies beside it.
    """
    if name.startswith("<"):
        return False
    folders = library_folders()
    if not is_library_file(name, folders):
        return True
    script = os.path.abspath(sys.argv[0])
    return is_library_file(script, folders) and os.path.dirname(name) == os.path.dirname(script)


def is_own(frame: FrameType) -> bool:
    """Whether the user wrote this frame's code: neither torch's, Lockstep's nor an installed library's."""
    return is_users(frame.f_code) and is_own_file(frame.f_code.co_filename)


def chain(depth: int = _MAX_DEPTH) -> tuple[Site, ...]:
    """The innermost lines of the user's code that led here, the innermost first."""
    found: list[Site] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < depth:
        if is_own(frame):
            found.append(Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def site() -> Site | None:
    """The innermost of them, or None."""
    found = chain(1)
    return found[0] if found else None
