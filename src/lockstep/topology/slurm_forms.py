"""Parses Slurm's two compact formats: a list of hosts, and a number per host.

Pure functions of a text. Slurm itself writes both formats into the environment of a step. They follow `scontrol show
hostnames`, except that a text after the last bracket (`gpu-a[01-04]x`, which newer releases write) is accepted too, as
it has only one possible meaning.
"""

from __future__ import annotations

import itertools
import re

__all__ = ["expand_counts", "expand_hosts"]

# More than any cluster has; also Slurm's limit for one range.
_MAX_HOSTS = 65_536

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The names in a host list, in its order, repetitions included.

    Args:
        text: comma-separated names; a name may have several ranges in brackets. The numbers of a range are padded to
            the width of its first one.

    Raises:
        ValueError: the text is not a host list; says where.

    >>> expand_hosts("n[1-3,7],gpu-a[01-02]x,login")
    ('n1', 'n2', 'n3', 'n7', 'gpu-a01x', 'gpu-a02x', 'login')
    >>> expand_hosts("r[1-2]n[08-09]")
    ('r1n08', 'r1n09', 'r2n08', 'r2n09')
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text):
        hosts.extend(_expand_name(part))
        if len(hosts) > _MAX_HOSTS:
            raise ValueError(f"names more than {_MAX_HOSTS} hosts")
    if not hosts:
        raise ValueError("names no host")
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """One number per host, from Slurm's format for tasks and cores per node.

    Args:
        text: comma-separated numbers; `(x3)` after a number means three times.

    Raises:
        ValueError: the text does not have this format; says where.

    >>> expand_counts("2(x2),1")
    (2, 2, 1)
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is neither a number nor one with a repetition, such as 2(x3)")
        repetition = int(match[2] or 1)
        if len(counts) + repetition > _MAX_HOSTS:
            raise ValueError(f"is for more than {_MAX_HOSTS} hosts")
        counts.extend([int(match[1])] * repetition)
    return tuple(counts)


def _split_outside_brackets(text: str) -> list[str]:
    """The parts between commas outside of brackets; empty ones are left out, as by Slurm."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"has a bracket too many at {text[position:]!r}")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError("has a bracket that is not closed")
    return [part for part in (*parts, text[start:]) if part]


def _expand_name(name: str) -> list[str]:
    """Expand a name with any number of brackets; the last one varies fastest."""
    # re.split with a group: literal, contents of a bracket, literal, contents, …, literal.
    pieces = _BRACKETS.split(name)
    choices = [_expand_ranges(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > _MAX_HOSTS:
        raise ValueError(f"names more than {_MAX_HOSTS} hosts in {name!r}")
    return ["".join(combination) for combination in itertools.product(*choices)]


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"has [{text}], where {part!r} is neither a number nor a range such as 1-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"has [{text}], where the range {part!r} ends before it begins")
        if len(numbers) + last - first >= _MAX_HOSTS:
            raise ValueError(f"has [{text}], which is more than {_MAX_HOSTS} numbers")
        width = len(match[1])
        numbers.extend(f"{number:0{width}d}" for number in range(first, last + 1))
    return numbers
