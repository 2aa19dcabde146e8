"""What a built page would load from elsewhere. A site that is read on a machine without network must load nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["foreign_in_page", "foreign_in_site", "foreign_in_style"]

_FOREIGN = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
_LOADING = {"src", "srcset", "poster", "data", "background"}
_LOADING_RELATIONS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "modulepreload",
    "manifest",
}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        loaded = [value for name, value in attributes.items() if name in _LOADING]
        if tag == "link" and _LOADING_RELATIONS & set(attributes.get("rel", "").lower().split()):
            loaded.append(attributes.get("href", ""))
        loaded += foreign_in_style(attributes.get("style", ""))
        self.foreign += [url for url in loaded if _FOREIGN.match(url)]
        if "mermaid" in attributes.get("class", "").split():
            self.foreign.append("mermaid, which the theme loads from a CDN")
        self._in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.foreign += foreign_in_style(data)


def foreign_in_page(text: str) -> list[str]:
    """The URLs of other hosts that a page of HTML loads when it is shown. Links to click on are none."""
    page = _Page()
    page.feed(text)
    return page.foreign


def foreign_in_style(text: str) -> list[str]:
    """The URLs of other hosts that a stylesheet loads."""
    urls = re.findall(r"url\(\s*['\"]?([^'\")]*)", text) + re.findall(r"@import\s+['\"]([^'\"]*)", text)
    return [url for url in urls if _FOREIGN.match(url)]


def foreign_in_site(folder: Path) -> list[str]:
    """What the pages and stylesheets of a built site load from other hosts, each with its file."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".html", ".css"}:
            look = foreign_in_page if path.suffix == ".html" else foreign_in_style
            found += [f"{path.relative_to(folder)}: {url}" for url in look(path.read_text())]
    return found
