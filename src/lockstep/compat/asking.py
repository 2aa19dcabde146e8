"""Recognizes programs that only check whether a package is installed, by `importlib.util.find_spec`.

[Note: who only asks] Many programs use Apex optionally, if `find_spec("apex") is not None`. If that found the shim, a
program would behave differently from without Lockstep: use other optimizers and layers, in a branch for Apex that
may not have run for years. So `find_spec` does not find it, as under plain `python`, unless with `--compat`. A program
that insists on Apex then fails, with a hint that names `--compat`. An import always finds the shim.
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
    """Whether a finder must hide a package, because the program only checks for it. Local.

    Args:
        package: name of a top-level package.
        depth: number of this function's callers that belong to the finder.
    """
    if env.LOCKSTEP_COMPAT.get() or not _is_asked(sys._getframe(depth + 1)):
        return False
    _told.add(package)
    return True


def _is_asked(frame: FrameType | None) -> bool:
    """Whether a finder was called by `find_spec` rather than by an import."""
    while frame is not None and frame.f_globals.get("__name__") in _IMPORTERS:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in _ASKERS


def hint_for_told(error: BaseException) -> str | None:
    """The package that an error, or the line that raised it, names, if it was hidden from a check. Local."""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    words = set(re.findall(r"[a-z0-9]+", " ".join([str(error), *lines]).lower()))
    return next((package for package in _told if package in words), None)
