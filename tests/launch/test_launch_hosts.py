"""Jobs on several hosts, which here are several launchers on one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest

from launching import NOTE_PID, Launches, children_of, is_alive, wait_until
from lockstep.launch.free_port import find_free_port
from lockstep.rank_status import EXIT_STOPPED
from lockstep.testing import limit_s

RULE = "=" * 88


# Each but the one with uneven ranks, which starts interpreters as users do.
warm_launchers = pytest.mark.usefixtures("warm_launchers")

# Short, so that a test need not wait long: on a quiet machine a host is given up after 2 s.
HEARTBEAT_S, HEARTBEATS = 0.2, 10


# Each rank writes down where it stands, one file per round, and waits until the test lets it end.
WORK = (
    NOTE_PID
    + """
import json
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
         "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS")
found = {name: os.environ[name] for name in names}
round_number = int(found["TORCHELASTIC_RESTART_COUNT"])
place = (os.environ["MASTER_PORT"], os.path.isdir(os.environ["LOCKSTEP_RENDEZVOUS"]))
print(json.dumps([found, place]), flush=True)
note(f"round{round_number}-rank{RANK}of{found['WORLD_SIZE']}")
def wait(name):
    deadline = time.monotonic() + 600
    while not os.path.exists(name) and time.monotonic() < deadline:
        time.sleep(0.01)
"""
)


class Hosts:
    """Launchers of one job.

    Args:
        launches: starts them.
        nnodes: what they are told.
        fixed: tell them where to meet by `--master-addr`, each with a number.
    """

    def __init__(self, launches: Launches, nnodes: str, fixed: bool = False) -> None:
        self._launches = launches
        self._nnodes = nnodes
        self._fixed = fixed
        self._port = find_free_port()
        self._heartbeat_s = limit_s(HEARTBEAT_S)  # the same for all

    def start(self, number: int, *arguments: str, last_call_s: float = 0.5, **options: object) -> subprocess.Popen[str]:
        heartbeat = f"keep_alive_interval={self._heartbeat_s:.2f},keep_alive_max_attempt={HEARTBEATS}"
        times = f"--rdzv-conf={heartbeat},last_call_timeout={last_call_s},join_timeout={limit_s(60):.0f}"
        if self._fixed:
            meet = ("--master-addr", "127.0.0.1", "--master-port", str(self._port), "--node-rank", str(number))
        else:
            meet = ("--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-backend", "c10d", "--rdzv-id", "job7")
        return self._launches.start("--nnodes", self._nnodes, *meet, times, *arguments, **options)


# What a launcher says that was told to end, by a signal or by Ctrl-C.
TOLD = re.compile(r"lockstep: (SIGTERM|Ctrl-C): stopping; ranks have [^\n]*\n")


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, which says nothing of waiting."""
    out, err = process.communicate(timeout=limit_s(60))
    return process.returncode, out, without_waiting(err)


def wait_for(launches: Launches, *names: str) -> list[int]:
    """Pids in these files, waited for."""
    wait_until(lambda: all((launches.folder / name).exists() for name in names), f"{names} are there", 60)
    return launches.pids(*names)


def summary_of(stderr: str) -> str:
    _, block, after = stderr.rsplit(RULE, 2)
    assert after == "\n", "the failure summary is the last word"
    return block.strip("\n")


def without_waiting(stderr: str) -> str:
    """Without what a launcher says that has waited for another for a second, as on a busy machine."""
    return re.sub(r"lockstep: waiting for the launcher at .*\n", "", stderr)


def without_pids(text: str) -> str:
    return re.sub(r"pid \d+", "pid N", text)


def test_two_hosts_with_uneven_ranks(launches: Launches) -> None:
    """Numbers are in order of the hosts, and every variable is there; output has ranks of the whole job in front."""
    hosts = Hosts(launches, "2", fixed=True)
    script = launches.script(WORK)
    one = hosts.start(1, "--nproc", "1", "--log-dir", "logs", script)
    zero = hosts.start(0, "--nproc", "2", script)
    code, out, err = end_of(zero)
    assert (code, err) == (0, "")
    lines = {int(line[1]): json.loads(line[4:]) for line in out.splitlines()}
    code, out, err = end_of(one)
    assert (code, out) == (0, "")
    assert err == "lockstep: output goes to logs/rank*.log, one file per rank\n"
    lines[2] = json.loads((launches.folder / "logs/rank2.log").read_text())
    assert sorted(lines) == [0, 1, 2]
    assert len({port for _, (port, _) in lines.values()}) == 1
    for rank, (found, (_, has_folder)) in lines.items():
        assert has_folder
        cores = int(found.pop("OMP_NUM_THREADS"))
        assert cores >= 1
        assert found == {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2" if rank < 2 else "1",
            "GROUP_RANK": str(rank // 2),
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "lockstep",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }


@warm_launchers
def test_first_failure_is_the_root_cause_on_all_hosts(launches: Launches) -> None:
    """Once the restarts are used up; the ranks of the other host are stopped although they noticed nothing."""
    hosts = Hosts(launches, "2", fixed=True)
    script = launches.script(
        WORK
        + """
if RANK == 2:
    wait(f"round{round_number}-rank0of3")
    if round_number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("second time")
wait("never")
"""
    )
    arguments = ("--max-restarts", "1", "--grace", "3", script)
    one = hosts.start(1, "--nproc", "1", *arguments)
    zero = hosts.start(0, "--nproc", "2", *arguments)
    ends = [end_of(zero), end_of(one)]
    pids = wait_for(launches, *(f"round{count}-rank{rank}of3" for count in range(2) for rank in range(3)))
    assert not any(map(is_alive, pids))
    assert [code for code, _, _ in ends] == [1, 1]
    for _, _, err in ends:
        first, *_ = err.splitlines() if "second time" not in err.splitlines()[0] else [""]
        assert re.match(
            r"lockstep: rank 2 \(pid \d+ on \S+\) was killed by signal 9 \(SIGKILL; out of memory\?\)", first
        )
        assert first.endswith("; starting all ranks again (restart 1 of 1)")
        summary = summary_of(err)
        assert re.match(r"lockstep: rank 2 \(pid \d+ on \S+\) failed with ValueError at script.py:\d+: second", summary)
    elsewhere, here = (summary_of(err).splitlines() for _, _, err in ends)
    assert elsewhere[0] == here[0]
    assert elsewhere[1:] == [f"lockstep: the launcher on {socket.gethostname()} shows the traceback of rank 2"]
    assert (here[-1], ends[1][2].count("Traceback")) == ("ValueError: second time", 1), "once, not by the rank, too"
    assert "Traceback" not in ends[0][2]


@pytest.mark.usefixtures("bystander")
@warm_launchers
def test_hosts_come_and_go(launches: Launches) -> None:
    """One begins alone; another joins, is killed, joins again; the first is killed; another takes its place, leaves."""
    hosts = Hosts(launches, "1:2")
    script = launches.script(WORK + "wait('never')")
    first = hosts.start(0, "--nproc", "1", script)
    number, _ = wait_for_round(launches, 1)

    second = hosts.start(1, "--nproc", "2", script)
    number, pids = wait_for_round(launches, 3, after=number)
    assert children_of(first.pid)[-1] == pids[0], "rank 0 stays on the host that was there first"
    family = [*pids[1:], *children_of(second.pid)]
    start = time.monotonic()
    second.kill()
    wait_until(lambda: not any(map(is_alive, family)), "the ranks of a killed launcher are gone", 3)
    number, _ = wait_for_round(launches, 1, after=number)
    assert time.monotonic() - start > 1, "not before the host is known to be lost"

    third = hosts.start(1, "--nproc", "2", script)
    number, pids = wait_for_round(launches, 3, after=number)
    first.kill()
    wait_until(lambda: not is_alive(pids[0]), "the rank of a killed launcher is gone", 3)
    number, _ = wait_for_round(launches, 2, after=number)

    # Time for those that have met elsewhere to find it.
    fourth = hosts.start(2, "--nproc", "1", script, last_call_s=30)
    number, _ = wait_for_round(launches, 3, after=number)
    fourth.send_signal(signal.SIGTERM)
    code, _, err = end_of(fourth)
    assert code == 143
    assert TOLD.fullmatch(err)
    _, pids = wait_for_round(launches, 2, after=number)

    third.send_signal(signal.SIGINT)
    code, out, err = end_of(third)
    assert code == 130
    assert not any(map(is_alive, pids))
    sizes = [json.loads(line[4:])[0]["WORLD_SIZE"] for line in out.splitlines()]
    assert sizes == ["3", "3", "2", "2", "3", "3", "2", "2"]
    again = "; starting all ranks again with the hosts that are there"
    gone = (
        "lockstep: the launcher at PLACE, where the launchers meet, is gone or cannot be reached; the remaining hosts"
    )
    assert [spell(line) for line in first_said(first) + TOLD.sub("", err).splitlines()] == [
        f"lockstep: {second.pid} came{again}",
        f"lockstep: {second.pid} was lost, without a sign of life{again}",
        f"lockstep: {third.pid} came{again}",
        f"{gone} meet elsewhere",
        f"lockstep: the host of the rendezvous endpoint was lost{again}",
        f"lockstep: the first rendezvous endpoint is back{again}",
        f"lockstep: {fourth.pid} was told to end (SIGTERM){again}",
        "lockstep: the launcher that holds the store at PLACE was told to end; the remaining hosts meet elsewhere",
    ]


@warm_launchers
def test_log_of_a_killed_launcher_is_kept_by_who_takes_its_ranks(launches: Launches) -> None:
    hosts = Hosts(launches, "1:2")
    script = launches.script(WORK + "wait('never')")
    first = hosts.start(0, "--nproc", "1", "--log-dir", "logs", script)
    number, _ = wait_for_round(launches, 1)
    second = hosts.start(1, "--nproc", "1", "--log-dir", "logs", script)
    number, _ = wait_for_round(launches, 2, after=number)
    first.kill()
    wait_for_round(launches, 1, after=number)
    second.send_signal(signal.SIGTERM)
    assert end_of(second)[0] == 143
    lines = (launches.folder / "logs/rank0.log").read_text().splitlines()
    assert [json.loads(line)[0]["WORLD_SIZE"] for line in lines if line.startswith("[")] == ["1", "2", "1"]


def wait_for_round(launches: Launches, world_size: int, after: int = -1) -> tuple[int, list[int]]:
    """The number of the first round behind `after` with so many ranks that all have begun, and their pids."""

    def begun() -> list[int]:
        files = [re.fullmatch(rf"round(\d+)-rank\d+of{world_size}", path.name) for path in launches.folder.iterdir()]
        ranks = Counter(int(found[1]) for found in files if found)
        return sorted(number for number, count in ranks.items() if number > after and count == world_size)

    wait_until(begun, f"a round of {world_size} ranks, after {after}, has begun", 60)
    number = begun()[0]
    return number, launches.pids(*(f"round{number}-rank{rank}of{world_size}" for rank in range(world_size)))


def first_said(process: subprocess.Popen[str]) -> list[str]:
    """What a killed launcher had said on stderr."""
    return without_waiting(process.communicate(timeout=limit_s(30))[1]).splitlines()


def spell(line: str) -> str:
    """A line of a launcher with hosts as pids, and without what differs from run to run."""
    line = re.sub(r"host \S+ \(launcher pid (\d+)\)", r"\1", line)
    line = re.sub(r"reached \(.*\); the", "reached; the", line)
    return re.sub(r"127\.0\.0\.1, port \d+", "PLACE", line)


_QUIET_LAUNCHER = """
import os, sys, types
from lockstep.launch.hosts.start import start_on_hosts

def fail_to_connect(config, hosts):
    from datetime import timedelta
    import torch.distributed as dist
    try:
        dist.TCPStore("127.0.0.1", int(config), None, False, timedelta(seconds=0.1), wait_for_workers=False)
    except dist.DistError as error:
        print("raised", os.environ.get("TORCH_CPP_LOG_LEVEL"))
    return 5

class Job(types.ModuleType):
    def __getattr__(self, name):
        if name != "launch_on_hosts":
            raise AttributeError(name)
        import torch  # as the module does whose place this takes
        return fail_to_connect

sys.modules["lockstep.launch.hosts.job"] = Job("job")
sys.exit(start_on_hosts(sys.argv[1], None))
"""


@pytest.mark.parametrize("level", [None, "WARNING"])
def test_torch_is_quiet_in_the_launcher_alone(level: str | None) -> None:
    """A store out of reach is no C++ on the terminal; the ranks, and users who ask for it, have torch's own words."""
    variables = os.environ | ({"TORCH_CPP_LOG_LEVEL": level} if level else {})
    command = [sys.executable, "-c", _QUIET_LAUNCHER, str(find_free_port())]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=limit_s(60))
    assert (done.returncode, done.stdout) == (5, f"raised {level}\n"), done.stderr
    assert ("The client socket has timed out" in done.stderr) == (level is not None)
    assert level is not None or done.stderr == ""


@pytest.mark.core
@warm_launchers
def test_two_hosts_that_need_each_other(launches: Launches) -> None:
    """A job on exactly two hosts ends on both: when one is told to end, and when the one where they meet is killed."""
    hosts = Hosts(launches, "2", fixed=True)
    script = launches.script(WORK + "wait('never')")
    zero, one = (hosts.start(number, "--nproc", "1", script) for number in range(2))
    pids = wait_for(launches, "round0-rank0of2", "round0-rank1of2")
    one.send_signal(signal.SIGINT)
    ends = [end_of(zero), end_of(one)]
    assert [code for code, _, _ in ends] == [130, 130]
    assert not any(map(is_alive, pids))
    assert without_pids(ends[0][2]).startswith("lockstep: host ")
    assert ends[0][2].count("\n") == 1, "nobody starts again"
    assert ends[0][2].endswith(f"launcher pid {one.pid}) was told to end (SIGINT); the job ends here too\n")
    assert TOLD.fullmatch(ends[1][2])
    for path in launches.folder.glob("round*"):
        path.unlink()

    zero, one = (hosts.start(number, "--nproc", "1", script) for number in range(2))
    pids = wait_for(launches, "round0-rank0of2", "round0-rank1of2")
    zero.kill()
    code, _, err = end_of(one)
    assert code == 1
    assert "the launcher at 127.0.0.1, port " in err
    assert ", where the launchers meet, is gone or cannot be reached" in err
    wait_until(lambda: not any(map(is_alive, pids)), "all ranks are gone", 3)


@warm_launchers
def test_a_lost_host_that_is_needed_is_the_root_cause(launches: Launches) -> None:
    hosts = Hosts(launches, "2", fixed=True)
    script = launches.script(WORK + "wait('never')")
    zero, one = (hosts.start(number, "--nproc", "1", "--grace", "2", script) for number in range(2))
    pids = wait_for(launches, "round0-rank0of2", "round0-rank1of2")
    one.kill()
    code, _, err = end_of(zero)
    assert code == 1
    assert not any(map(is_alive, pids))
    assert re.search(
        rf"{RULE}\nlockstep: host \S+ \(node rank 1, launcher pid {one.pid}\) was lost, and the job needs 2 hosts\n"
        rf"{RULE}\n$",
        err,
    ), "and not the rank that the launcher itself has stopped for it"


@pytest.mark.parametrize(("ends", "code"), [((0, EXIT_STOPPED), EXIT_STOPPED), ((EXIT_STOPPED, 3), 3)])
@warm_launchers
def test_ranks_that_were_told_to_stop_give_all_hosts_their_code(
    launches: Launches, ends: tuple[int, int], code: int
) -> None:
    """Whoever started a launcher, be it of another host, starts it again; but not where a rank has failed."""
    hosts = Hosts(launches, "2", fixed=True)
    script = launches.script(WORK + f"wait('go')\nsys.exit({ends}[RANK])")
    started = [hosts.start(number, "--nproc", "1", script) for number in range(2)]
    wait_for(launches, "round0-rank0of2", "round0-rank1of2")
    (launches.folder / "go").touch()
    ended = [end_of(each) for each in started]
    assert [found for found, _, _ in ended] == [code, code]
    for _, _, err in ended:
        assert (RULE in err) == (code == 3), err
        assert ("rank 1" in err and "exited with code 3" in err) == (code == 3), err
