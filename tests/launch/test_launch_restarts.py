"""Restarts work every time: twenty in a row, of ranks that meet by torch's `env://` and by `lockstep.init()`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warm_launcher import WarmLauncher

from launching import Launches
from lockstep.launch.free_port import find_free_port
from lockstep.testing import limit_s
from restarting import RESTARTS

SCRIPT = str(Path(__file__).with_name("restarting.py"))


def lines_of(output: str) -> list[str]:
    return [line.removeprefix("[0] ") for line in output.splitlines()]


def check(stdout: str, stderr: str, backend: str, by: str) -> None:
    assert lines_of(stdout) == [f"attempt {count}: 6 on {backend}" for count in range(RESTARTS + 1)], stderr[-3000:]
    told = [line for line in stderr.splitlines() if line.startswith("lockstep: ")]
    assert len(told) == RESTARTS
    for count, line in enumerate(told):
        killed = rf"lockstep: rank {count % 2} \(pid \d+{by}\) was killed by signal 9 \(SIGKILL; out of memory\?\)"
        assert re.match(killed, line), line
        assert line.endswith(f"(restart {count + 1} of {RESTARTS})")


@pytest.mark.timeout(150)
def test_restarts_of_two_hosts(launches: Launches, warm: WarmLauncher) -> None:
    """20 of 20, and the 21st start succeeds. torchrun with the same first half fails in 4 of 6 jobs."""
    launches.warm = warm
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(find_free_port()))
    arguments = ("--nproc", "1", "--max-restarts", str(RESTARTS), SCRIPT)
    one, zero = (launches.start(*place, "--node-rank", number, *arguments) for number in "10")
    out, err = zero.communicate(timeout=limit_s(120))
    assert zero.returncode == 0, err[-3000:]
    check(out, err, "lockstep", r" on \S+")
    printed, also_printed = one.communicate(timeout=limit_s(30))
    assert one.returncode == 0
    # It says once that it waits, if it was there a second before the other.
    lines = re.sub(r"lockstep: waiting for the launcher at .*\n", "", printed + also_printed).splitlines()
    assert len(lines) == RESTARTS, "a line of each restart, and nothing of its ranks"
