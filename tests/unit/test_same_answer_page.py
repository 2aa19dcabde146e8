"""Every row of docs/same-answer.md is a test, and every such test has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "same-answer.md").read_text()
FILES = ("test_same_answer.py", "test_another_answer.py")
TESTS = "\n".join((ROOT / "tests" / "parity" / name).read_text().replace("from __future__", "# ") for name in FILES)


def anchors() -> list[str]:
    """Of the rows of the table, and of the sections, which GitHub makes from their titles."""
    sections = [title.lower().replace(" ", "-") for title in re.findall(r"^### (.+)$", PAGE, re.MULTILINE)]
    return re.findall(r'^\| <a id="([a-z-]+)"></a>', PAGE, re.MULTILINE) + sections


def test_every_row_is_a_test() -> None:
    names = [node.name for node in ast.parse(TESTS).body if isinstance(node, ast.FunctionDef)]
    tests = [name.removeprefix("test_").replace("_", "-") for name in names if name.startswith("test_")]
    assert len(set(anchors())) == len(anchors())
    assert sorted(anchors()) == sorted(tests)


def test_links_within_the_page_lead_somewhere() -> None:
    assert set(re.findall(r"\]\(#([a-z-]+)\)", PAGE)) <= set(anchors())


def test_blocks_of_code_are_python() -> None:
    blocks = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        ends_open = block.rstrip().splitlines()[-1].split("#")[0].rstrip().endswith(":")
        ast.parse(f"{block}    pass" if ends_open else block)
