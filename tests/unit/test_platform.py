"""Systems that lack what Lockstep builds on: one process trains, several talk over gloo, and the launcher says no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.env import snapshot
from lockstep.launch.free_port import find_free_port

LACKING = Path(__file__).with_name("lacking.py")
PROGRAM = Path(__file__).with_name("training_anywhere.py")


class Ended(NamedTuple):
    """What a program has written, and its exit code."""

    code: int
    output: str
    errors: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Ended]:
    """The program on every system, by it, rank and world size: forks of one process, which run at the same time."""
    folder = tmp_path_factory.mktemp("systems")
    alone = [(system, 0, 1) for system in ("linux", "macos", "windows", "sandbox")]
    keys = [*alone, *((system, rank, 2) for system in ("macos", "sandbox") for rank in range(2))]
    ports = {system: str(find_free_port()) for system in ("macos", "sandbox")}
    requests = []
    for system, rank, size in keys:
        places = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        variables = {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[system]} if size == 2 else {}
        name = str(folder / f"{system}-{rank}-{size}")
        words = [system, str(PROGRAM), str(folder / f"{system}-{size}")]
        requests.append({"words": words, "variables": variables, "streams": [f"{name}.out", f"{name}.err"]})
    done = subprocess.run(
        [sys.executable, str(LACKING)], env=snapshot(), input=json.dumps(requests), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    texts = [[Path(name).read_text() for name in request["streams"]] for request in requests]
    codes = json.loads(done.stdout)
    return {key: Ended(code, *text) for key, code, text in zip(keys, codes, texts, strict=True)}


@pytest.fixture(scope="module")
def answer(ended: dict[tuple[str, int, int], Ended]) -> str:
    """What the program prints on this system, where nothing is hidden."""
    code, output, errors = ended["linux", 0, 1]
    assert code == 0, errors
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
def test_one_process_trains(
    system: str, backend: str, launcher: str, answer: str, ended: dict[tuple[str, int, int], Ended]
) -> None:
    code, output, errors = ended[system, 0, 1]
    assert code == 0, errors
    first, second, *refusals = output.splitlines()
    assert (first, second) == (backend, answer)
    assert len(refusals) == 2  # of `lockstep run`, and of `lockstep.spawn`
    assert all(refusal.startswith(launcher) for refusal in refusals)
    assert "gloo" not in errors  # which loses nothing here


@pytest.mark.parametrize("system", ["macos", "sandbox"])
def test_two_processes_train(system: str, answer: str, ended: dict[tuple[str, int, int], Ended]) -> None:
    ranks = [ended[system, rank, 2] for rank in range(2)]
    assert [rank.code for rank in ranks] == [0, 0], ranks
    backend = "gloo" if system == "macos" else "lockstep"
    for _, output, _ in ranks:
        assert output.splitlines()[0] == backend
        assert float(output.splitlines()[1]) == pytest.approx(float(answer), rel=1e-12)
    said = [errors.count("This job's ranks use gloo: same results, but slower") for _, _, errors in ranks]
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
