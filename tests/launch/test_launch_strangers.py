"""A stranger at the port where the launchers of a job meet: what he writes is refused, and the job continues."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from launching import Launches, wait_until
from lockstep.launch.free_port import find_free_port
from lockstep.launch.hosts.job_store import JobStore
from lockstep.launch.hosts.options import HostsConfig
from lockstep.launch.hosts.rendezvous import HostRendezvous
from lockstep.secret import Secret
from lockstep.testing import limit_s

pytestmark = pytest.mark.usefixtures("warm_launchers")

RUN_ID = "job7"
TOKEN = "0123456789abcdef" * 4
WORK = """
token = os.environ.get("LOCKSTEP_TOKEN")
print("has", "a" if token else "no", "token", flush=True)
with open(f"token-{RANK}", "w") as file:
    file.write(str(token))
open(f"up-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{RANK}", "w").close()
while not os.path.exists("end"):
    time.sleep(0.01)
"""
FORGED = {
    "terms": {"min_nodes": 2, "max_nodes": 2, "max_restarts": 0},
    "is_running": True,
    "closed": "the stranger says so",
    "exit_code": 0,
}
WARNING = "lockstep: warning: a process without this job's token connected to 127.0.0.1, port "


class Job:
    """Two launchers with one rank each.

    Args:
        launches: starts them.
        token: of the job; None for none.
        between: called once the first launcher is there, before the second comes.
    """

    def __init__(
        self, launches: Launches, token: str | None, port: int = 0, between: Callable[[Job], None] = lambda job: None
    ) -> None:
        self.launches = launches
        self.port = port or find_free_port()
        self._script = launches.script(WORK)
        if token is not None:
            (launches.folder / "secret").write_text(f"{token}\n")
            (launches.folder / "secret").chmod(0o600)
        self._conf = "" if token is None else ",token_file=secret"
        self.launchers = [self.start(0)]
        between(self)
        self.launchers.append(self.start(1))
        wait_until(lambda: all((launches.folder / f"up-0-{rank}").exists() for rank in range(2)), "it runs", 60)

    def start(self, number: int, conf: str | None = None, **options: object) -> subprocess.Popen[str]:
        times = f"keep_alive_interval={limit_s(0.2):.2f},keep_alive_max_attempt=20,join_timeout={limit_s(60):.0f}"
        conf = self._conf if conf is None else conf
        meet = ("--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", RUN_ID, f"--rdzv-conf={times}{conf}")
        return self.launches.start("--nnodes", "2", *meet, "--nproc", "1", self._script, **options)

    def stranger(self) -> dist.Store:
        """The launchers' store as whoever reaches the port has it."""
        store = dist.TCPStore(
            "127.0.0.1", self.port, None, False, timedelta(seconds=limit_s(10)), wait_for_workers=False
        )
        return dist.PrefixStore(f"lockstep/{RUN_ID}", store)

    def can_connect(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def end(self) -> list[tuple[int, str, str]]:
        """Let it end: exit code, stdout and stderr of each launcher."""
        (self.launches.folder / "end").touch()
        ends = []
        for process in self.launchers:
            out, err = process.communicate(timeout=limit_s(60))
            ends.append((process.returncode, out, re.sub(r"lockstep: waiting for the launcher at .*\n", "", err)))
        return ends


def settled(job: Job, store: dist.Store, key: str, wrong: bytes) -> None:
    """Wait until what the stranger wrote has been put back."""
    wait_until(lambda: store.check([key]) and store.get(key) != wrong, f"{key} is put back", 30)
    assert all(process.poll() is None for process in job.launchers)


def overwrite(value: bytes, key: str = "membership") -> Callable[[Job, dist.Store], None]:
    def do(job: Job, store: dist.Store) -> None:
        store.set(key, value)
        settled(job, store, key, value)

    return do


def remove(job: Job, store: dist.Store) -> None:
    store.delete_key("membership")
    settled(job, store, "membership", b"")


def replay(job: Job, store: dist.Store) -> None:
    """What the launchers have written themselves, but before."""
    old = store.get("membership")
    job.launchers.append(job.start(2))  # which changes the state: there is another host that waits
    wait_until(lambda: store.get("membership") != old, "another host is there", 60)
    store.set("membership", old)
    settled(job, store, "membership", old)


STRANGERS = {
    "closed": overwrite(json.dumps(FORGED).encode()),
    "garbage": overwrite(b"not json"),
    "bytes": overwrite(b"\x80\x04\xff\x00"),
    "birth": overwrite(b"none", "birth"),
    "master": overwrite(b"[]", "round0/master"),
    "removed": remove,
    "replay": replay,
}


@pytest.mark.parametrize("what", STRANGERS)
def test_job_goes_on(what: str, launches: Launches) -> None:
    """Its launchers ended with code 0 and no line, or by a JSONDecodeError."""
    job = Job(launches, TOKEN)
    STRANGERS[what](job, job.stranger())
    ends = job.end()
    assert [code for code, _, _ in ends] == [0] * len(ends), ends
    said = "".join(err for _, _, err in ends)
    assert said.count(WARNING) == 1, said
    assert "rejected, and the job continues" in said
    assert not (launches.folder / "up-1-0").exists(), "no rank was started again"


def test_without_a_token_other_programs_are_refused_too(launches: Launches) -> None:
    job = Job(launches, None)
    overwrite(json.dumps(FORGED).encode())(job, job.stranger())
    ends = job.end()
    assert [(code, out.count("has no token")) for code, out, _ in ends] == [(0, 1), (0, 1)]
    assert "this job has no token" not in "".join(err for _, _, err in ends), "nobody reaches a loopback address"


def recording(port: int) -> dict[str, str]:
    """What a stranger reads at the end of a job of the same name, at the same port and with the same token."""
    config = HostsConfig(2, 2, "127.0.0.1", port, is_holder=True, run_id=RUN_ID, secret=Secret(TOKEN))
    store = JobStore.open(config, time.sleep)
    rendezvous = HostRendezvous(config, store, 1, 0, time.sleep)
    rendezvous.close("the job is done", 0)
    found = {key: store.raw(key) for key in ("birth", "membership")}
    rendezvous.shutdown()
    return found


def test_recording_of_an_earlier_job_ends_no_launcher(launches: Launches) -> None:
    """Who came to a store with an earlier job's values ended with code 0 and no line, or was parted from the others."""
    port, is_over = find_free_port(), threading.Event()
    earlier = recording(port)

    def replay_all(job: Job) -> None:
        wait_until(lambda: job.can_connect(), "the first launcher is there", 60)
        store = job.stranger()
        wait_until(lambda: store.check(["membership"]), "it has begun", 60)
        for key, value in earlier.items():
            store.set(key, value)
        threading.Thread(target=keep_nonce, args=(store,)).start()

    def keep_nonce(store: dist.Store) -> None:
        while not is_over.wait(0.01):
            store.set("birth", earlier["birth"])

    try:
        job = Job(launches, TOKEN, port, replay_all)
    finally:
        is_over.set()
    ends = job.end()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "rejected, and the job continues" in "".join(err for _, _, err in ends)


def test_job_that_was_over_before_a_launcher_came_is_no_success(launches: Launches) -> None:
    """It ended with code 0 and no line, as if its ranks had run."""
    port = find_free_port()
    config = HostsConfig(2, 2, "127.0.0.1", port, is_holder=True, run_id=RUN_ID, secret=Secret(TOKEN))
    rendezvous = HostRendezvous(config, JobStore.open(config, time.sleep), 1, 0, time.sleep)
    rendezvous.close("the job is done", 0)
    (launches.folder / "secret").write_text(f"{TOKEN}\n")
    (launches.folder / "secret").chmod(0o600)
    meet = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", RUN_ID, "--rdzv-conf=is_host=0,token_file=secret")
    done = launches.run("--nnodes", "2", *meet, "--nproc", "1", launches.script("pass"))
    rendezvous.shutdown()
    assert done.returncode == 1
    assert "the job was over before this host took part in it (the job is done)" in done.stderr


def test_launchers_without_the_token_are_refused_by_name(launches: Launches) -> None:
    """One has none, the other one of its own; they are patient at the same time."""
    job = Job(launches, TOKEN)
    for other in [job.start(2, conf) for conf in ("", ",token_file=other")]:
        _, err = other.communicate(timeout=limit_s(60))
        assert other.returncode == 2, err
        assert "cannot join the job at 127.0.0.1, port " in err
        assert "it was made with another token" in err
        assert "Traceback" not in err
    ends = job.end()
    assert [code for code, _, _ in ends] == [0, 0]
    assert "would take part: a launcher that calls itself" in ends[0][2] + ends[1][2]


def test_token_shows_nowhere(launches: Launches) -> None:
    """Not on a command line, in what a launcher prints, in a report or in a file of the job; but ranks have one."""
    job = Job(launches, TOKEN)
    tokens = {(launches.folder / f"token-{rank}").read_text() for rank in range(2)}
    (derived,) = tokens
    assert len(derived) == 64
    assert derived != TOKEN, "ranks have a key of their own"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        assert TOKEN.encode() not in text
        assert derived.encode() not in text
    store = job.stranger()
    values = [store.get(key) for key in ("membership", "birth", "round0/master")]
    assert all(derived.encode() not in value and TOKEN.encode() not in value for value in values)
    for path in launches.temporary.rglob("*"):
        if path.is_file() and not path.is_fifo():
            assert derived.encode() not in path.read_bytes()
    job.launchers[1].send_signal(signal.SIGUSR1)  # says where its ranks are
    for code, out, err in job.end():
        assert code == 0
        assert TOKEN not in out + err
        assert derived not in out + err


def test_launcher_of_one_host_makes_no_token_up(launches: Launches) -> None:
    """Two such launchers may have the ranks of one job, which meet by an address: each would have another."""
    script = launches.script("token = os.environ.get('LOCKSTEP_TOKEN', ''); print(len(token), token != 'x' * 64)")
    done = launches.run("--nproc", "2", script, env=launches.environment(LOCKSTEP_TOKEN="x" * 64))
    assert sorted(done.stdout.splitlines()) == ["[0] 64 True", "[1] 64 True"], done.stderr
    done = launches.run("--nproc", "2", script)
    assert sorted(done.stdout.splitlines()) == ["[0] 0 True", "[1] 0 True"], done.stderr


def test_file_without_a_token_is_a_launch_error(launches: Launches) -> None:
    (launches.folder / "secret").touch(mode=0o600)
    script = launches.script("pass")
    done = launches.run(
        "--nnodes=2", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-conf=token_file=secret", "--nproc=1", script
    )
    assert done.returncode != 0
    assert "--rdzv-conf has token_file=secret holds no token" in done.stderr
    assert "Traceback" not in done.stderr
