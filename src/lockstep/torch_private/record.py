"""What the table says of one name of torch. Imports no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["NameRecord", "Use"]


class Use(enum.Enum):
    """What Lockstep does with a name."""

    READ = "read"
    """Looks it up and reads or calls it."""
    ATTRIBUTE = "attribute"
    """Reads or writes it on instances; it cannot be looked up on the class."""
    OVERRIDE = "override"
    """Defines it in a subclass, where torch calls it."""
    PATCH = "patch"
    """Puts something else in its place."""
    ADD = "add"
    """Puts it where torch has nothing of that name."""
    BEHAVIOUR = "behaviour"
    """Relies on what torch does and does not promise."""


@dataclass(frozen=True)
class NameRecord:
    """One name.

    Attributes:
        name: its full name; `*` stands for any text, where one reason holds for several names.
        use: what is done with it.
        why: what it is for.
        without: what happens where torch has no such name.
        when: "always" or the occasion.
        since: the first release of torch that has it, among those that Lockstep supports.
        until: the last one; empty while the newest has it.
        folder: the package of ours that uses it by itself; empty where `torch_private` does.
    """

    name: str
    use: Use
    why: str
    without: str
    when: str = "always"
    since: str = "2.6 or earlier"
    until: str = ""
    folder: str = ""
