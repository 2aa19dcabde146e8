"""The navigation that mkdocs.yml describes, and the pages in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["expand", "pages_in"]


def expand(nav: Sequence[Any], made: Sequence[str]) -> list[Any]:
    """The navigation with each `folder/*` replaced by the made pages of the folder that it does not name itself.

    Args:
        nav: as in mkdocs.yml: paths, and titles with a path or a list.
        made: paths of the pages that are made when the site is built.
    """
    return _expand(nav, made, set(pages_in(nav)))


def pages_in(nav: Sequence[Any]) -> Iterator[str]:
    """The paths in a navigation, in order."""
    for item in nav:
        below = next(iter(item.values())) if isinstance(item, dict) else item
        if isinstance(below, str):
            yield below
        else:
            yield from pages_in(below)


def _expand(nav: Sequence[Any], made: Sequence[str], named: set[str]) -> list[Any]:
    expanded: list[Any] = []
    for item in nav:
        match item:
            case str() if item.endswith("/*"):
                folder = item.removesuffix("*")
                expanded += [uri for uri in made if uri.startswith(folder) and uri not in named]
            case dict():
                expanded.append(
                    {
                        title: below if isinstance(below, str) else _expand(below, made, named)
                        for title, below in item.items()
                    }
                )
            case _:
                expanded.append(item)
    return expanded
