"""What runs in a rank of a rehearsal, between the launcher's worker and the user's script.

`python worker.py -m lockstep.tools.rehearse.rank script.py args…`: puts the stand-ins in place, starts to watch, and
then runs the script exactly as the worker would have.
"""

from __future__ import annotations

import os
import sys

from lockstep import env
from lockstep.tools.rehearse.settings import RehearsalSettings
from lockstep.tools.shared import run_target

__all__ = ["install", "set_variables"]

# What a job number looks like; any will do.
_SLURM_JOB = 4711


def install() -> None:
    """Make this process one of the rehearsal: stand-ins for GPUs, and everything watched. For good."""
    from lockstep.tools.rehearse import devices, programs, spawning, watch

    settings = RehearsalSettings.load()
    if env.CUDA_VISIBLE_DEVICES.get() is None:
        # Scripts take the list apart. A driver, where there is one, is told of none of the GPUs that are really here.
        env.CUDA_VISIBLE_DEVICES.set_in_python(",".join(map(str, range(settings.devices))), in_c="")
    devices.install(settings.devices, settings.memory_bytes)
    watch.install(with_horovod=settings.horovod)
    spawning.install()
    programs.install(settings)


def set_variables(settings: RehearsalSettings) -> None:
    """Say to the script which node it is on, as the launcher of several nodes would.

    Raises:
        AssertionError: this is no rank of ours.
    """
    rank, per_node = env.RANK.get(), settings.processes_per_node
    assert rank is not None
    node, local_rank = divmod(rank, per_node)
    env.LOCAL_RANK.set(local_rank)
    env.LOCAL_WORLD_SIZE.set(per_node)
    env.GROUP_RANK.set(node)
    env.GROUP_WORLD_SIZE.set(settings.nodes)
    if not settings.slurm:
        return
    tasks = settings.nodes * per_node
    shape = f"{per_node}(x{settings.nodes})" if settings.nodes > 1 else str(per_node)
    names = "localhost" if settings.nodes == 1 else f"node[1-{settings.nodes}]"
    for job in (env.SLURM_JOB_ID, env.SLURM_JOBID):
        job.set(_SLURM_JOB)
    for step in (env.SLURM_STEP_ID, env.SLURM_STEPID):
        step.set(0)
    env.SLURM_PROCID.set(rank)
    env.SLURM_LOCALID.set(local_rank)
    env.SLURM_NODEID.set(node)
    for total in (env.SLURM_NTASKS, env.SLURM_NPROCS, env.SLURM_STEP_NUM_TASKS):
        total.set(tasks)
    for nodes in (env.SLURM_NNODES, env.SLURM_STEP_NUM_NODES):
        nodes.set(settings.nodes)
    for text in (env.SLURM_TASKS_PER_NODE, env.SLURM_STEP_TASKS_PER_NODE):
        text.set(shape)
    for listed in (env.SLURM_NODELIST, env.SLURM_JOB_NODELIST, env.SLURM_STEP_NODELIST):
        listed.set(names)
    env.SLURM_GPUS_ON_NODE.set(settings.devices)


def _main(arguments: list[str]) -> None:
    # Where `-m` put the current folder; the script gets its own.
    if sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]
    settings = RehearsalSettings.load()
    set_variables(settings)
    install()
    from lockstep.tools.rehearse.watch.recorder import recorder

    with recorder.watching_the_end():
        run_target(arguments, settings.local_rank_option)


if __name__ == "__main__":
    _main(sys.argv[1:])
