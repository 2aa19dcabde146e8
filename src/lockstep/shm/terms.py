"""What the ranks of a group must have alike, compared while the group is made.

Ranks that lay out shared memory differently, or encode sums differently, would read each other's bytes as something
that they are not, and add them up without an error. So each rank publishes its terms beforehand: its release of
Lockstep, the number of the layout, the sizes that it works with, and what the user has chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lockstep.errors import SetupError

__all__ = ["Terms", "common_terms", "disagreement"]

# The number of the layout of everything that lies in a segment, and of the messages between ranks of several hosts.
# Raise it when you move a field, add one, or change what one means.
LAYOUT = 1
Terms = Mapping[str, "str | int"]

_LONGEST_VALUE = 60


def common_terms() -> dict[str, str | int]:
    """What holds for every kind of group: the release, the layout, and how numbers lie in memory."""
    # The package itself stands above this layer; it is there as soon as any module of it is.
    version = str(getattr(sys.modules["lockstep"], "__version__", "?"))
    return {"Lockstep": version, "layout": LAYOUT, "byte order": sys.byteorder}


def disagreement(own_name: str, own: Terms, other_name: str, other: Any) -> SetupError | None:
    """The error for two ranks that go by different terms; None if they agree.

    Args:
        own_name: how to call this rank.
        own: the terms of this rank.
        other_name: how to call the other.
        other: the terms that the other rank has published, which may be anything.
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
