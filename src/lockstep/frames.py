"""Which frames of a stack are the user's, and which only Lockstep's or torch's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["is_internal_file", "is_torch_file", "up_to_user", "without_relays"]

_PACKAGE = str(Path(__file__).parent)
# What in our own package only uses the rest, as a script would: its lines are the ones to name.
_USERS_INSIDE = (f"{_PACKAGE}/testing/conformance/", f"{_PACKAGE}/recipes/", f"{_PACKAGE}/train.py")
# Stands around methods of torch's, and is in the way of those who read a traceback.
_RELAY = f"{_PACKAGE}/comm/torch_record.py"
_GENERATED = ("<frozen ", "<string>")
# What wraps torch's functions and threads.
_WRAPPERS = ("/contextlib.py", "/functools.py", "/threading.py", "/typing_extensions.py", "/warnings.py")


def is_internal_file(name: str) -> bool:
    """Whether code of that file is not the user's: Lockstep itself, torch, and what wraps their functions."""
    if name.startswith(_GENERATED) or name.endswith(_WRAPPERS):
        return True
    if name.startswith(f"{_PACKAGE}/"):
        return not name.startswith(_USERS_INSIDE)
    return is_torch_file(name)


def is_torch_file(name: str) -> bool:
    """Whether code of that file is torch's, or stands around a method of torch's."""
    if name == _RELAY:
        return True
    # Not imported to find out: without it there are no frames of it.
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    return torch_file is not None and name.startswith(f"{Path(torch_file).parent}/")


def up_to_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback up to the innermost frame of the user's code; all of it if there is none.

    For errors that say themselves what went wrong: the frames through which they came say nothing.
    """
    links = list(_links(trace))
    while links and is_internal_file(links[-1].tb_frame.f_code.co_filename):
        links.pop()
    return _chain(links) or trace


def without_relays(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that Lockstep has put around methods of torch's."""
    return _chain([link for link in _links(trace) if link.tb_frame.f_code.co_filename != _RELAY])


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _chain(links: Sequence[TracebackType]) -> TracebackType | None:
    """A new traceback of these frames."""
    chain: TracebackType | None = None
    for link in reversed(links):
        chain = TracebackType(chain, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return chain
