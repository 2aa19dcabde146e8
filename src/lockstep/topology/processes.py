"""Names and parents of processes, as Linux reports them, to find the launcher of this process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["name_and_parent"]


def name_and_parent(pid: int) -> tuple[str, int]:
    """The name of a process, and the pid of its parent.

    Raises:
        OSError: it has ended.
    """
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The name, in parentheses, may contain anything; the parent's pid is the second field after it.
    name, _, fields = stat.partition("(")[2].rpartition(")")
    return name, int(fields.split()[1])
