"""Parses message sizes: `4:64M` is from 4 bytes to 64 MiB."""

from __future__ import annotations

import re

from lockstep.errors import InputError

__all__ = ["parse_sizes"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_EXAMPLES = "write a range as 4:64M, or a list as 4,64K,1M; K, M and G are powers of 1024"


def parse_sizes(text: str, factor: int = 4) -> list[int]:
    """Parse sizes; returns bytes in ascending order, without duplicates.

    Args:
        text: `FROM:TO`, where TO is included if it is FROM times a power of `factor`; or comma-separated sizes.
        factor: factor between the sizes of a range, at least 2.

    Raises:
        InputError: the text is malformed; says what to write.

    >>> parse_sizes("4:1K"), parse_sizes("64K,4,1.5M")
    ([4, 16, 64, 256, 1024], [4, 65536, 1572864])
    """
    if factor < 2:
        raise InputError(f"the factor between sizes must be at least 2, got {factor}")
    if ":" not in text:
        return sorted({_parse_size(part, text) for part in text.split(",")})
    ends = text.split(":")
    if len(ends) != 2:
        raise InputError(f"{text!r} is not a range of sizes; {_EXAMPLES}")
    low, high = (_parse_size(end, text) for end in ends)
    if low > high:
        raise InputError(f"{text!r} starts above its end; {_EXAMPLES}")
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return sizes


def _parse_size(part: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)(?:i?b)?", part.strip().lower())
    size = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise InputError(f"{part!r} in {text!r} is not a size; {_EXAMPLES}")
    return size
