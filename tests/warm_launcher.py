"""`lockstep` commands whose processes are forked from one that has imported torch, which costs seconds in each.

For tests of what scripts do on their ranks. The launcher and every rank are processes of their own as ever, with their
own sessions, environment and streams, and run the same code from the worker's first line on (`lockstep.launch.forked`).
How an interpreter is started for a rank is the subject of other tests.

The server is `python warm_launcher.py`. It takes a line of JSON for each command, forks it, and answers with two lines
in the command's own pipe: its pid, and its exit code when it has ended. It ends when its stdin does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from forked_modules import fork_the_ranks, fork_the_ways
from namespace_host import fork_within

from lockstep.launch.forked import empty_inherited_descriptors
from lockstep.testing import limit_s

# The first optimizer and the first DDP of a process import torch._dynamo. lockstep.compat.install is left to the ranks,
# because it looks at the script when it is imported.
_PRELOADED = (
    *("torch._dynamo", "torch.nn.parallel", "torch.utils.data", "lockstep.parallel", "lockstep.data", "lockstep.train"),
    *("lockstep.checkpoint", "lockstep.world", "lockstep.launch.worker", "lockstep.launch.forked"),
    "lockstep.launch.hosts.job",
    *("lockstep.tools.rehearse.rehearsal", "lockstep.tools.rehearse.rank"),
)
_CALL = "call"  # in the place of a command


class WarmProcess:
    """A command that runs, as far as tests use `subprocess.Popen`.

    Args:
        server: is asked to start it.
        request: what to start, but for the streams.

    Attributes:
        args: words of the command.
        pid: of the launcher.
        returncode: None while it runs.
    """

    def __init__(self, server: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
        self.args: list[str] = request["words"]
        self.returncode: int | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [str(Path(self._folder.name, name)) for name in ("out", "err")]
        self._wrote: tuple[str, str] | None = None
        answers = str(Path(self._folder.name, "answers"))
        os.mkfifo(answers)
        # Not readable before the server has opened it, too, and then at its end, be it that of the server.
        self._answers = os.open(answers, os.O_RDONLY | os.O_NONBLOCK)
        assert server.stdin is not None
        server.stdin.write(json.dumps({**request, "streams": self._streams, "answers": answers}).encode() + b"\n")
        server.stdin.flush()
        self.pid = self._read(limit_s(60))

    def _read(self, timeout_s: float) -> int:
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._answers], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout_s, *self._read_streams())
            line += os.read(self._answers, 1) or b"server has ended\n"
        return int(line)

    def wrote(self) -> tuple[str, str]:
        """What it and its ranks have written so far to stdout and stderr."""
        return self._wrote or self._read_streams()

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

    def terminate(self) -> None:
        """SIGTERM to the launcher."""
        self.send_signal(signal.SIGTERM)

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
            os.close(self._answers)
        return self._wrote


class WarmLauncher:
    """Starts commands. Used by one test at a time; `close` in the end."""

    def __init__(self) -> None:
        # Launchers of several hosts have torch's C++ quiet, which reads this once, when it is imported.
        variables = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, start_new_session=True, env=variables
        )
        self._started: list[WarmProcess] = []

    def start(
        self,
        *words: str,
        folder: Path,
        variables: Mapping[str, str] | None = None,
        forks: bool = True,
        beside: bool = False,
        within: int | None = None,
    ) -> WarmProcess:
        """Start `lockstep words…`.

        Args:
            words: of the command.
            folder: where it runs.
            variables: its whole environment; default that of the tests.
            forks: fork its ranks, too; else their interpreters start as ever, in milliseconds without torch.
            beside: do not end first what was started before.
            within: pid of a process whose namespaces it enters; what ends it is the end of these.
        """
        if not beside:
            self._end_started()
        request = {"words": list(words), "folder": str(folder), "forks": forks, "within": within}
        request["variables"] = dict(os.environ if variables is None else variables)
        self._started.append(WarmProcess(self._server, request))
        return self._started[-1]

    def run(self, *words: str, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run `lockstep words…` to its end."""
        process = self.start(*words, folder=folder)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)

    def call(self, function: Callable[..., Any], *args: object, folder: Path, **options: object) -> Any:
        """What a function of a module returns in a process of its own. The ranks that `lockstep.bench.ranks` starts for
        it are forked, too.

        Args:
            function: is imported there by its name; called as `function(*args, **options)`.
            folder: where it runs, and what is sent stands.
        """
        path = folder / "call"
        path.write_bytes(pickle.dumps(sys.path) + pickle.dumps((function, args, options)))
        process = self.start(_CALL, str(path), folder=folder)
        out, err = process.communicate(timeout=limit_s(150))
        assert process.returncode == 0, out + err
        return pickle.loads(path.read_bytes())

    def close(self) -> None:
        """End the server, which runs nothing then."""
        self._end_started()
        with self._server:  # processes that tests forked since may hold its pipes: it would wait for their end
            self._server.kill()

    def _end_started(self) -> None:
        for process in self._started:
            process.kill()  # where its test has failed
            process.communicate()
        self._started.clear()


# ---- the server ---------------------------------------------------------------------------------------


def _become(request: Mapping[str, Any]) -> NoReturn:
    from lockstep import cli, env
    from lockstep.launch.config import LaunchConfig

    if request["within"] and (child := fork_within(request["within"])):
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.setsid()
    os.chdir(request["folder"])
    env.replace(request["variables"])
    tempfile.tempdir = None
    if request["words"][0] == _CALL:
        _call(Path(request["words"][1]))
        sys.exit()
    check = LaunchConfig.check

    def check_and_fork(self: LaunchConfig) -> None:
        check(self)
        object.__setattr__(self, "forks", True)

    if request["forks"]:
        LaunchConfig.check = check_and_fork  # type: ignore[method-assign]
        if request["words"][:2] == ["bench", "strategies"]:
            fork_the_ways()
    sys.exit(cli.main(request["words"]))


def _call(path: Path) -> None:
    with path.open("rb") as file:
        sys.path[:] = pickle.load(file)  # before what is imported by it
        function, args, options = pickle.load(file)
    fork_the_ranks()
    path.write_bytes(pickle.dumps(function(*args, **options)))


def _fork(request: Mapping[str, Any]) -> int:
    streams = [os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND) for name in (os.devnull, *request["streams"])]
    pid = os.fork()
    if pid == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        empty_inherited_descriptors()  # pipes of other commands among them, which end with the server
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
    gc.freeze()  # a collection in a fork then leaves the shared pages alone: it would copy them all
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and the pipe for answers
    while True:
        for descriptor in select.select([0, *running], [], [])[0]:
            if descriptor in running:
                pid, answers = running.pop(descriptor)
                os.write(answers, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
                os.close(answers)
                os.close(descriptor)
            elif line := sys.stdin.readline():  # who asks waits for the answer: no second line is buffered
                request = json.loads(line)
                answers = os.open(request["answers"], os.O_WRONLY)
                pid = _fork(request)
                os.write(answers, f"{pid}\n".encode())
                running[os.pidfd_open(pid)] = (pid, answers)
            else:
                return


if __name__ == "__main__":
    _serve()
