"""A suggestion for a word that is not known, at the end of an error."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["suggest"]


def suggest(word: str, known: Iterable[str]) -> str:
    """`, did you mean 'run'?` if the word is close to a known one, otherwise empty."""
    import difflib  # only needed for an error

    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
