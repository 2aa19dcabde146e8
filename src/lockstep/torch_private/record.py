"""The description of one name of torch in the table. Does not import torch."""

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
    """Replaces it."""
    ADD = "add"
    """Adds it if torch has nothing of that name."""
    BEHAVIOUR = "behaviour"
    """Relies on behaviour of torch that is not guaranteed."""


@dataclass(frozen=True)
class NameRecord:
    """One name.

    Attributes:
        name: its full name; `*` stands for any text, if one reason applies to several names.
        use: how it is used.
        why: what it is used for.
        without: the consequence if torch has no such name.
        when: "always", or when it is used.
        since: the first release of torch that has it, among those that Lockstep supports.
        until: the last one; empty while the newest has it.
        folder: the package of ours that uses it directly; empty for `torch_private`.
    """

    name: str
    use: Use
    why: str
    without: str
    when: str = "always"
    since: str = "2.6 or earlier"
    until: str = ""
    folder: str = ""
