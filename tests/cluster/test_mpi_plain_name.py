"""`init_process_group("mpi")`, torch's own name, with a torch that has no MPI."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.bench.comm.mpi import clean_environment
from lockstep.comm.mpi import name
from lockstep.commands.run import main
from lockstep.errors import LaunchError
from lockstep.launch.mpi import is_rank_of_mpirun
from lockstep.testing import limit_s
from mpi_harness import mpirun, needs_mpi

SCRIPT = str(Path(__file__).with_name("mpi_plain_name.py"))
NEEDS_NO_MPI = pytest.mark.skipif(dist.is_mpi_available(), reason="this PyTorch has its own MPI, which is then meant")


def outcomes_in(text: str) -> list[Any]:
    """What the ranks printed as JSON, a line each; mpirun may put the lines of two into one."""
    found = []
    while text := text.lstrip():
        outcome, end = json.JSONDecoder().raw_decode(text)
        found.append(outcome)
        text = text[end:]
    return found


@needs_mpi
@NEEDS_NO_MPI
@pytest.mark.parametrize(
    "program", [(SCRIPT, "--import"), ("-m", "lockstep", "run", SCRIPT)], ids=["python", "lockstep-run"]
)
def test_plain_name_reaches_our_group(program: tuple[str, ...]) -> None:
    """Also in a script that knows nothing of Lockstep, if `lockstep run` runs it."""
    done = mpirun(2, program)
    assert done.returncode == 0, done.stderr
    ignored = "For MPI backend, world_size (0) and rank (0) are ignored since they are assigned by the MPI runtime."
    for rank, found in enumerate(sorted(outcomes_in(done.stdout))):
        assert found == [
            [rank, 2, "mpi4py", 3.0, "mpi4py", 3.0, "mpi4py", 3.0, 3.0],
            [rank, 3.0, 44.0, [ignored]],
            ["cpu:mpi", 3.0],
            False,
        ]


@needs_mpi
def test_error_is_printed_where_no_launcher_of_ours_is(tmp_path: Path) -> None:
    """Also one that our launcher would show in one line."""
    script = tmp_path / "script.py"
    script.write_text("from lockstep.errors import BackendUnavailable; raise BackendUnavailable('nothing to talk by')")
    done = mpirun(2, ("-m", "lockstep", "run", str(script)))
    assert done.returncode == 1
    assert "lockstep.errors.BackendUnavailable: nothing to talk by" in done.stderr


@needs_mpi
@NEEDS_NO_MPI
def test_our_launcher_alone_makes_no_mpi_job(tmp_path: Path) -> None:
    """Taking each rank for an MPI job of its own would train N models."""
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist; dist.init_process_group('mpi')")
    command = [sys.executable, "-m", "lockstep", "run", "--nproc", "2", str(script)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 1
    assert re.search(
        r"WORLD_SIZE is 2, but MPI knows of 1 rank\(s\): ranks of an MPI job are started by `mpirun -np 2 python "
        r"script.py`, or `mpirun -np 2 lockstep run script.py`",
        done.stderr,
    )


def test_mpirun_decides_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(LaunchError, match=r"so `lockstep run` cannot set --log-dir, --nproc: leave it out"):
        main(["--nproc", "2", "--log-dir", "x", SCRIPT])
    with pytest.raises(LaunchError, match="not found"):
        main(["nowhere.py"])
    assert not is_rank_of_mpirun({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
    two = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    assert not is_rank_of_mpirun(two | {"RANK": "0", "LOCKSTEP_RENDEZVOUS": "/tmp/x"})
    assert is_rank_of_mpirun(two | {"RANK": "0", "WORLD_SIZE": "1"})


def test_left_over_rank_starts_no_launcher_in_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would start a job of its own, and all of them would train separately."""
    left_over = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "1"}
    for variable, value in left_over.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(LaunchError, match="RANK is 0 and WORLD_SIZE is 1, but mpirun started 2 ranks: unset RANK and"):
        main([SCRIPT])


def test_torchs_own_mpi_is_left_alone() -> None:
    """Where it is built in; nothing of torch is touched."""
    torch_with_mpi = SimpleNamespace(is_mpi_available=lambda: True)
    name.register(torch_with_mpi, "mpi4py")  # type: ignore[arg-type]
    assert list(vars(torch_with_mpi)) == ["is_mpi_available"]
