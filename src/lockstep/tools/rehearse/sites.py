"""Where in the user's code something happened, and who called that."""

from __future__ import annotations

import sys
from types import FrameType

from lockstep.comm.callsite import is_users
from lockstep.tools.rehearse.line import Site

__all__ = ["chain", "site"]

_MAX_DEPTH = 4


def chain(depth: int = _MAX_DEPTH) -> tuple[Site, ...]:
    """The innermost lines of the user's code that led here, the innermost first."""
    found: list[Site] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if is_users(code) and not code.co_filename.startswith("<") and "/lib/python" not in code.co_filename:
            found.append(Site(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


def site() -> Site | None:
    """The innermost of them, or None."""
    found = chain(1)
    return found[0] if found else None
