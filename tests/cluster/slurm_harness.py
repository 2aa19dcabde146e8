"""A real Slurm with two nodes on this one machine: munge, a controller and two node daemons.

Everything lies in one private folder and listens on ports that were free a moment ago, so it
does not meet a Slurm that the machine may have. All that the daemons start carries the folder in its
environment. By that a reaper finds and kills it when the tests end, be it by kill -9.

The nodes are called n1 and n2; these names resolve nowhere, as on clusters whose names only
Slurm knows, and both lie at 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.launch.free_port import find_free_port
from lockstep.testing import limit_s

NODES = ("n1", "n2")
CPUS_PER_NODE = 4
START_S = 30.0
COMMAND_S = 60.0

_PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
_DAEMON_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
_SWEEP_S = 10.0


def why_not() -> str | None:
    """Why a cluster cannot be started here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux: Slurm's daemons start processes of other users"
    missing = {package for program, package in _PROGRAMS.items() if _find(program) is None}
    if missing:
        return f"needs the Debian packages {' and '.join(sorted(missing))} (apt-get install)"
    return None


def _find(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), *_DAEMON_FOLDERS]))


def processes_of(folder: Path) -> list[int]:
    """Pids of everything that carries the configuration in this folder in its environment."""
    mark = f"SLURM_CONF={folder / 'slurm.conf'}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def sweep(folder: Path) -> None:
    """Leave nothing of a cluster: no process, no file."""
    deadline = time.monotonic() + limit_s(_SWEEP_S)
    while (pids := processes_of(folder)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _guard(folder: str) -> None:
    """The reaper: waits for its parent to close the pipe between them, which it does when it dies."""
    sys.stdin.read()
    sweep(Path(folder))


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = COMMAND_S) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + limit_s(timeout_s)
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


_CONF = """\
ClusterName=lockstep-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
KillWait=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=second Nodes=n2 MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """A context manager: the cluster is up inside of it, and gone, with all that it started, after it.

    Attributes:
        folder: its configuration, logs and state; removed at the end.
        environment: for commands that are to reach it.
    """

    def __init__(self) -> None:
        # Short, because the path of a socket may have 108 characters only.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        # Nothing of a launcher, or of a Slurm, that these tests may run under; nor a number of threads (OMP_, OMPI_).
        outer = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "LOCKSTEP_", "OMP", "PMI")
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith(outer)}
        self.environment["SLURM_CONF"] = str(self.folder / "slurm.conf")
        self._daemons: list[subprocess.Popen[bytes]] = []
        # In a session of its own, so that Ctrl-C does not reach it; without the mark, so that it spares itself.
        self._reaper = subprocess.Popen(
            [sys.executable, __file__, str(self.folder)], stdin=subprocess.PIPE, start_new_session=True
        )

    # ---- up and down -------------------------------------------------------------------------------

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException as error:
            logs = self.logs()
            self.__exit__()
            raise AssertionError(f"the cluster does not start: {error}\n{logs}") from error
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if len(self._daemons) > 1:
                for command in (["scancel", "--quiet", "--user=root"], ["scontrol", "shutdown"]):
                    with contextlib.suppress(subprocess.SubprocessError):
                        subprocess.run(command, env=self.environment, capture_output=True, timeout=limit_s(10))
        finally:
            for daemon in reversed(self._daemons):
                _end(daemon)
            self._reaper.communicate()

    def _start(self) -> None:
        for name in ("state", *(f"{kind}-{node}" for node in NODES for kind in ("spool", "tmp"))):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        chosen: set[int] = set()
        while len(chosen) < 1 + len(NODES):
            chosen.add(find_free_port())
        controller_port, *ports = chosen
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} Gres=gpu:2"
            for node, port in zip(NODES, ports, strict=True)
        )
        conf = _CONF.format(folder=self.folder, host=host, controller_port=controller_port, nodes=nodes)
        (self.folder / "slurm.conf").write_text(conf)
        # Any device passes for a GPU: Slurm only counts them and sets CUDA_VISIBLE_DEVICES.
        gpus = ("/dev/null", "/dev/zero")
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu Flags=nvidia_gpu_env File={gpu}\n" for gpu in gpus))
        socket_path = self.folder / "munge.sock"
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        self._spawn("munged", "--foreground", "--force", *(f"--{k}={self.folder / v}" for k, v in files.items()))
        wait_until(socket_path.exists, "munged opens its socket", START_S)
        self._spawn("slurmctld", "-D", "-c")
        for node in NODES:
            self._spawn("slurmd", "-D", "-c", "-N", node)
        wait_until(self._is_up, "both nodes are idle", START_S)

    def _spawn(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}{len(self._daemons)}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [_find(program) or program, *arguments],
                    env=self.environment,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _is_up(self) -> bool:
        for daemon in self._daemons:
            if daemon.poll() is not None:
                raise AssertionError(f"{daemon.args} ended with {daemon.returncode}\n{self.logs()}")
        answer = self.run("sinfo", "--noheader", "--Node", "--format=%t", "--partition=main")
        return answer.returncode == 0 and answer.stdout.split() == ["idle"] * len(NODES)

    # ---- what tests ask ------------------------------------------------------------------------------

    def run(self, *command: str, timeout_s: float = COMMAND_S, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command that reaches the cluster; `extra` is added to its environment."""
        environment = {**self.environment, **extra}
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s(timeout_s),
        )

    def job(self, job_id: int | str) -> dict[str, str]:
        """What `scontrol show job` says."""
        line = self.run("scontrol", "show", "job", "-o", str(job_id)).stdout
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def wait_for(self, job_id: int | str, *states: str, timeout_s: float = COMMAND_S) -> dict[str, str]:
        """Wait until the job is in one of these states; what `scontrol show job` then says."""
        seen: dict[str, str] = {}

        def is_there() -> bool:
            seen.update(self.job(job_id))
            return seen.get("JobState") in states

        try:
            wait_until(is_there, f"job {job_id} is {' or '.join(states)}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {seen}\n{self.logs()}") from None
        return seen

    def logs(self) -> str:
        """The ends of all daemons' logs, for a failing test."""
        files = sorted(self.folder.glob("*.log"))
        ends = {path.name: path.read_text(errors="replace").splitlines()[-15:] for path in files}
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in ends.items())


def _end(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """Ask a daemon to stop, and make sure that it does."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    _guard(sys.argv[1])
