"""A launcher for each test, and proof afterwards that nothing was left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
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
def bystander() -> Iterator[int]:
    """A process that has nothing to do with any job; must survive."""
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield process.pid
    survived = process.poll() is None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert survived, "a process outside of the job was killed"


@pytest.fixture
def warm_launchers(launches: Launches, warm: WarmLauncher) -> None:
    """Launchers of several hosts import torch; here they are forked from a process that has. Ranks start as ever."""
    launches.warm, launches.forks = warm, False


@pytest.fixture
def forked(launches: Launches, warm: WarmLauncher) -> None:
    """The ranks of this test are forked, too; how theirs are started is the subject of others."""
    launches.warm = warm
