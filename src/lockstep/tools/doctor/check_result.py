"""One line of the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CheckResult"]


@dataclass(frozen=True)
class CheckResult:
    """What was looked at, and what to do about it.

    Attributes:
        subject: what was looked at.
        text: what there is.
        remedy: what is wrong and what to do, as a sentence; empty if all is well.
        command: the same as a command for a shell; empty where only a person can decide.
        is_needed: training cannot work without it.
    """

    subject: str
    text: str
    remedy: str = ""
    command: str = ""
    is_needed: bool = False

    @property
    def status(self) -> str:
        """ "ok", "look" (training works, something is in its way) or "missing" (training would fail)."""
        if not self.remedy:
            return "ok"
        return "missing" if self.is_needed else "look"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `status`, `subject`, `text`, `remedy` and `command`."""
        values = {"status": self.status, **asdict(self)}
        del values["is_needed"]
        return values
