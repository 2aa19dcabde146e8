"""Starts and watches the processes of a job, and leaves nothing behind. Never imports torch.

General layout:

* `support`: whether processes can be started and watched here; `standard_streams`: reopens streams that a shell closed.
* `reaper`: finds and kills every process of a job; also the program that does so when the launcher itself was killed.
* `attempt_folder`, `free_port`: the private folder of one attempt, and the port of its rank 0.
* `environment`: the variables that each rank gets; `control_groups`: a container's limits of cores and memory.
* `report`, `root_cause`, `headline`: the error report of a failing rank, which failure was first, its summary line.
* `positions`, `stacks`: where every rank is, from its status file, and from py-spy.
* `streams`, `screen`, `output`: the lines of each rank, and the output of many ranks on one terminal.
* `signals`, `process`, `attempt`: one start of all ranks, from the first fork until the last process has ended.
* `logs`, `local_workers`: the ranks of one attempt on this host, with their output and how they end.
* `config`, `supervisor`: a job, of one or several attempts; `launch_job` runs it.
* `worker`: runs inside a rank before the user's script; `program`: a rank that is not a Python script.
* `forked`: a rank that is forked from a launcher, which has imported what it needs.
* `payload`, `spawn`: the same for a Python function.
* `hosts`: a job on several hosts. A package with its own map; parts of it import torch when they are called.
* `slurm`: submits the same script as a job of a cluster; `mpi`: ranks that mpirun has started.
* `command`: error handling and exit codes of all commands.

Names are resolved lazily, because a rank imports this package on its way to the user's script.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.launch.config import LaunchConfig
    from lockstep.launch.supervisor import Supervisor, launch_job

_PUBLIC = {
    "LaunchConfig": "lockstep.launch.config",
    "Supervisor": "lockstep.launch.supervisor",
    "launch_job": "lockstep.launch.supervisor",
}

__all__ = ["LaunchConfig", "Supervisor", "launch_job"]


def __getattr__(name: str) -> object:
    module_name = _PUBLIC.get(name)
    if module_name is None:
        raise AttributeError(f"module 'lockstep.launch' has no attribute {name!r}")
    value = getattr(importlib.import_module(module_name), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
