"""Parses options that are comma-separated names from a list."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.errors import InputError
from lockstep.similar import suggest

__all__ = ["choose"]


def choose(text: str, known: Iterable[str], kind: str, *, only_one: bool = False) -> list[str]:
    """Parse an option; returns its names in the given order, without duplicates.

    Args:
        text: comma-separated names.
        known: valid names.
        kind: what they are names of, for messages.
        only_one: whether to allow one name only.

    Raises:
        InputError: a name is unknown, or there are none, or too many; lists the valid ones.

    >>> choose("gloo, lockstep", ["lockstep", "gloo"], "backend")
    ['gloo', 'lockstep']
    """
    there = list(known)
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in there:
            raise InputError(f"unknown {kind} {word!r}{suggest(word, there) or '.'} Expected: {', '.join(there)}")
    if not words or (only_one and len(words) > 1):
        raise InputError(
            f"{text!r} names {len(words)} of {', '.join(there)}; expected {'one' if only_one else 'at least one'}"
        )
    return list(dict.fromkeys(words))
