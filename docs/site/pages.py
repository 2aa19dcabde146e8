"""Pages of the site that are made when it is built, from files outside of `docs` or from the program itself."""

from __future__ import annotations

import ast
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docs.site.notes import ROOT, find_notes
from docs.site.notes import page as page_of_notes

__all__ = ["COMMANDS", "Page", "made_pages", "page_of", "variables"]

COMMANDS = (
    *("", "run", "run --slurm", "launch", "verify", "rehearse", "train digits", "train imagenet", "data make-imagenet"),
    *("horovodrun", "bench", "bench strategies", "doctor"),
)
"""What is shown of the command line, each with `--help`."""


_WIDE = "---\nhide: [navigation]\n---\n\n"


@dataclass(frozen=True)
class Page:
    """A page that is made.

    Attributes:
        source: the file or folder, from the root, that it shows; links in its text are relative to it.
        text: makes the Markdown. Called when the site is built.
    """

    source: str
    text: Callable[[], str]


def made_pages() -> dict[str, Page]:
    """Every page that is made, by its path in the site."""
    pages = {
        "index.md": Page("README.md", front_page),
        "performance/index.md": Page("README.md", lambda: section(_read("README.md"), "How fast")[1:]),
        "performance/measuring.md": Page("benchmarks/README.md", lambda: _read("benchmarks/README.md")),
        "architecture.md": Page("ARCHITECTURE.md", lambda: _read("ARCHITECTURE.md")),
        "contributing.md": Page("CONTRIBUTING.md", lambda: _read("CONTRIBUTING.md")),
        "changelog.md": Page("CHANGELOG.md", lambda: _read("CHANGELOG.md")),
        "notes.md": Page("src/lockstep", lambda: page_of_notes(find_notes())),
        "reference/environment.md": Page("src/lockstep/env.py", lambda: environment_page(_read("src/lockstep/env.py"))),
        "reference/command-line.md": Page("src/lockstep/cli.py", command_line_page),
        "examples/index.md": Page("examples/README.md", examples_page),
    }
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        pages[f"performance/{path.name}"] = _copy_of(path)
    for path in sorted((ROOT / "examples").glob("*.py")):
        pages[f"examples/{path.stem}.md"] = _listing_of(path)
    return pages


def front_page() -> str:
    """README without what has pages of its own."""
    text = without_sections(_read("README.md"), "How fast", "ImageNet", "More")
    return _WIDE + text.replace("](#how-fast)", "](benchmarks/results)")


def page_of(path: str, made: dict[str, Page]) -> str | None:
    """The page, by its path in the site, that shows a file or folder of the repository; None if none does."""
    folders = {
        "benchmarks/results": "performance/index.md",
        "examples": "examples/index.md",
        "docs": "index.md",
        "docs/decisions": "decisions/index.md",
    }
    if path in folders:
        return folders[path]
    if path.startswith("docs/") and path.endswith((".md", ".png")):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/results/") and path.endswith(".png"):
        return f"performance/{posixpath.basename(path)}"
    return next((uri for uri, page in made.items() if page.source == path), None)


def section(text: str, title: str) -> str:
    """A section of a Markdown text, with its heading: from `## title` to before the next `## `."""
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if not found:
        raise LookupError(
            f"there is no section {title!r}: the page that shows it needs another name, in docs/site/pages.py"
        )
    return found[0]


def without_sections(text: str, *titles: str) -> str:
    """A Markdown text without these sections."""
    for title in titles:
        text = text.replace(section(text, title), "")
    return text


def examples_page() -> str:
    """A list of all examples, each with the first sentence of its docstring."""
    lines = ["# Examples", "", "One small script for every way to launch. Each runs alone and on several ranks.", ""]
    scripts = sorted((ROOT / "examples").glob("*.py"))
    lines += [f"- [{path.name}]({path.name}): {_docstring(path).splitlines()[0]}" for path in scripts]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Section:
    """Environment variables that belong together: what the comment above them says, and names with what they mean."""

    title: str
    variables: list[tuple[str, str]]


def variables(source: str) -> list[Section]:
    """The variables that `env.py` declares, Lockstep's own first."""
    lines = source.splitlines()
    sections: list[Section] = []
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(value=ast.Call(func=ast.Name(id="Variable"), args=[ast.Constant(value=name), _, doc])):
                if lines[node.lineno - 2].startswith("# "):
                    sections.append(Section(lines[node.lineno - 2][2:], []))
                sections[-1].variables.append((name, str(ast.literal_eval(doc))))
    return sorted(sections, key=lambda one: not one.variables[0][0].startswith("LOCKSTEP_"))


def environment_page(source: str) -> str:
    """The page of all environment variables."""
    lines = [
        "# Environment variables",
        "",
        "Every variable that Lockstep reads or sets. An explicit argument wins over a variable, and a variable that is "
        "empty counts as unset.",
    ]
    for one in variables(source):
        lines += ["", f"## {one.title.rstrip('.')}", "", "| variable | meaning |", "| --- | --- |"]
        lines += [f"| `{name}` | {_in_a_cell(doc)} |" for name, doc in one.variables]
    return "\n".join(lines) + "\n"


def command_line_page() -> str:
    """What every command says of itself with `--help`."""
    lines = ["# Command line", "", "`pip` installs one command, `lockstep`. This is what it says of itself."]
    for command in COMMANDS:
        lines += ["", f"## `lockstep {command}".rstrip() + "`", "", "```text", _help_of(command).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _help_of(command: str) -> str:
    variables = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT / "src")}
    line = [sys.executable, "-m", "lockstep", *command.split(), "--help"]
    return subprocess.run(line, env=variables, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def _copy_of(path: Path) -> Page:
    return Page(str(path.relative_to(ROOT)), path.read_text)


def _listing_of(path: Path) -> Page:
    source = str(path.relative_to(ROOT))
    return Page(source, lambda: f'# {path.name}\n\n```python title="{source}"\n{path.read_text().rstrip()}\n```\n')


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or path.stem


def _in_a_cell(text: str) -> str:
    """Text for a cell of a Markdown table, in which `<pid>` is no tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _read(path: str) -> str:
    return (ROOT / path).read_text()
