"""Systems that lack what Lockstep builds on: one process trains, several talk over gloo, and the launcher says no."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.env import snapshot
from lockstep.launch.free_port import find_free_port

LACKING = Path(__file__).with_name("lacking.py")
PROGRAM = Path(__file__).with_name("training_anywhere.py")


def _start(system: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(LACKING), system, str(PROGRAM), str(folder)],
        env={**snapshot(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program prints on this system, where nothing is hidden."""
    process = _start("linux", tmp_path_factory.mktemp("linux"))
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert output.splitlines()[0] == "lockstep"
    return output.splitlines()[1]


@pytest.mark.parametrize(
    ("system", "backend", "launcher"),
    [
        ("macos", "gloo", "lockstep starts processes on Linux only, and this is macOS"),
        ("windows", "gloo", "lockstep starts processes on Linux only, and this is Windows"),
        ("sandbox", "lockstep", "this system refuses pidfd_open"),
    ],
)
def test_one_process_trains(system: str, backend: str, launcher: str, answer: str, tmp_path: Path) -> None:
    process = _start(system, tmp_path)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    first, second, *refusals = output.splitlines()
    assert (first, second) == (backend, answer)
    assert len(refusals) == 2  # of `lockstep run`, and of `lockstep.spawn`
    assert all(refusal.startswith(launcher) for refusal in refusals)
    assert "gloo" not in errors  # which loses nothing here


@pytest.mark.parametrize("system", ["macos", "sandbox"])
def test_two_processes_train(system: str, answer: str, tmp_path: Path) -> None:
    port = find_free_port()
    ranks = [
        _start(
            system,
            tmp_path,
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for rank in range(2)
    ]
    ends = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    backend = "gloo" if system == "macos" else "lockstep"
    for output, _ in ends:
        assert output.splitlines()[0] == backend
        assert float(output.splitlines()[1]) == pytest.approx(float(answer), rel=1e-12)
    said = [errors.count("This job's ranks talk over gloo: the same answers, but slower") for _, errors in ends]
    assert said == ([1, 0] if system == "macos" else [0, 0])


def test_explicit_backend_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep import errors, init

    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(errors.BackendUnavailable, match="needs Linux, and this is macOS"):
        init("lockstep", device="cpu")


def test_descriptors_that_run_out_are_no_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.launch import support

    def refuse(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    support.check()
