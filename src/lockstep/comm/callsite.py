"""Where in the user's code something happened."""

from __future__ import annotations

import functools
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["CallSite", "call_site", "describe_exception", "site_text"]

CallSite = tuple[CodeType | None, int]

# Frames of these folders are not the user's: Lockstep itself and torch.
_INTERNAL_FOLDERS = (str(Path(__file__).parents[1]) + "/", str(Path(torch.__file__).parent) + "/")
_INTERNAL_FILES = ("<frozen ", "<string>")
# What wraps torch's functions and threads.
_WRAPPERS = ("/contextlib.py", "/functools.py", "/threading.py", "/typing_extensions.py", "/warnings.py")
# What in our own package only uses the rest, as a script would: its lines are the ones to name.
_PACKAGE = str(Path(__file__).parents[1])
_USERS_INSIDE = (f"{_PACKAGE}/testing/conformance/", f"{_PACKAGE}/recipes/", f"{_PACKAGE}/train.py")

_SITE_BYTES = 250


def _is_internal_file(name: str) -> bool:
    if name.startswith(_INTERNAL_FILES) or name.endswith(_WRAPPERS):
        return True
    return name.startswith(_INTERNAL_FOLDERS) and not name.startswith(_USERS_INSIDE)


@functools.lru_cache(maxsize=4096)
def _is_internal(code: CodeType) -> bool:
    return _is_internal_file(code.co_filename)


def call_site() -> CallSite:
    """The innermost frame of the user's code that led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_internal(code):
            return code, frame.f_lineno
        frame = frame.f_back
    return None, 0


def site_text(site: CallSite) -> str:
    """`train.py:81 in main`, cut at the front of the path to at most 250 bytes of UTF-8."""
    code, line = site
    if code is None:
        return "an unknown line"
    path, tail = code.co_filename, f":{line} in {code.co_name}"
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
    own = [frame for frame in frames if not _is_internal_file(frame.filename)]
    for frame in reversed(own or list(frames)):
        return f"raised {text} at {frame.filename}:{frame.lineno} in {frame.name}"
    return f"raised {text}"
