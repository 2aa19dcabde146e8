"""A line of the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CheckResult"]


@dataclass(frozen=True)
class CheckResult:
    """What was checked, what was found, and what to do about it.

    Attributes:
        subject: what was checked.
        text: what was found.
        remedy: what is wrong and what to do, as a sentence; empty if nothing is wrong.
        command: the same as a shell command; empty if there is none.
        is_needed: whether training fails without it.
    """

    subject: str
    text: str
    remedy: str = ""
    command: str = ""
    is_needed: bool = False

    @property
    def status(self) -> str:
        """ "ok", "look" (training works, but something may be wrong) or "missing" (training would fail)."""
        if not self.remedy:
            return "ok"
        return "missing" if self.is_needed else "look"

    def as_dict(self) -> dict[str, Any]:
        """A dict for JSON: `status`, `subject`, `text`, `remedy` and `command`."""
        values = {"status": self.status, **asdict(self)}
        del values["is_needed"]
        return values
