"""Restarts work every time: twenty in a row, of ranks that meet by torch's `env://` and by `lockstep.init()`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launching import Launches
from lockstep.launch.free_port import find_free_port
from lockstep.testing import limit_s
from restarting import RESTARTS

SCRIPT = str(Path(__file__).with_name("restarting.py"))
TIMEOUT_S = 230.0


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


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_restarts_of_two_hosts(launches: Launches) -> None:
    """20 of 20, and the 21st start succeeds. torchrun with the same first half fails in 4 of 6 jobs."""
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(find_free_port()))
    arguments = ("--nproc", "1", "--max-restarts", str(RESTARTS), SCRIPT)
    variables = launches.environment(OMP_NUM_THREADS="1")
    printed = launches.folder / "one"
    with printed.open("w") as file:
        # Into a file: nobody reads a pipe while the other is read, and a launcher waits for who reads its lines.
        one = launches.start(*place, "--node-rank", "1", *arguments, env=variables, stdout=file, stderr=file)
    zero = launches.start(*place, "--node-rank", "0", *arguments, env=variables)
    out, err = zero.communicate(timeout=limit_s(TIMEOUT_S))
    assert zero.returncode == 0, err[-3000:]
    check(out, err, "lockstep", r" on \S+")
    assert one.wait(timeout=limit_s(30)) == 0
    # It says once that it waits, if it was there a second before the other.
    printed_lines = re.sub(r"lockstep: waiting for the launcher at .*\n", "", printed.read_text()).splitlines()
    assert len(printed_lines) == RESTARTS, "a line of each restart, and nothing of its ranks"
