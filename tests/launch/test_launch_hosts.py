"""Jobs on several hosts, which here are several launchers on one machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from launching import NOTE_PID, Launches, children_of, is_alive, wait_until
from lockstep.launch.rendezvous import find_free_port

RULE = "=" * 88
# Short, so that a test need not wait long: a host is given up after 2 s.
QUICK = "--rdzv-conf=keep_alive_interval=0.2,keep_alive_max_attempt=10,last_call_timeout=0.5,join_timeout=60"

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
    deadline = time.monotonic() + 60
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

    def start(self, number: int, *arguments: str, **options: object) -> subprocess.Popen[str]:
        if self._fixed:
            meet = ("--master-addr", "127.0.0.1", "--master-port", str(self._port), "--node-rank", str(number))
        else:
            meet = ("--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-backend", "c10d", "--rdzv-id", "job7")
        return self._launches.start("--nnodes", self._nnodes, *meet, QUICK, *arguments, **options)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for(launches: Launches, *names: str) -> list[int]:
    """Pids in these files, waited for."""
    wait_until(lambda: all((launches.folder / name).exists() for name in names), f"{names} are there", 60)
    return launches.pids(*names)


def verdict_of(stderr: str) -> str:
    _, block, after = stderr.rsplit(RULE, 2)
    assert after == "\n", "the verdict is the last word"
    return block.strip("\n")


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


def test_first_failure_is_the_verdict_on_all_hosts(launches: Launches) -> None:
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
        verdict = verdict_of(err)
        assert re.match(r"lockstep: rank 2 \(pid \d+ on \S+\) failed with ValueError at script.py:\d+: second", verdict)
        assert verdict.endswith("\nValueError: second time")
        assert "Traceback (most recent call last):" in verdict
    assert verdict_of(ends[0][2]) == verdict_of(ends[1][2])


@pytest.mark.usefixtures("bystander")
def test_hosts_come_and_go(launches: Launches) -> None:
    """One begins alone; another joins, is killed, joins again; the first is killed; another takes its place, leaves."""
    hosts = Hosts(launches, "1:2")
    script = launches.script(WORK + "wait('never')")
    first = hosts.start(0, "--nproc", "1", script)
    wait_for(launches, "round0-rank0of1")

    second = hosts.start(1, "--nproc", "2", script)
    pids = wait_for(launches, *(f"round1-rank{rank}of3" for rank in range(3)))
    assert children_of(first.pid)[-1] == pids[0], "rank 0 stays on the host that was there first"
    family = [*pids[1:], *children_of(second.pid)]
    second.kill()
    wait_until(lambda: not any(map(is_alive, family)), "the ranks of a killed launcher are gone", 3)
    took_s = wait_until(lambda: (launches.folder / "round2-rank0of1").exists(), "it goes on alone", 15)
    assert took_s > 1, "not before the host is known to be lost"

    third = hosts.start(1, "--nproc", "2", script)
    pids = wait_for(launches, *(f"round3-rank{rank}of3" for rank in range(3)))
    first.kill()
    wait_until(lambda: not is_alive(pids[0]), "the rank of a killed launcher is gone", 3)
    wait_for(launches, *(f"round4-rank{rank}of2" for rank in range(2)))

    # Time for those that have met elsewhere to find it.
    patient = QUICK.replace("last_call_timeout=0.5", "last_call_timeout=30")
    fourth = hosts.start(2, "--nproc", "1", patient, script)
    wait_for(launches, *(f"round5-rank{rank}of3" for rank in range(3)))
    fourth.send_signal(signal.SIGTERM)
    assert end_of(fourth)[0::2] == (143, "")
    pids = wait_for(launches, *(f"round6-rank{rank}of2" for rank in range(2)))

    third.send_signal(signal.SIGINT)
    code, out, err = end_of(third)
    assert code == 130
    assert not any(map(is_alive, pids))
    sizes = [json.loads(line[4:])[0]["WORLD_SIZE"] for line in out.splitlines()]
    assert sizes == ["3", "3", "2", "2", "3", "3", "2", "2"]
    again = "; starting all ranks again with the hosts that are there"
    gone = "lockstep: the launcher at PLACE, where the launchers meet, is gone or cannot be reached; the hosts that are"
    assert [spell(line) for line in first_said(first) + err.splitlines()] == [
        f"lockstep: {second.pid} came{again}",
        f"lockstep: {second.pid} was lost, without a sign of life{again}",
        f"lockstep: {third.pid} came{again}",
        f"{gone} left meet elsewhere",
        f"lockstep: the host of the meeting place was lost{again}",
        f"lockstep: the first meeting place is back{again}",
        f"lockstep: {fourth.pid} was told to end (SIGTERM){again}",
        "lockstep: the launcher that holds the store at PLACE was told to end; the hosts that are left meet elsewhere",
    ], "and nothing for Ctrl-C"


def first_said(process: subprocess.Popen[str]) -> list[str]:
    """What a killed launcher had said on stderr."""
    return process.communicate(timeout=30)[1].splitlines()


def spell(line: str) -> str:
    """A line of a launcher with hosts as pids, and without what differs from run to run."""
    line = re.sub(r"host \S+ \(launcher pid (\d+)\)", r"\1", line)
    line = re.sub(r"reached \(.*\); the", "reached; the", line)
    return re.sub(r"127\.0\.0\.1, port \d+", "PLACE", line)


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
    assert ends[0][2].endswith(f"launcher pid {one.pid}) was told to end (SIGINT); the job ends here too\n")
    assert ends[1][2] == ""
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


def test_a_lost_host_that_is_needed_is_the_verdict(launches: Launches) -> None:
    hosts = Hosts(launches, "2", fixed=True)
    script = launches.script(WORK + "wait('never')")
    zero, one = (hosts.start(number, "--nproc", "1", "--grace", "2", script) for number in range(2))
    pids = wait_for(launches, "round0-rank0of2", "round0-rank1of2")
    one.kill()
    code, _, err = end_of(zero)
    assert code == 1
    assert not any(map(is_alive, pids))
    assert re.search(
        rf"{RULE}\nlockstep: host \S+ \(node rank 1, launcher pid {one.pid}\) was lost, and the job needs 2 hosts\n",
        err,
    )
