"""`lockstep run` on test hosts: names that resolve, an address of its own for each, and a host that is gone at once."""

from __future__ import annotations

import json
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_launcher import WarmLauncher, WarmProcess

from lockstep.testing import limit_s
from netns_harness import Cluster, NamespaceHost, cluster, needs_namespaces

pytestmark = needs_namespaces

DEADLINE_S = 60.0

# Adds up the ranks' numbers until rank 0 finds the file `stop`; says once in every round where it runs.
TRAIN = """
import json, os, socket, sys
import torch
import torch.distributed as dist
import lockstep

with lockstep.init(timeout=120) as world:
    told = False
    while True:
        tensor = torch.tensor([world.rank + 1.0, float(world.rank == 0 and os.path.exists("stop"))])
        dist.all_reduce(tensor)
        if not told:
            told = True
            found = [os.environ["TORCHELASTIC_RESTART_COUNT"], socket.gethostname(), world.rank, world.world_size]
            found += [world.node_rank, world.local_world_size, os.environ["MASTER_ADDR"], world.backend]
            print(json.dumps([*found, tensor[0].item()]), flush=True)
        if tensor[1].item() > 0:
            break
"""


@pytest.fixture
def hosts() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


class Job:
    """Launchers of one job in a folder that all test hosts see.

    Args:
        folder: where they run and write.
        warm: forks them and their ranks.
    """

    def __init__(self, folder: Path, warm: WarmLauncher) -> None:
        self.folder = folder
        (folder / "train.py").write_text(textwrap.dedent(TRAIN))
        self.processes: dict[str, WarmProcess] = {}
        self._warm = warm

    def start(self, host: NamespaceHost, *arguments: str) -> WarmProcess:
        """Start the launcher of a host."""
        times = (
            f"keep_alive_interval=0.2,keep_alive_max_attempt={limit_s(15):.0f},last_call_timeout=0.5,join_timeout=60"
        )
        given = [word for word in arguments if word.startswith("--rdzv-conf=")]
        times = ",".join([times, *(word.partition("=")[2] for word in given)])
        others = [word for word in arguments if word not in given]
        return self._start(host, f"--rdzv-conf={times}", *others, "train.py")

    def start_alone(self, host: NamespaceHost, *words: str) -> WarmProcess:
        """Start a script in one process."""
        return self._start(host, "--nproc", "1", *words)

    def _start(self, host: NamespaceHost, *words: str) -> WarmProcess:
        # A host without power removes nothing; what was its own lies in a folder that the test removes.
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary(host))}
        within = host.namespaces.pid
        process = self._warm.start("run", *words, folder=self.folder, variables=variables, beside=True, within=within)
        self.processes[host.name] = process
        return process

    def _temporary(self, host: NamespaceHost) -> Path:
        path = self.folder / f"{host.name}.tmp"
        path.mkdir(exist_ok=True)
        return path

    def lines(self, host: NamespaceHost) -> list[list[object]]:
        """What the ranks of a host have said."""
        lines = self.processes[host.name].wrote()[0].splitlines()
        return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("[")]

    def said(self, host: NamespaceHost) -> str:
        """What the launcher of a host has said, and its ranks on stderr."""
        return self.processes[host.name].wrote()[1]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path: Path, warm: WarmLauncher) -> Iterator[Job]:
    made = Job(tmp_path, warm)
    try:
        yield made
    finally:
        made.close()


def wait_until(condition: Callable[[], object], job: Job, hosts: Cluster) -> None:
    deadline = time.monotonic() + limit_s(DEADLINE_S)
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError([(job.lines(host), job.said(host)) for host in hosts.hosts])
        time.sleep(0.02)


def sizes(job: Job, host: NamespaceHost) -> list[object]:
    """Numbers of ranks in the rounds of a host so far."""
    return [line[3] for line in job.lines(host)]


STRANGER = """
import json, sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore(sys.argv[1], 29500, None, False, timedelta(seconds=30), wait_for_workers=False)
store.set("lockstep/lockstep/membership", json.dumps({"closed": "the stranger says so", "exit_code": 0}))
open("wrote", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("token", [True, False])
def test_stranger_is_named_by_address(token: bool, job: Job, hosts: Cluster) -> None:
    """He ended both launchers with code 0 and no line; now the job continues, and one warning says who knocked."""
    first, second, third = hosts.hosts
    (job.folder / "token").write_text("0123456789abcdef" * 4)
    (job.folder / "token").chmod(0o600)
    conf = ["--rdzv-conf=token_file=token"] if token else []
    for number, host in enumerate((first, second)):
        meet = ("--nnodes", "2", "--node-rank", str(number), "--master-addr", first.address, "--nproc", "1")
        job.start(host, *conf, *meet)
    wait_until(lambda: sizes(job, first) == sizes(job, second) == [2], job, hosts)
    assert ("this job has no token" in job.said(first)) is not token
    (job.folder / "stranger.py").write_text(STRANGER)
    job.start_alone(third, "stranger.py", first.address)
    wait_until(lambda: "It was rejected, and the job continues" in job.said(first), job, hosts)
    assert f"connected there, from no host of this job: {third.address}." in job.said(first)
    (job.folder / "stop").touch()
    launchers = [job.processes[host.name] for host in (first, second)]
    wait_until(lambda: all(launcher.poll() is not None for launcher in launchers), job, hosts)
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    assert (job.said(first) + job.said(second)).count("lockstep: warning: a process without this job's token") == 1


def test_hosts_that_lose_their_power_are_done_without(job: Job, hosts: Cluster) -> None:
    """Nothing says that they are gone: no connection is closed. First goes the host where the launchers meet."""
    one, two, three = hosts.hosts
    arguments = ("--nnodes", "1:3", "--rdzv-endpoint", f"{one.name}:29401")
    job.start(one, "--nproc", "1", *arguments)
    second = job.start(two, "--nproc", "2", *arguments)
    job.start(three, "--nproc", "1", *arguments)

    def ranks_of_four() -> dict[object, list[object]]:
        return {line[2]: line for host in hosts.hosts for line in job.lines(host) if line[3] == 4}

    wait_until(lambda: len(ranks_of_four()) == 4, job, hosts)
    found = ranks_of_four()
    (count,) = {line[0] for line in found.values()}
    owners = {host.name: [rank for rank in found if found[rank][1] == host.name] for host in hosts.hosts}
    assert sorted(map(len, owners.values())) == [1, 1, 2]
    (first,) = [host for host in hosts.hosts if host.name == found[0][1]]
    for rank, line in found.items():
        master, backend, total = line[6:]
        assert (line[5], backend, total) == (len(owners[str(line[1])]), "lockstep", 10.0)
        assert master in (first.name, first.address), rank

    one.close()
    wait_until(lambda: 3 in sizes(job, two)[-1:] and 3 in sizes(job, three)[-1:], job, hosts)
    assert ", where the launchers meet, is gone or cannot be reached" in job.said(two) + job.said(three)
    assert int(str(job.lines(two)[-1][0])) > int(str(count))

    three.close()
    wait_until(lambda: sizes(job, two)[-1] == 2, job, hosts)
    said = job.said(two)
    # It may have been where the others had met then, or the ranks missed theirs before the launcher did, and told each
    # other.
    assert (
        f"lockstep: host {three.name} (launcher pid " in said
        or said.count("; the remaining hosts meet elsewhere") == 2
        or re.search(rf"RankLost at train.py:\d+: .*rank \d \({three.name}, ", said)
    ), said
    (job.folder / "stop").touch()
    second.communicate()
    assert second.returncode == 0


# As scripts for torch.distributed.launch were written.
OLD = """
import argparse
import sys
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
dist.init_process_group(backend="gloo", init_method="env://")
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
# One write: ranks share what they print to, as with torch's launcher.
sys.stdout.write(f"{dist.get_rank()} {args.local_rank} {tensor.item()}\\n")
"""


def test_an_old_script_on_two_hosts(tmp_path: Path, hosts: Cluster, warm: WarmLauncher) -> None:
    (tmp_path / "old.py").write_text(OLD)
    first = hosts.hosts[0].address
    launchers = []
    for number, host in enumerate(hosts.hosts[:2]):
        words = ["--nproc_per_node=2", "--nnodes=2", f"--node_rank={number}", f"--master_addr={first}"]
        launchers.append(
            warm.start(
                *("launch", *words, "--master_port=29555", "old.py"),
                folder=tmp_path,
                beside=True,
                within=host.namespaces.pid,
            )
        )
    said = [launcher.communicate(timeout=limit_s(DEADLINE_S)) for launcher in launchers]
    for number, (launcher, (out, err)) in enumerate(zip(launchers, said, strict=True)):
        assert launcher.returncode == 0, err
        found = sorted(line.split()[-3:] for line in out.splitlines())
        assert found == [[str(2 * number + local), str(local), "10.0"] for local in range(2)], err
