"""What tests of launches share: a launcher for each, forked ones, and a process that must survive them all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from warm_launcher import WarmLauncher

from launch_fixtures import forked, launches
from launching import Launches

__all__ = ["forked", "launches"]


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
