"""`lockstep run` on test hosts: names that resolve, an address of its own for each, and a host that is gone at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from netns_harness import Cluster, Host, cluster, needs_namespaces

pytestmark = needs_namespaces

QUICK = "--rdzv-conf=keep_alive_interval=0.2,keep_alive_max_attempt=15,last_call_timeout=0.5,join_timeout=60"
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


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


class Job:
    """Launchers of one job in a folder that all test hosts see.

    Args:
        folder: where they run and write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(textwrap.dedent(TRAIN))
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a launcher; what it and its ranks say is in files of the host's name."""
        words = [sys.executable, "-m", "lockstep", "run", QUICK, *arguments, "train.py"]
        # Whoever enters other mounts begins at their root.
        command = host.namespaces.enter("sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *words)
        with open(self.folder / f"{host.name}.out", "ab") as out, open(self.folder / f"{host.name}.err", "ab") as err:
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables)
        self._processes.append(process)
        return process

    def lines(self, host: Host) -> list[list[object]]:
        """What the ranks of a host have said."""
        text = (self.folder / f"{host.name}.out").read_text()
        return [json.loads(line.partition(" ")[2]) for line in text.splitlines() if line.startswith("[")]

    def said(self, host: Host) -> str:
        """What the launcher of a host has said, and its ranks on stderr."""
        return (self.folder / f"{host.name}.err").read_text()

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    try:
        yield made
    finally:
        made.close()


def wait_until(condition: Callable[[], object], job: Job, hosts: Cluster) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError([(job.lines(host), job.said(host)) for host in hosts.hosts])
        time.sleep(0.02)


def test_a_host_that_loses_its_power_is_done_without(job: Job, hosts: Cluster) -> None:
    """Nothing says that it is gone: no connection is closed. The other host goes on alone, from where the job began."""
    one, two = hosts.hosts
    arguments = ("--nnodes", "1:2", "--rdzv-endpoint", f"{one.name}:29401")
    first = job.start(one, "--nproc", "1", *arguments)
    job.start(two, "--nproc", "2", *arguments)
    wait_until(lambda: any(line[3] == 3 for line in job.lines(one)) and len(job.lines(two)) >= 2, job, hosts)
    ((count, *found),) = [line for line in job.lines(one) if line[3] == 3]
    assert found == [one.name, 0, 3, 0, 1, one.name, "lockstep", 6.0]
    others = sorted(line[1:] for line in job.lines(two) if line[3] == 3)
    assert others == [[two.name, rank, 3, 1, 2, one.name, "lockstep", 6.0] for rank in (1, 2)]

    two.close()
    wait_until(lambda: job.lines(one)[-1][3] == 1, job, hosts)
    again, *found = job.lines(one)[-1]
    assert int(str(again)) == int(str(count)) + 1
    assert found == [one.name, 0, 1, 0, 1, one.name, "lockstep", 1.0]
    assert f"lockstep: host {two.name} (launcher pid " in job.said(one)
    assert " was lost, without a sign of life; starting all ranks again with the hosts that are there" in job.said(one)
    (job.folder / "stop").touch()
    assert first.wait(30) == 0
