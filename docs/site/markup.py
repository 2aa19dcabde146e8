"""Markdown as the site needs it: links between files, citations of notes, names of the API; and docstrings."""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from docs.site.notes import CITATION, ROOT, slug

__all__ = ["as_markdown", "documented_names", "in_prose", "link_names", "link_notes", "relink"]

_FENCE = re.compile(r"^(?P<fence>[ \t]*(?:```|~~~)).*?^(?P=fence)[^\S\n]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s#]*)(?P<anchor>#[^()\s]*)?\)"
)
_EXAMPLE = re.compile(r"^ *>>> .*(?:\n.+)*", re.MULTILINE)
_NAME = re.compile(r"(?<![\[`])`(?P<name>lockstep(?:\.\w+)+)(?:\(\))?`(?![\]`])")


def in_prose(text: str, change: Callable[[str], str]) -> str:
    """The text with `change` applied to all that is no fenced code and no heading."""
    done, end = [], 0
    for fence in _FENCE.finditer(text):
        done += [_outside_headings(text[end : fence.start()], change), fence[0]]
        end = fence.end()
    return "".join([*done, _outside_headings(text[end:], change)])


def relink(text: str, source: str, uri: str, page_of: Callable[[str], str | None]) -> str:
    """The text with links to files turned into links to the pages that show them.

    A link to a file that no page shows (a test, a module) becomes its text: the site holds no copy of the repository.

    Args:
        text: Markdown.
        source: the file, from the root, that the text is from.
        uri: the path of its page in the site.
        page_of: the path in the site of the page that shows a file; None if none does.
    """

    def follow(link: re.Match[str]) -> str:
        target = link["target"]
        if not target or "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = page_of(path)
        if page is None and not link["image"]:
            return link["text"] if (ROOT / path).exists() else link[0]
        way = posixpath.relpath(page or path, posixpath.dirname(uri) or ".")
        return f"{link['image']}[{_title(link['text'], path)}]({way}{link['anchor'] or ''})"

    return _LINK.sub(follow, text)


def link_notes(text: str) -> str:
    """The text with each citation of a note turned into a reference to its anchor."""

    def cite(match: re.Match[str]) -> str:
        name = " ".join(match["name"].split())
        return f"[Note: {name}][{slug(name)}]"

    return _outside_code(text, lambda prose: CITATION.sub(cite, prose))


def link_names(text: str, names: frozenset[str]) -> str:
    """The text with names of the API, written `lockstep.init` or so, turned into references, if they are documented."""

    def refer(match: re.Match[str]) -> str:
        return f"[{match[0]}][{match['name']}]" if match["name"] in names else match[0]

    linked = [(link.start(), link.end()) for link in _LINK.finditer(text)]

    def refer_outside_links(match: re.Match[str]) -> str:
        inside = any(start <= match.start() < end for start, end in linked)
        return match[0] if inside else refer(match)

    return _NAME.sub(refer_outside_links, text)


def as_markdown(text: str, names: frozenset[str]) -> str:
    """A docstring as Markdown.

    A code block comes after `::` in the source, after `:` here. An example, wherever it stands, is a block of its own.
    A paragraph that begins a note has its name in bold; notes and documented names that are mentioned become links.
    """
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = _EXAMPLE.sub(lambda example: f"```pycon\n{textwrap.dedent(example[0])}\n```", text)
    # What stands before a colon would be read as a type; the type is the annotation's.
    text = re.sub(r"^(Returns:\n +)(?=\S)", r"\1: ", text, flags=re.MULTILINE)
    text = re.sub(r"(\A|\n\n)\[Note: ([^\]…]+)\] ", r"\1**\2.** ", text)
    return in_prose(text, lambda prose: link_names(link_notes(prose), names))


def documented_names(folder: Path = ROOT / "docs" / "reference") -> frozenset[str]:
    """What the reference documents: the names after `:::`."""
    found: set[str] = set()
    for path in sorted(folder.glob("*.md")):
        found |= set(re.findall(r"^::: (\S+)", path.read_text(), re.MULTILINE))
    return frozenset(found)


def _title(text: str, path: str) -> str:
    """The text of a link. A name of a file says nothing on a site; the title of its page does."""
    if not text.endswith(".md"):
        return text
    heading = re.search(r"^# (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    return heading[1] if heading else text


def _outside_headings(text: str, change: Callable[[str], str]) -> str:
    parts = re.split(r"(^#+ .*$|^::: .*$)", text, flags=re.MULTILINE)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    done, end = [], 0
    for code in _CODE.finditer(text):
        done += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*done, change(text[end:])])
