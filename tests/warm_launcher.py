"""`lockstep` commands whose processes are forked from one that has imported torch, which costs seconds in each.

For tests of what scripts do on their ranks. The launcher and every rank are processes of their own as ever, with their
own sessions, environment and streams, and run the same code from the worker's first line on (`lockstep.launch.forked`).
How an interpreter is started for a rank is the subject of other tests.

The server is `python warm_launcher.py`. It takes a line of JSON for each command, forks it, and answers with two lines:
its pid, and its exit code when it has ended. It runs one command at a time, and ends when its stdin does.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lockstep.testing import limit_s

# The first optimizer and the first DDP of a process import torch._dynamo. lockstep.compat.install is left to the ranks,
# because it looks at the script when it is imported.
_PRELOADED = (
    *("torch._dynamo", "torch.nn.parallel", "torch.utils.data", "lockstep.parallel", "lockstep.data", "lockstep.train"),
    *("lockstep.checkpoint", "lockstep.world", "lockstep.launch.worker", "lockstep.launch.forked"),
    *("lockstep.tools.rehearse.rehearsal", "lockstep.tools.rehearse.rank"),
)


class WarmProcess:
    """A command that runs, as far as tests use `subprocess.Popen`.

    Attributes:
        args: words of the command.
        pid: of the launcher.
        returncode: None while it runs.
    """

    def __init__(
        self, server: subprocess.Popen[bytes], args: list[str], folder: Path, variables: Mapping[str, str]
    ) -> None:
        self.args = args
        self.returncode: int | None = None
        self._server = server
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [str(Path(self._folder.name, name)) for name in ("out", "err")]
        self._wrote: tuple[str, str] | None = None
        request = {"words": args, "folder": str(folder), "variables": dict(variables), "streams": self._streams}
        assert server.stdin is not None
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        self.pid = self._read(limit_s(60))

    def _read(self, timeout_s: float) -> int:
        assert self._server.stdout is not None
        descriptor, line = self._server.stdout.fileno(), b""
        if not select.select([descriptor], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout_s, *self._read_streams())
        while not line.endswith(b"\n"):
            line += os.read(descriptor, 1) or b"server has ended\n"
        return int(line)

    def _read_streams(self) -> tuple[str, str]:
        out, err = (Path(name).read_text() if Path(name).exists() else "" for name in self._streams)
        return out, err

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None:
            try:
                self.returncode = self._read(0.0)
            except subprocess.TimeoutExpired:
                return None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it to the launcher."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the launcher, whose reaper then ends the ranks."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: None = None, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it wrote to stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: it has not ended in so many seconds.
        """
        if self.returncode is None:
            self.returncode = self._read(limit_s(60) if timeout is None else timeout)
        if self._wrote is None:
            self._wrote = self._read_streams()
            self._folder.cleanup()
        return self._wrote


class WarmLauncher:
    """Starts commands. Used by one test at a time; `close` in the end."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._latest: WarmProcess | None = None

    def start(self, *words: str, folder: Path, variables: Mapping[str, str] | None = None) -> WarmProcess:
        """Start `lockstep words…` in a folder, with an environment."""
        self._end_latest()
        self._latest = WarmProcess(self._server, list(words), folder, os.environ if variables is None else variables)
        return self._latest

    def run(self, *words: str, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run `lockstep words…` to its end."""
        process = self.start(*words, folder=folder)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)

    def close(self) -> None:
        """End the server, which runs nothing then."""
        self._end_latest()
        with self._server:  # processes that tests forked since may hold its pipes: it would wait for their end
            self._server.kill()

    def _end_latest(self) -> None:
        if self._latest is not None:
            self._latest.kill()  # where its test has failed
            self._latest.communicate()


# ---- the server ---------------------------------------------------------------------------------------


def _become(request: Mapping[str, Any]) -> NoReturn:
    from lockstep import cli, env
    from lockstep.launch import supervisor

    os.setsid()
    os.chdir(request["folder"])
    env.replace(request["variables"])
    tempfile.tempdir = None

    class Forking(supervisor.Supervisor):
        def __init__(self, config: Any) -> None:
            super().__init__(dataclasses.replace(config, forks=True))

    supervisor.Supervisor = Forking  # type: ignore[misc]
    sys.exit(cli.main(request["words"]))


def _fork(request: Mapping[str, Any]) -> int:
    streams = [os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND) for name in (os.devnull, *request["streams"])]
    pid = os.fork()
    if pid == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        _run(request)
    for stream in streams:
        os.close(stream)
    return pid


def _run(request: Mapping[str, Any]) -> NoReturn:
    code = 1
    try:
        _become(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    import torch

    del sys.path[0]  # the folder of this file
    torch.set_num_threads(1)  # those of OpenMP do not outlive a fork
    for name in _PRELOADED:
        importlib.import_module(name)
    assert "lockstep.compat.install" not in sys.modules
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in iter(sys.stdin.readline, ""):
        pid = _fork(json.loads(line))
        answers.write(f"{pid}\n")
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")


if __name__ == "__main__":
    _serve()
