"""Docstrings as the reference shows them: written to be read in the source, and read as Markdown by the site."""

from __future__ import annotations

from typing import Any

import griffe

from docs.site.markup import as_markdown, documented_names

__all__ = ["Markup"]


class Markup(griffe.Extension):
    """Turns each docstring into Markdown as it is read. mkdocs.yml names this class."""

    def __init__(self) -> None:
        self.names = documented_names()

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, self.names)
