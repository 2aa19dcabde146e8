"""Words of an option with commas between, each out of a list."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lockstep.errors import InputError

__all__ = ["choose"]


def choose(text: str, known: Iterable[str], kind: str, *, only_one: bool = False) -> list[str]:
    """The words of an option, each once, in the order given.

    Args:
        text: with commas between.
        known: words that there are.
        kind: what they are called.
        only_one: whether more than one is an error.

    Raises:
        InputError: a word is none of them, or there is none, or more than one; says which there are.

    >>> choose("gloo, lockstep", ["lockstep", "gloo"], "backend")
    ['gloo', 'lockstep']
    """
    there = list(known)
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in there:
            close = difflib.get_close_matches(word, there, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise InputError(f"there is no {kind} {word!r}{hint}; there are: {', '.join(there)}")
    if not words or (only_one and len(words) > 1):
        raise InputError(f"{text!r} names {len(words)} of {', '.join(there)}; give {'one' if only_one else 'some'}")
    return list(dict.fromkeys(words))
