"""The launcher as a Python class: what it leaves in the process that calls it, which is nothing."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest

from launching import Launches, children_of
from lockstep.errors import LaunchError
from lockstep.launch import LaunchConfig, Supervisor, launch_job, local_workers, process
from lockstep.testing import limit_s

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCHLD)


def traces() -> object:
    """What a launch could leave in this process."""
    gc.collect()  # what earlier tests have left has descriptors
    descriptors = len(os.listdir("/proc/self/fd"))
    return (
        [signal.getsignal(number) for number in SIGNALS],
        descriptors,
        children_of(os.getpid()),
        threading.active_count(),
    )


@pytest.fixture
def config(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    monkeypatch.setattr("tempfile.tempdir", str(launches.temporary))
    script = launches.script("print(sys.argv[1], os.environ['EXTRA']); sys.exit(int(sys.argv[1]))")
    variables = {**os.environ, "EXTRA": "x"}
    return LaunchConfig(target=str(launches.folder / script), args=("3",), nproc=1, environment=variables)


def test_launch_job_leaves_no_trace(config: LaunchConfig, capfd: pytest.CaptureFixture[str]) -> None:
    before = traces()
    assert launch_job(config) == 3
    assert traces() == before
    out, err = capfd.readouterr()
    assert out == "[0] 3 x\n"
    assert "exited with code 3" in err


def test_launch_from_a_thread(config: LaunchConfig) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(launch_job(config)))
    thread.start()
    thread.join(timeout=limit_s(30))
    assert codes == [3]


def test_rank_that_cannot_be_started(config: LaunchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()
    monkeypatch.setattr(local_workers, "worker_command_line", lambda: ("/missing/python",))
    with pytest.raises(LaunchError, match="rank 0: cannot start /missing/python"):
        launch_job(config)
    assert traces() == before


def test_reaper_that_cannot_be_started(config: LaunchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()
    monkeypatch.setattr("sys.executable", "/missing/python")
    with pytest.raises(LaunchError, match=r"cannot start another process: .*missing"):
        launch_job(config)
    assert traces() == before


def test_second_rank_that_cannot_be_started(
    config: LaunchConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first one, which was started, is ended."""
    before = traces()
    watched: list[int] = []

    def fail_second(pid: int) -> int:
        watched.append(pid)
        if len(watched) == 2:
            raise OSError("no more")
        return pidfd_open(pid)

    pidfd_open = os.pidfd_open
    monkeypatch.setattr(process.os, "pidfd_open", fail_second)
    with pytest.raises(LaunchError, match="rank 1: cannot watch its process: no more"):
        launch_job(LaunchConfig(target=config.target, args=("0",), nproc=2, environment=config.environment))
    monkeypatch.undo()
    assert traces() == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in watched[:2])


@pytest.mark.parametrize("refused", ["local_workers.Relay.attach", "attempt.selectors.DefaultSelector"])
def test_too_many_ranks_for_the_descriptors(
    config: LaunchConfig, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    before = traces()

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(f"lockstep.launch.{refused}", fail)
    with pytest.raises(LaunchError, match=r"cannot (start 1|watch) ranks: .*Too many open files; .*ulimit -n"):
        launch_job(config)
    assert traces() == before


def test_no_room_for_a_thread(config: LaunchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("lockstep.launch.output.threading.Thread.start", fail)
    with pytest.raises(LaunchError, match=r"can't start new thread; raise the limit on processes \(ulimit -u"):
        launch_job(config)
    assert traces() == before


def test_options_are_checked_before_anything_is_made(launches: Launches) -> None:
    with pytest.raises(LaunchError, match="nproc is 0"):
        Supervisor(LaunchConfig(target=__file__, nproc=0))
    with pytest.raises(LaunchError, match="not found"):
        Supervisor(LaunchConfig(target="missing.py"))
    assert not launches.leftovers()
