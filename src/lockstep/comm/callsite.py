"""Finds the call site, the user's line that called a collective, for messages and the flight record.

[Note: frames] Python creates a frame object only when code asks for it, and that is the most expensive part of this
module. So only one frame is requested, at the depth where the last call found the user's frame; the user's function
runs through many calls, so its frame object usually exists already. If the same instruction of the user's code led to a
collective at that depth before, that frame is used without a search. An unknown instruction costs a search through all
frames. Instructions are identified by the identity of their code object, which is kept alive, because hashing a code
object reads all of its bytecode.

[Note: the backward pass on a GPU] Autograd runs it in a separate thread per GPU, while the thread that called
`backward()` waits. A collective called by a hook there has no line of the user's above it. So the call site is the line
that called `backward()`, if exactly one thread is in such a call.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType

import torch

from lockstep.frames import is_internal_file, public_call

__all__ = ["CallSite", "call_site", "describe_exception", "is_users", "make_locator", "site_text"]

CallSite = tuple[str, int, str]
"""File, line and name of the function. If that line called a communicating function of ours, such as `checkpoint.save`,
the name is `main (checkpoint.save)`. Code objects are left out: hashing one reads all of its bytecode."""

_UNKNOWN: CallSite = ("", 0, "")
_SITE_BYTES = 250
# Depths of the user's frame, counted from `call_site`. No instruction leads straight here from deeper ones. torch 2.6
# adds a frame of the compiler around each method that it skips.
_FIRST_DEPTH, _DEEPEST = 7, 11
_MAX_KNOWN = 4096
_getframe = sys._getframe
# By file name, computed once each; names are mostly compared by identity.
_users_files: set[str] = set()
_internal_files: set[str] = set()


@functools.lru_cache(maxsize=4096)
def is_users(code: CodeType) -> bool:
    """Whether this is the user's code, neither Lockstep's nor torch's."""
    return not is_internal_file(code.co_filename)


def make_locator() -> Callable[[], CallSite]:
    """Create a finder of call sites. It remembers the depth of the last user's frame, so each caller needs its own.

    Returns:
        A function that returns the innermost frame of the user's code that led here. See [Note: frames].
    """
    depth = _FIRST_DEPTH
    known: dict[int, dict[int, CallSite]] = {}  # by identity of the code, then by instruction
    codes: dict[int, CodeType] = {}

    def call_site() -> CallSite:
        nonlocal depth
        try:
            frame = _getframe(depth)
            return known[id(frame.f_code)][frame.f_lasti]
        except (ValueError, KeyError):
            pass
        site, found, found_at = _search(_getframe(1))
        if found is None:
            return _find_call_of_backward()
        if found_at <= _DEEPEST:
            depth = found_at
            if len(codes) >= _MAX_KNOWN:
                codes.clear()
                known.clear()
            code = found.f_code
            codes[id(code)] = code
            known.setdefault(id(code), {})[found.f_lasti] = site
        return site

    return call_site


call_site = make_locator()


def _find_call_of_backward() -> CallSite:
    """The line in another thread that called this backward pass. See [Note: the backward pass on a GPU]."""
    passes = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
    sites: set[CallSite] = set()
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code not in passes:
            frame = frame.f_back
        if frame is not None:
            sites.add(_search(frame)[0])
    return sites.pop() if len(sites) == 1 else _UNKNOWN


def _search(frame: FrameType | None) -> tuple[CallSite, FrameType | None, int]:
    """The innermost user's call site from this frame on, its frame, and its depth; `frame` has depth 1."""
    depth = 1
    called = None
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file not in _internal_files:
            if file in _users_files:
                name = code.co_name if called is None else f"{code.co_name} ({called})"
                return (file, frame.f_lineno, name), frame, depth
            (_internal_files if is_internal_file(file) else _users_files).add(file)
            continue
        called = public_call(code) or called
        frame = frame.f_back
        depth += 1
    return _UNKNOWN, None, depth


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
    """`raised ValueError: text at train.py:81 in main`, with the innermost line of the user's code."""
    try:
        first_line = next(iter(str(error).splitlines()), "")
    except Exception:  # a `__str__` of the user's
        first_line = ""
    text = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_internal_file(frame.filename)]
    for frame in reversed(own or list(frames)):
        return f"raised {text} at {frame.filename}:{frame.lineno} in {frame.name}"
    return f"raised {text}"
