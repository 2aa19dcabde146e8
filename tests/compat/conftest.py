"""Programs are started as their users would start them, by the same means as in tests/launch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))
sys.path.append(str(Path(__file__).with_name("programs")))

from warm_launcher import WarmLauncher

from launching import Launches, wait_until


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    runner = Launches(tmp_path)
    try:
        yield runner
    finally:
        runner.close()
    wait_until(lambda: not runner.leftovers(), "private folders are removed", 5)


@pytest.fixture
def forked(launches: Launches, warm: WarmLauncher) -> None:
    """The ranks of this test are forked; how theirs are started is the subject of others."""
    launches.warm = warm
