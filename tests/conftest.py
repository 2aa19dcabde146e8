"""Fixtures for tests of every kind."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from warm_launcher import WarmLauncher

from lockstep.testing import limit_s

pytest_plugins = ["time_left"]

# Several ranks of most tests would ask for a GPU each, where there are any; what needs one is in tests/gpu.
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist is a `python -c`, of which ranks get functions by value; as `python -m pytest`, none."""
    if hasattr(config, "workerinput"):
        sys.modules["__main__"].__spec__ = importlib.util.find_spec("pytest.__main__")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The limit of a test, of pyproject.toml or its own, is that of a quiet machine; before pytest-timeout reads it."""
    own = item.get_closest_marker("timeout")
    seconds = float(own.args[0] if own else item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(limit_s(seconds)), append=False)
    return (yield)


def pytest_collection_finish() -> None:
    """What torch and the test modules have made is never garbage: collections, which tests ask for, pass it over."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def signals_are_not_ignored() -> Iterator[None]:
    """In the background of a shell, or under nohup, this process ignores signals, and so would all that tests start."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL}
    ignored = [number for number in usual if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmLauncher]:
    """Starts commands in processes that are forked from one that has imported torch."""
    launcher = WarmLauncher()
    yield launcher
    launcher.close()


@pytest.fixture
def tiny_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of a given size (such as "64k") and returns its folder; unmounts it after the test."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"tmpfs-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True) if os.getuid() == 0 else None
        if done is None or done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs: {'not root' if done is None else done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def shm_folder(tiny_tmpfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Makes a tmpfs of so many KiB the folder for shared memory, and returns it."""

    def make(num_kib: int) -> Path:
        path = tiny_tmpfs(f"{num_kib}k")
        monkeypatch.setenv("LOCKSTEP_SHM_DIR", str(path))
        return path

    return make
