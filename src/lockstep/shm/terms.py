"""Handshake parameters ("terms"): what must be the same on all ranks of a group, compared while it is created.

Ranks that lay out shared memory or encode sums differently would misread each other's bytes, and add them up without an
error. So each rank first publishes its terms: its release of Lockstep, the version of the layout, the sizes that it
uses, and the user's choices.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lockstep.errors import SetupError

__all__ = ["Terms", "common_terms", "disagreement"]

# Version of the layout of everything in a segment, and of the messages between ranks of several hosts. Increment it
# when you move a field, add one, or change its meaning.
LAYOUT = 1
Terms = Mapping[str, "str | int"]

_LONGEST_VALUE = 60


def common_terms() -> dict[str, str | int]:
    """The terms common to every kind of group: release, layout, and how numbers are stored in memory."""
    # The package itself is a layer above this one; it is loaded as soon as any module of it is.
    version = str(getattr(sys.modules["lockstep"], "__version__", "?"))
    return {"Lockstep": version, "layout": LAYOUT, "byte order": sys.byteorder}


def disagreement(own_name: str, own: Terms, other_name: str, other: Any) -> SetupError | None:
    """The error for two ranks whose terms differ; None if they agree.

    Args:
        own_name: the name of this rank in the error.
        own: the terms of this rank.
        other_name: the name of the other rank.
        other: the terms that the other rank has published; may be anything.
    """
    theirs = other if isinstance(other, dict) else {}
    names = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
    if not names:
        return None
    if names == ["wire"]:
        return SetupError(
            f"{own_name} was given the wire format {_show(own.get('wire'))}, {other_name} {_show(theirs.get('wire'))}; "
            "give all ranks the same, by lockstep.init(wire=…) or LOCKSTEP_WIRE"
        )
    differences = ", ".join(
        f"{name[:_LONGEST_VALUE]} {_show(own.get(name))} on {own_name} and {_show(theirs.get(name))} on {other_name}"
        for name in names[:4]
    )
    return SetupError(
        f"the ranks have different settings: {differences}; install the same release on all hosts, and give all ranks "
        "the same settings"
    )


def _show(value: object) -> str:
    return "unknown" if value is None else str(value)[:_LONGEST_VALUE]
