"""The documentation site, as far as one sees without building it: what is in it, what becomes of links and docstrings.

`make docs` builds it and refuses warnings, links that lead nowhere, and pages that load something from a network.
"""

from __future__ import annotations

import importlib
import re
import types
from pathlib import Path

import pytest
import yaml

import lockstep
from docs.site.markup import as_markdown, documented_names, in_prose, link_names, link_notes, relink
from docs.site.navigation import expand, pages_in
from docs.site.notes import ROOT
from docs.site.offline import foreign_in_page, foreign_in_site, foreign_in_style
from docs.site.pages import COMMANDS, environment_page, made_pages, page_of, section, variables, without_sections
from lockstep import cli, env

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
DOCUMENTED = documented_names()
MADE = made_pages()


def whole_modules() -> set[str]:
    """Modules of which the reference shows all that they export."""
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    directives = re.findall(r"^::: (\S+)\n((?:    .*\n)*)", text + "\n", re.MULTILINE)
    return {name for name, options in directives if "members: false" not in options}


def public_names() -> list[str]:
    """All that is public: `lockstep`'s own names, and those of the modules among them."""
    names = [f"lockstep.{name}" for name in lockstep.__all__ if name != "__version__"]
    modules = [name for name in names if isinstance(getattr(lockstep, name.partition(".")[2]), types.ModuleType)]
    assert len(modules) >= 4
    return [*names, *(f"{name}.{inside}" for name in modules for inside in importlib.import_module(name).__all__)]


@pytest.mark.parametrize("name", public_names())
def test_reference_has_every_public_name(name: str) -> None:
    module, _, inside = name.rpartition(".")
    home = getattr(getattr(importlib.import_module(module), inside), "__module__", None)
    assert name in DOCUMENTED or {module, home} & whole_modules(), "docs/reference lacks it"


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_what_the_reference_names_is_there(name: str) -> None:
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:number]))
        found = getattr(found, part)
    assert found is not None


def test_navigation_has_every_page_once() -> None:
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    shown = list(pages_in(expand(CONFIG["nav"], list(MADE))))
    assert sorted(shown) == sorted(written | set(MADE)), "a page belongs into `nav` of mkdocs.yml"
    assert not written & set(MADE)


def test_a_star_stands_for_the_made_pages_of_a_folder_that_are_not_named() -> None:
    nav = ["a.md", {"Inside": ["made/index.md", "made/*"]}, {"Titled": "b.md"}]
    made = ["made/index.md", "made/one.md", "made/two.md", "other.md"]
    expanded = ["a.md", {"Inside": ["made/index.md", "made/one.md", "made/two.md"]}, {"Titled": "b.md"}]
    assert expand(nav, made) == expanded
    assert list(pages_in(expanded)) == ["a.md", "made/index.md", "made/one.md", "made/two.md", "b.md"]


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[ddp](../examples/ddp.py)", "[ddp](examples/ddp.md)"),
        ("[`benchmarks/results`](../benchmarks/results)", "[`benchmarks/results`](performance/index.md)"),
        ("[this page](same-answer.md#rounding)", "[this page](same-answer.md#rounding)"),
        ("[slurm.md](slurm.md)", "[On a Slurm cluster](slurm.md)"),
        ("[the test](../tests/ranks/test_world.py)", "the test"),
        ("[`world.py`](../src/lockstep/world.py)", "`world.py`"),
        ("![curves](images/one_answer.png)", "![curves](images/one_answer.png)"),
        ("[below](#below) and [there](https://example.org)", "[below](#below) and [there](https://example.org)"),
        ("[nowhere](nowhere.md)", "[nowhere](nowhere.md)"),
    ],
)
def test_links_lead_to_pages(link: str, expected: str) -> None:
    assert relink(link, "docs/guide-loop.md", "guide-loop.md", lambda path: page_of(path, MADE)) == expected


def test_links_from_pages_in_folders() -> None:
    text = "![picture](hosts.png) [guide](../../docs/hosts.md)"
    moved = relink(text, "benchmarks/results/hosts.md", "performance/hosts.md", lambda path: page_of(path, MADE))
    assert moved == "![picture](hosts.png) [guide](../hosts.md)"


def test_prose_is_what_is_no_code_and_no_heading() -> None:
    text = "# a\na\n```sh\na\n```\na\n\n- a\n\n  ```\n  a\n  ```\n::: a\na\n"
    expected = "# a\nb\n```sh\na\n```\nb\n\n- b\n\n  ```\n  a\n  ```\n::: a\nb\n"
    assert in_prose(text, lambda prose: prose.replace("a", "b")) == expected


def test_notes_and_names_become_references() -> None:
    assert link_notes("see [Note:\ntwo slots]") == "see [Note: two slots][note-two-slots]"
    assert link_notes("`[Note: …]`, `[Note: two slots]`") == "`[Note: …]`, `[Note: two slots]`"
    names = frozenset({"lockstep.init"})
    assert link_names("`lockstep.init()`, `lockstep.init`", names) == (
        "[`lockstep.init()`][lockstep.init], [`lockstep.init`][lockstep.init]"
    )
    for unchanged in ("`lockstep.comm`", "[how `lockstep.init` does](a.md)", "``lockstep.init``", "lockstep.init"):
        assert link_names(unchanged, names) == unchanged


def test_docstrings_become_markdown() -> None:
    docstring = (
        "One line, as here::\n\n    code()\n\n[Note: a name] Says [Note: two slots].\n\n"
        "Returns:\n    [rows, …]: values.\n\n    >>> 1 + 1\n    2\n\nThe end."
    )
    assert as_markdown(docstring, frozenset()) == (
        "One line, as here:\n\n    code()\n\n**a name.** Says [Note: two slots][note-two-slots].\n\n"
        "Returns:\n    : [rows, …]: values.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nThe end."
    )


def test_sections_of_the_readme() -> None:
    text = "# Title\nIntro.\n## One\n1\n### Below\n## Two\n2\n"
    assert section(text, "One") == "## One\n1\n### Below\n"
    assert without_sections(text, "One", "Two") == "# Title\nIntro.\n"
    with pytest.raises(LookupError, match=r"no section 'Three'.*docs/site/pages\.py"):
        section(text, "Three")


@pytest.mark.parametrize("uri", sorted(set(MADE) - {"reference/command-line.md"}))
def test_made_pages_begin_with_a_title(uri: str) -> None:
    assert re.match(r"(---\n.*?---\n\n)?# \S", MADE[uri].text(), re.DOTALL)
    assert MADE[uri].source == "examples/README.md" or (ROOT / MADE[uri].source).exists()


def test_environment_page_has_every_variable() -> None:
    declared = {value.name for value in vars(env).values() if isinstance(value, env.Variable)}
    source = (ROOT / "src" / "lockstep" / "env.py").read_text()
    sections = variables(source)
    assert {name for one in sections for name, _ in one.variables} == declared
    assert all(name.startswith("LOCKSTEP_") for name, _ in sections[0].variables)
    assert "/proc/&lt;pid>/fd" in environment_page(source)


def test_every_command_is_shown() -> None:
    assert {command.split()[0] for command in COMMANDS if command} == set(cli._COMMANDS)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ('<script src="https://a.b/c.js"></script>', ["https://a.b/c.js"]),
        ('<link rel="stylesheet" href="//a.b/c.css">', ["//a.b/c.css"]),
        ('<link rel="preconnect" href="https://fonts">', ["https://fonts"]),
        ('<p style="background: url(http://a/b.png)">', ["http://a/b.png"]),
        ("<style>@import 'https://a/b.css';</style>", ["https://a/b.css"]),
        ('<img src="a.png"><a href="https://a.b">there</a><link rel="canonical" href="https://a.b">', []),
    ],
)
def test_what_a_page_loads_from_elsewhere(page: str, expected: list[str]) -> None:
    assert foreign_in_page(page) == expected


def test_what_a_site_loads_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<pre class="mermaid">graph</pre>')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.css").write_text("p { background: url('https://a/b.png') }")
    assert foreign_in_site(tmp_path) == [
        "a.html: mermaid, which the theme loads from a CDN",
        "b/c.css: https://a/b.png",
    ]
    assert foreign_in_style((ROOT / "docs" / "assets" / "site.css").read_text()) == []
