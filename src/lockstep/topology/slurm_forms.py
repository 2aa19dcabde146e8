"""Slurm's two shorthands: a list of hosts, and a number per host.

Pure functions of a text. Both are what Slurm itself writes into the environment of a step, so
they follow `scontrol show hostnames`, and go beyond it only where a text after the last bracket
(`gpu-a[01-04]x`, which newer releases write) has one possible meaning.
"""

from __future__ import annotations

import itertools
import re

__all__ = ["expand_counts", "expand_hosts"]

# More than any cluster has. Slurm draws its line for one range at the same place.
_MAX_HOSTS = 65_536

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The names in a host list, in its order, as often as they stand there.

    Args:
        text: names with commas between them; a name may have ranges in brackets, several times. A
            range counts as wide as its first number is written.

    Raises:
        ValueError: the text is no host list; says where.

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
    """One number per host, from the form that Slurm writes tasks and cores per node in.

    Args:
        text: numbers with commas between them; `(x3)` after a number stands for three times.

    Raises:
        ValueError: the text is not of this form; says where.

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
    """The parts between commas that stand in no bracket; empty ones left out, as Slurm does."""
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
    """One name with any number of brackets; the last one runs fastest."""
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
