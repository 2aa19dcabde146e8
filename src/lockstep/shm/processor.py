"""What depends on the make of the processor: the ranks of a host have the same one.

[Note: one step or two] In an all_reduce either every rank reads the whole tensor of every other rank and adds it all
up, which takes one step; or each adds up a share and hands it back, which takes two steps, and moves less. Medians at
64 KiB on an Intel Xeon of 2 cores: 21.7 µs by one step, 35.3 by two, with 2 ranks; 169 and 255 with 4; 808 and 1118
with 8. At 256 KiB two steps are faster everywhere. What one step reads grows with the number of ranks, so with more
than 4 it is for smaller tensors. On AMD's Zen 4 one step is slower from about 16 KiB on, because its slots are written
by those who wrote them last: see [Note: who writes a line] in `algorithms.py`.
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
    """The largest tensor that every rank adds up whole, in bytes; it fits a small slot. See [Note: one step or two].

    Args:
        world_size: ranks of the group.
    """
    if cpuinfo("vendor_id") == "AuthenticAMD":
        return _FEWEST_BYTES
    return min(_MOST_BYTES, max(_FEWEST_BYTES, _BYTES_READ // world_size))


def writes_lines_by_turns() -> bool:
    """Whether the rank that read a line last should write it. See [Note: who writes a line] in `algorithms.py`."""
    return cpuinfo("vendor_id") == "AuthenticAMD"


def cpuinfo(field: str) -> str:
    """What the kernel says of the processor under a name, such as "model name"; empty where it says nothing. Local."""
    try:
        found = re.search(rf"^{field}\s*:(.*)$", CPUINFO.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
