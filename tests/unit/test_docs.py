"""The pages that people read: what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_every_example_is_in_the_table() -> None:
    page = (ROOT / "docs" / "seeds.md").read_text()
    missing = [path.name for path in (ROOT / "examples").glob("*.py") if f"examples/{path.name}" not in page]
    assert sorted(missing) == ["accelerate_train.py", "language_model.py", "train.py", "trainer.py"], (
        "these are no listing's; README names them"
    )
