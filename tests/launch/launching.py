"""Real launches of small scripts, in a folder of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from warm_launcher import WarmLauncher, WarmProcess

from lockstep.testing import limit_s

DEADLINE_S = 30.0


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = DEADLINE_S) -> float:
    """Wait for a condition, so long as it may take on a quiet machine (`limit_s`); the seconds it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s and time.monotonic() - start > limit_s(timeout_s):
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - start


def is_alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def children_of(pid: int) -> list[int]:
    """Pids of the direct children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Launches:
    """Runs `python -m lockstep` in a folder of its own, with its own folder for temporary files.

    Attributes:
        warm: what starts it instead, where a test has set this; see warm_launcher.py.
        forks: whether that forks the ranks, too; those that import no torch start as soon as ever.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.warm: WarmLauncher | None = None
        self.forks = True
        self._running: list[subprocess.Popen[str] | WarmProcess] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script; its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "import os, sys, time, signal\nRANK = int(os.environ['RANK'])\n" + textwrap.dedent(text).lstrip("\n")
        )
        return name

    def environment(self, **extra: str) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary), **extra}

    def start(self, *arguments: str, command: str = "run", **options: object) -> subprocess.Popen[str] | WarmProcess:
        """Start and return; ended at the end of the test at the latest."""
        if self.warm is not None:
            variables = options.pop("env", self.environment())
            assert not options
            forked = self.warm.start(
                command, *arguments, folder=self.folder, variables=variables, forks=self.forks, beside=True
            )
            self._running.append(forked)
            return forked
        settings = {
            "cwd": self.folder,
            "env": self.environment(),
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            **options,
        }
        process = subprocess.Popen([sys.executable, "-m", "lockstep", command, *arguments], **settings)
        self._running.append(process)
        return process

    def run(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Start and wait for the end."""
        text = options.pop("input", None)
        if text is not None:
            options["stdin"] = subprocess.PIPE
        process = self.start(*arguments, **options)
        out, err = process.communicate(text, timeout=limit_s(DEADLINE_S))
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def pids(self, *names: str) -> list[int]:
        """Pids that ranks wrote into files of these names, waited for while anything that was started runs."""
        paths = [self.folder / name for name in names]

        def are_written() -> bool:
            return all(path.exists() and path.read_text().endswith("\n") for path in paths)

        try:
            wait_until(lambda: are_written() or self._is_over(), f"{', '.join(names)} is written")
            assert are_written(), f"all has ended, and not all of {', '.join(names)} is written"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._last_words()}") from None
        return [int(path.read_text()) for path in paths]

    def _is_over(self) -> bool:
        return bool(self._running) and all(process.poll() is not None for process in self._running)

    def _last_words(self) -> str:
        """End what runs by SIGABRT to the ranks, which makes them write their stacks; what was written to stderr."""
        for process in self._running:
            for pid in children_of(process.pid) if process.poll() is None else []:
                os.kill(pid, signal.SIGABRT)
        try:
            return "\n".join(process.communicate(timeout=limit_s(DEADLINE_S))[1] or "" for process in self._running)
        except subprocess.TimeoutExpired as error:
            return f"and it does not end: {error}"

    def leftovers(self) -> list[str]:
        """What is left of private folders."""
        return [path.name for path in self.temporary.glob("lockstep-*")]

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.communicate()


# For scripts: writes the pid of the calling process to a file, so that a test can watch it.
NOTE_PID = """
def note(name, pid=None):
    with open(name + ".draft", "w") as file:
        file.write(f"{pid or os.getpid()}\\n")
    os.rename(name + ".draft", name)
"""
