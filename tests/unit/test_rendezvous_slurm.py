"""The place to meet that every task of a Slurm step works out alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from lockstep.errors import RendezvousError
from lockstep.launch.free_port import find_free_port
from lockstep.rendezvous import folder, tcp, waiting
from lockstep.rendezvous.slurm import master_address, master_port, rendezvous_name
from lockstep.testing import limit_s
from lockstep.topology.slurm import SlurmStep

WAITS = "rank 0 is waiting for rank 1, rank 2 to connect to "
UNKNOWN = "no-such-host.invalid"
STEP = SlurmStep(
    job_id=7,
    step_id=0,
    restart_count=0,
    rank=1,
    local_rank=0,
    node_rank=1,
    tasks_per_node=(1, 1),
    hosts=(UNKNOWN, "n2"),
)


def with_changes(**changes: object) -> SlurmStep:
    return dataclasses.replace(STEP, **changes)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm whose answer is in the file `answer`; arguments are left in `arguments`."""
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/answer\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_port_is_of_the_job_and_the_step() -> None:
    assert master_port(STEP) == 20_007
    assert master_port(with_changes(step_id=2)) == 20_007 + 2 * 997
    assert master_port(with_changes(restart_count=1)) == master_port(STEP)


def test_neighbours_get_different_ports_below_those_of_the_kernel() -> None:
    first = 123_456_789
    jobs = {master_port(with_changes(job_id=first + number)) for number in range(12_768)}
    steps = {master_port(with_changes(job_id=first, step_id=number)) for number in range(12_768)}
    assert jobs == steps == set(range(20_000, 32_768))


def test_name_is_of_one_start_of_one_step_of_one_user() -> None:
    names = {rendezvous_name(STEP)} | {
        rendezvous_name(with_changes(**{field: 9})) for field in ("job_id", "step_id", "restart_count")
    }
    assert len(names) == 4
    assert rendezvous_name(STEP) == rendezvous_name(with_changes(rank=0, local_rank=1)), "the same for every task"
    assert all(f"-{os.geteuid()}-" in name and "/" not in name for name in names)


def test_name_that_resolves_is_taken_as_it_is(scontrol: Path) -> None:
    assert master_address(with_changes(hosts=("localhost", "n2"))) == "localhost"
    assert not (scontrol / "arguments").exists(), "Slurm was asked for what the name service knows"


def test_slurm_knows_what_the_name_service_does_not(scontrol: Path) -> None:
    (scontrol / "answer").write_text(f"NodeName={UNKNOWN} Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=vm Port=6818\n")
    assert master_address(STEP) == "127.0.0.1"
    assert (scontrol / "arguments").read_text().split() == ["show", "node", "--oneliner", UNKNOWN]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (f"NodeName={UNKNOWN} NodeAddr={UNKNOWN} Port=1", f"its NodeAddr in Slurm, {UNKNOWN}, is not known either"),
        (f"Node {UNKNOWN} not found", f"does not give its NodeAddr \\(Node {UNKNOWN} not found\\)"),
        ("", r"does not give its NodeAddr \(no output\)"),
    ],
)
def test_no_address_at_all(scontrol: Path, answer: str, message: str) -> None:
    (scontrol / "answer").write_text(answer)
    with pytest.raises(RendezvousError, match=f"host {UNKNOWN}, where rank 0 runs.*{message}.*Set MASTER_ADDR"):
        master_address(STEP)


def test_no_slurm_to_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RendezvousError, match=r"scontrol, which would know, is not installed here\. Set MASTER_ADDR"):
        master_address(STEP)


def test_no_hosts() -> None:
    with pytest.raises(RendezvousError, match=r"SLURM_STEP_NODELIST is not set.*set MASTER_ADDR"):
        master_address(with_changes(hosts=()))


def test_rank_zero_elsewhere() -> None:
    with pytest.raises(RendezvousError, match=rf"rank 0 runs on n2, but .* look for it on {UNKNOWN}.*MASTER_ADDR"):
        master_address(with_changes(rank=0))


def test_launchers_may_ask_without_torch() -> None:
    program = "import sys, lockstep.rendezvous.slurm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=limit_s(60)).returncode == 0


# ---- waiting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "port"])
def test_rank_zero_says_for_whom_it_waits(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody has started the script once, in a shell of a step: the deadline is half an hour away."""
    monkeypatch.setattr(waiting, "SAY_AFTER_S", 0.02)
    monkeypatch.setattr(folder.tempfile, "gettempdir", lambda: str(tmp_path))
    limit = timedelta(seconds=0.2)
    meet = {
        "folder": lambda: folder.open_store("lockstep-test-waiting", 0, 3, limit),
        "port": lambda: tcp.open_store("127.0.0.1", find_free_port(), 0, 3, limit),
    }
    with pytest.raises(RendezvousError, match="rank 1, rank 2 did not come"):
        meet[kind]()
    (line,) = capsys.readouterr().err.splitlines()
    assert WAITS in line
    assert "srun, mpirun or `lockstep run --nproc N script.py` starts all ranks" in line


def test_a_rank_says_that_it_does_not_reach_rank_zero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "SAY_AFTER_S", 0.02)
    with pytest.raises(
        RendezvousError, match=r"did not meet the others.* No host is known by the name no-such-host\.invalid"
    ):
        tcp.open_store("no-such-host.invalid", find_free_port(), 1, 2, timedelta(seconds=0.5))
    assert "rank 1 cannot reach rank 0 yet, at no-such-host.invalid, port" in (said := capsys.readouterr().err)
    assert "No host is known by the name no-such-host.invalid here" in said
