"""Who only asks whether a package is installed, by `importlib.util.find_spec`.

[Note: who only asks] Apex is a choice of many programs, and `find_spec("apex") is not None` makes it. Told yes, a
program takes another way than it takes without Lockstep: other optimizers, other layers, its own branch for Apex, which
nobody may have run for years. So it is told no, as under `python`, and with `--compat` yes. One that insists on Apex
ends with an error then, and a line that names `--compat`. An import finds the shim whatever was asked before.
"""

from __future__ import annotations

import re
import sys
import traceback
from types import FrameType

from lockstep import env

__all__ = ["hears_no", "hint_for_told"]

_IMPORTERS = ("importlib._bootstrap", "_frozen_importlib")
_ASKERS = ("importlib.util", "pkgutil")
_told: set[str] = set()


def hears_no(package: str, depth: int) -> bool:
    """Whether a finder is merely being asked about a package that is not installed, and must not find it. Local.

    Args:
        package: a top package.
        depth: how many callers of this function belong to the finder.
    """
    if env.LOCKSTEP_COMPAT.get() or not _is_asked(sys._getframe(depth + 1)):
        return False
    _told.add(package)
    return True


def _is_asked(frame: FrameType | None) -> bool:
    """Whether `find_spec` stands above a finder's frame, and not an import."""
    while frame is not None and frame.f_globals.get("__name__") in _IMPORTERS:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in _ASKERS


def hint_for_told(error: BaseException) -> str | None:
    """The package that an error names, or the line that raised it, if somebody was told that it is not there. Local."""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    words = set(re.findall(r"[a-z0-9]+", " ".join([str(error), *lines]).lower()))
    return next((package for package in _told if package in words), None)
