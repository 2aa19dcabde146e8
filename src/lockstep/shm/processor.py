"""Choices that depend on the CPU model, which is the same for all ranks of a host.

[Note: one step or two] In an all_reduce either every rank reads the whole tensor of every other rank and adds
everything, which takes one step; or each adds a share and writes it back, which takes two steps, but moves less.
Medians at 64 KiB on an Intel Xeon with 2 cores: 21.7 µs in one step, 35.3 in two, with 2 ranks; 169 and 255 with 4; 808
and 1118 with 8. At 256 KiB two steps are faster everywhere. What one step reads grows with the number of ranks, so with
more than 4 it is used for smaller tensors only. On AMD's Zen 4 one step is slower from about 16 KiB on, because its
slots are written by the ranks that wrote them last: see [Note: who writes a line] in `algorithms.py`.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

__all__ = ["CPUINFO", "bytes_reduced_by_all", "cpuinfo", "writes_lines_by_turns"]

CPUINFO = Path("/proc/cpuinfo")
_MOST_BYTES, _FEWEST_BYTES = 64 << 10, 16 << 10
_BYTES_READ = 256 << 10


@functools.cache
def bytes_reduced_by_all(world_size: int) -> int:
    """The largest tensor, in bytes, that every rank sums completely; fits a small slot. See [Note: one step or two].

    Args:
        world_size: number of ranks in the group.
    """
    if cpuinfo("vendor_id") == "AuthenticAMD":
        return _FEWEST_BYTES
    return min(_MOST_BYTES, max(_FEWEST_BYTES, _BYTES_READ // world_size))


def writes_lines_by_turns() -> bool:
    """Whether the rank that last read a line should write it. See [Note: who writes a line] in `algorithms.py`."""
    return cpuinfo("vendor_id") == "AuthenticAMD"


def cpuinfo(field: str) -> str:
    """A field of /proc/cpuinfo, such as "model name"; empty if it is not there. Local."""
    try:
        found = re.search(rf"^{field}\s*:(.*)$", CPUINFO.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
