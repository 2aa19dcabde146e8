"""The fixtures of tests that launch scripts, which the conftest.py of each of their folders takes from here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_launcher import WarmLauncher

from launching import Launches, wait_until

__all__ = ["forked", "launches"]


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    """A launcher for each test, and proof afterwards that nothing was left behind."""
    runner = Launches(tmp_path)
    try:
        yield runner
    finally:
        runner.close()
    wait_until(lambda: not runner.leftovers(), "private folders are removed", 5)


@pytest.fixture
def forked(launches: Launches, warm: WarmLauncher) -> None:
    """The ranks of this test are forked, too; how theirs are started is the subject of others."""
    launches.warm = warm
