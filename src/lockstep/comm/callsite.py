"""Where in the user's code something happened.

[Note: frames] Python makes the object of a frame when somebody asks for it, which costs more than all else here. So one
frame is asked for, where a call by `torch.distributed` has its user; the user's own lives through many
calls and is there already. An instruction of the user's that once led straight to a collective from there
is taken to do so again. Only if it is not known does a search go through all frames.
"""

from __future__ import annotations

import functools
import sys
import traceback
from types import CodeType, FrameType

from lockstep.frames import is_internal_file

__all__ = ["CallSite", "call_site", "describe_exception", "is_users", "site_text"]

CallSite = tuple[str, int, str]
"""File, line and name of the function. No code object: hashing one reads all of its bytecode."""

_UNKNOWN: CallSite = ("", 0, "")
_SITE_BYTES = 250
# This function, the engine's `_submit` and its verb, the group's verb, torch's function, its wrapper, the user.
_USUAL_DEPTH = 6
_MAX_KNOWN = 4096
_known: dict[tuple[CodeType, int], CallSite] = {}
_getframe = sys._getframe
# By name of file, once each: a name is compared by identity, mostly.
_users_files: set[str] = set()
_internal_files: set[str] = set()


@functools.lru_cache(maxsize=4096)
def is_users(code: CodeType) -> bool:
    """Whether it is the user's code, neither Lockstep's nor torch's."""
    return not is_internal_file(code.co_filename)


def call_site() -> CallSite:
    """The innermost frame of the user's code that led here. See [Note: frames]."""
    try:
        frame = _getframe(_USUAL_DEPTH)
    except ValueError:
        return _search()[0]
    known = _known.get((frame.f_code, frame.f_lasti))
    return known or _learn(frame)


def _learn(usual: FrameType) -> CallSite:
    site, found = _search()
    if found is usual:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[usual.f_code, usual.f_lasti] = site
    return site


def _search() -> tuple[CallSite, FrameType | None]:
    """The site and its frame, from the caller of this function's caller on."""
    frame: FrameType | None = _getframe(2)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file not in _internal_files:
            if file in _users_files:
                return (file, frame.f_lineno, code.co_name), frame
            (_internal_files if is_internal_file(file) else _users_files).add(file)
            continue
        frame = frame.f_back
    return _UNKNOWN, None


def site_text(site: CallSite) -> str:
    """`train.py:81 in main`, cut at the front of the path to at most 250 bytes of UTF-8."""
    path, line, name = site
    if site == _UNKNOWN:
        return "an unknown line"
    tail = f":{line} in {name}"
    room = _SITE_BYTES - len(tail.encode(errors="replace"))
    data = path.encode(errors="replace")
    if len(data) <= room:
        return path + tail
    kept = data[-max(room - len("…".encode()), 0) :].decode(errors="ignore")
    return f"…{kept}{tail}"


def describe_exception(error: BaseException) -> str:
    """`raised ValueError: text at train.py:81 in main`, with the innermost line of the user's own code."""
    first_line = next(iter(str(error).splitlines()), "")
    text = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_internal_file(frame.filename)]
    for frame in reversed(own or list(frames)):
        return f"raised {text} at {frame.filename}:{frame.lineno} in {frame.name}"
    return f"raised {text}"
