"""Each term of docs/glossary.md has an owner that is there, and whose docstring says it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from package_sources import modules

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
ROWS = re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \| `([\w.]+)` \|$", PAGE.read_text(), re.MULTILINE)


def test_every_line_of_the_table_is_a_term() -> None:
    assert len(ROWS) >= 50
    assert PAGE.read_text().count("\n| ") == len(ROWS) + 2, "a line that is no term, a meaning and a module"


def test_terms_are_in_order_and_there_once() -> None:
    terms = [term for term, _, _ in ROWS]
    assert terms == sorted(set(terms))


@pytest.mark.parametrize(("term", "meaning", "owner"), ROWS, ids=[term for term, _, _ in ROWS])
def test_term_has_an_owner_that_says_it(term: str, meaning: str, owner: str) -> None:
    assert owner in modules()
    words = r"[\s_\-#]+".join(re.escape(word) for word in re.split(r"[ -]", term))
    docstring = ast.get_docstring(modules()[owner].tree) or ""
    assert re.search(rf"(?i)(?<![a-z]){words}(?:e?s)?(?![a-z])", docstring), f"{owner} says nothing of {term!r}"
    assert meaning.endswith(".")
    assert meaning.count(". ") <= 1, "one or two sentences"
