"""A line of the user's code, as records and reports have it. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Site"]


@dataclass(frozen=True, order=True)
class Site:
    """A line of the user's code.

    Attributes:
        file: absolute path.
        line: from 1.
        function: in which it stands, `<module>` at the top level.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        here = os.getcwd() + os.sep
        return f"{self.file.removeprefix(here)}:{self.line}"

    def dump(self) -> list[object]:
        """The list that a record has of it."""
        return [self.file, self.line, self.function]

    @classmethod
    def load(cls, values: Sequence[object]) -> Site:
        """From the list that a record has of it."""
        file, line, function = values
        return cls(str(file), int(str(line)), str(function))
