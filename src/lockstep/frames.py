"""Which frames of a stack are the user's, and which only Lockstep's or torch's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

__all__ = ["is_internal_file", "up_to_user"]

_PACKAGE = str(Path(__file__).parent)
# What in our own package only uses the rest, as a script would: its lines are the ones to name.
_USERS_INSIDE = (f"{_PACKAGE}/testing/conformance/", f"{_PACKAGE}/recipes/", f"{_PACKAGE}/train.py")
_GENERATED = ("<frozen ", "<string>")
# What wraps torch's functions and threads.
_WRAPPERS = ("/contextlib.py", "/functools.py", "/threading.py", "/typing_extensions.py", "/warnings.py")


def is_internal_file(name: str) -> bool:
    """Whether code of that file is not the user's: Lockstep itself, torch, and what wraps their functions."""
    if name.startswith(_GENERATED) or name.endswith(_WRAPPERS):
        return True
    if name.startswith(f"{_PACKAGE}/"):
        return not name.startswith(_USERS_INSIDE)
    # Not imported to find out: without it there are no frames of it.
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    return torch_file is not None and name.startswith(f"{Path(torch_file).parent}/")


def up_to_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback up to the innermost frame of the user's code; all of it if there is none.

    For errors that say themselves what went wrong: the frames through which they came say nothing.
    """
    frames = []
    link = trace
    while link is not None:
        frames.append(link)
        link = link.tb_next
    while frames and is_internal_file(frames[-1].tb_frame.f_code.co_filename):
        frames.pop()
    shortened: TracebackType | None = None
    for frame in reversed(frames):
        shortened = TracebackType(shortened, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shortened or trace
