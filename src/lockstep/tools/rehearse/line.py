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
        function: name of the enclosing function, `<module>` at the top level.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        here = os.getcwd() + os.sep
        return f"{self.file.removeprefix(here)}:{self.line}"

    def dump(self) -> list[object]:
        """As a list for a record."""
        return [self.file, self.line, self.function]

    @classmethod
    def load(cls, values: Sequence[object]) -> Site:
        """From the list that `dump` returned."""
        file, line, function = values
        return cls(str(file), int(str(line)), str(function))
