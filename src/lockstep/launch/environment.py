"""The environment variables that each rank gets.

In addition to the launcher's own environment, every rank has

* `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`: its number and the number of ranks, in the job and on its
  host;
* `MASTER_ADDR`, `MASTER_PORT`: where rank 0 opens the store if the script uses torch's `env://`;
* `GROUP_RANK` and `GROUP_WORLD_SIZE`: the number of this host, and the number of hosts;
* `ROLE_NAME=default`, `ROLE_RANK`, `ROLE_WORLD_SIZE`,
  `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT`, `TORCHELASTIC_MAX_RESTARTS`,
  `TORCHELASTIC_USE_AGENT_STORE=False`, `TORCHELASTIC_ERROR_FILE`: as torchrun sets them;
* `OMP_NUM_THREADS`: cores divided by ranks on this host, at least 1; unless it is already set;
* `PYTHONHASHSEED=0`: all ranks iterate over a set of strings in the same order; unless it is already set;
* `LOCKSTEP_RENDEZVOUS`: the private folder of this attempt on this host;
* `LOCKSTEP_SHOWS_ERRORS=True`: if the launcher shows the errors of ranks, so that a rank need not;
* `LOCKSTEP_TOKEN`: the secret of the job's ranks, the same on all hosts; unless the launchers of several hosts have
  none;
* `LOCKSTEP_PARENT_PID`: the pid of the launcher; a rank with another parent exits;
* `LOCKSTEP_JOB`: the job's id, preceded by the ids of the jobs inside which it runs;
* `HOROVOD_RANK`, `HOROVOD_SIZE` and others, as set by horovodrun, if the launcher's environment has HOROVOD_SIZE.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep import env

__all__ = [
    "AttemptEnvironment",
    "new_job_id",
    "reaper_environment",
    "visible_cores",
    "visible_gpus",
    "without_launcher",
]


def new_job_id() -> str:
    """A unique name for a job: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def visible_cores() -> int:
    """Cores that this process may run on; all of the machine's if the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus(variables: Mapping[str, str], devices: str = "/dev") -> int:
    """Number of GPUs that CUDA would show to a process with these variables, determined without CUDA.

    Args:
        variables: an environment; CUDA_VISIBLE_DEVICES restricts the count in the same way as CUDA: up to the first
            entry that names no GPU.
        devices: folder with the driver's device files.
    """
    try:
        installed = sum(
            name.startswith("nvidia") and name.removeprefix("nvidia").isdigit() for name in os.listdir(devices)
        )
    except OSError:
        installed = 0
    # Read directly: set but empty means no GPU, and `get` does not distinguish that from unset.
    allowed = variables.get(env.CUDA_VISIBLE_DEVICES.name)
    if allowed is None or installed == 0:
        return installed
    count = 0
    for entry in (word.strip() for word in allowed.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def reaper_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment without the id of an outer job, whose sweep must not find the reaper.

    Without the secret as well, which the reaper does not need.
    """
    bare = dict(variables)
    env.LOCKSTEP_JOB.unset(bare)
    env.LOCKSTEP_TOKEN.unset(bare)
    return bare


@dataclass(frozen=True)
class AttemptEnvironment:
    """The common part of the environments of an attempt's ranks.

    Attributes:
        base: the environment to start from, usually the launcher's.
        job: the job's id.
        folder: the attempt's private folder.
        world_size: number of ranks, on all hosts.
        master_addr: where rank 0 listens if the script uses torch's env://.
        master_port: the port there.
        restart_count: number of attempts before this one.
        max_restarts: maximum number of restarts of the job.
        first_rank: the lowest rank on this host.
        local_world_size: number of ranks on this host; None: all ranks are here.
        node_rank: number of this host.
        num_nodes: number of hosts.
        shows_errors: whether the launcher shows the errors of ranks.
        run_id: TORCHELASTIC_RUN_ID, the same on all hosts; None for the job's id.
        token: the secret of the ranks; None if there is none that all hosts know.
    """

    base: Mapping[str, str]
    job: str
    folder: Path
    world_size: int
    master_addr: str
    master_port: int
    restart_count: int = 0
    max_restarts: int = 0
    first_rank: int = 0
    local_world_size: int | None = None
    node_rank: int = 0
    num_nodes: int = 1
    shows_errors: bool = False
    run_id: str | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def ranks(self) -> range:
        """The ranks on this host."""
        count = self.world_size if self.local_world_size is None else self.local_world_size
        return range(self.first_rank, self.first_rank + count)

    def of_rank(self, rank: int) -> dict[str, str]:
        """The complete environment of one rank."""
        variables = dict(self.base)
        env.RANK.set(rank, variables)
        env.LOCAL_RANK.set(rank - self.first_rank, variables)
        env.ROLE_RANK.set(rank, variables)
        env.LOCAL_WORLD_SIZE.set(len(self.ranks), variables)
        for size in (env.WORLD_SIZE, env.ROLE_WORLD_SIZE):
            size.set(self.world_size, variables)
        env.GROUP_RANK.set(self.node_rank, variables)
        env.GROUP_WORLD_SIZE.set(self.num_nodes, variables)
        env.ROLE_NAME.set("default", variables)
        env.MASTER_ADDR.set(self.master_addr, variables)
        env.MASTER_PORT.set(self.master_port, variables)
        env.TORCHELASTIC_RUN_ID.set(self.run_id if self.run_id is not None else self.job, variables)
        env.TORCHELASTIC_RESTART_COUNT.set(self.restart_count, variables)
        env.TORCHELASTIC_MAX_RESTARTS.set(self.max_restarts, variables)
        # Rank 0 hosts the store itself, so that each attempt has a new one.
        env.TORCHELASTIC_USE_AGENT_STORE.set("False", variables)
        env.TORCHELASTIC_ERROR_FILE.set(str(self.folder / f"torchelastic-rank{rank}.json"), variables)
        env.LOCKSTEP_RENDEZVOUS.set(str(self.folder), variables)
        env.LOCKSTEP_SHOWS_ERRORS.unset(variables)
        if self.shows_errors:
            env.LOCKSTEP_SHOWS_ERRORS.set(True, variables)
        env.LOCKSTEP_TOKEN.unset(variables)
        if self.token is not None:
            env.LOCKSTEP_TOKEN.set(self.token, variables)
        env.LOCKSTEP_PARENT_PID.set(os.getpid(), variables)
        outer = env.LOCKSTEP_JOB.get(variables)
        env.LOCKSTEP_JOB.set(f"{outer}:{self.job}" if outer else self.job, variables)
        if env.HOROVOD_SIZE.get(variables) is not None:  # set by `lockstep horovodrun`, or for a rank of such a job
            _set_horovod(variables, self)
        if env.OMP_NUM_THREADS.get(variables) is None:
            env.OMP_NUM_THREADS.set(str(max(1, visible_cores() // len(self.ranks))), variables)
        if env.PYTHONHASHSEED.get(variables) is None:
            env.PYTHONHASHSEED.set("0", variables)
        return variables


def without_launcher(variables: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that ranks get from any launcher, with their values in `variables`; None if they are not set."""
    names = AttemptEnvironment({}, "", Path(), world_size=1, master_addr="", master_port=0).of_rank(0)
    return {name: variables.get(name) for name in names if not name.startswith("LOCKSTEP_")}


def _set_horovod(variables: dict[str, str], shared: AttemptEnvironment) -> None:
    """Add the same values under Horovod's names."""
    for ours, theirs in (
        (env.RANK, env.HOROVOD_RANK),
        (env.WORLD_SIZE, env.HOROVOD_SIZE),
        (env.LOCAL_RANK, env.HOROVOD_LOCAL_RANK),
        (env.LOCAL_WORLD_SIZE, env.HOROVOD_LOCAL_SIZE),
    ):
        number = ours.get(variables)
        assert number is not None
        theirs.set(number, variables)
    env.HOROVOD_CROSS_RANK.set(shared.node_rank, variables)
    env.HOROVOD_CROSS_SIZE.set(shared.num_nodes, variables)
    env.HOROVOD_HOSTNAME.set(socket.gethostname(), variables)
