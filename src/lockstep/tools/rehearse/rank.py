"""Runs in each rank of a rehearsal, between the launcher's worker and the user's script.

`python worker.py -m lockstep.tools.rehearse.rank script.py args…` installs the stand-ins and the watchers, and then
runs the script exactly as the worker would have.
"""

from __future__ import annotations

import os
import sys

from lockstep import env
from lockstep.tools.rehearse.settings import RehearsalSettings
from lockstep.tools.rehearse.watch.recorder import recorder
from lockstep.tools.shared import run_target

__all__ = ["install", "set_variables"]

# An arbitrary job id.
_SLURM_JOB = 4711


def install() -> None:
    """Make this process part of the rehearsal, for good: install stand-ins for GPUs and all watchers."""
    from lockstep.tools.rehearse import devices, programs, spawning, watch

    settings = RehearsalSettings.load()
    if env.CUDA_VISIBLE_DEVICES.get() is None:
        # Scripts parse the list. For a driver, if there is one, it is empty: real GPUs stay hidden.
        env.CUDA_VISIBLE_DEVICES.set_in_python(",".join(map(str, range(settings.devices))), in_c="")
    devices.install(settings.devices, settings.memory_bytes)
    watch.install(with_horovod=settings.horovod)
    spawning.install()
    programs.install(settings)


def set_variables(settings: RehearsalSettings) -> None:
    """Set the variables that name this rank's node, as a launcher on several nodes would, or those of no launcher.

    Raises:
        AssertionError: RANK is not set.
    """
    rank, per_node = env.RANK.get(), settings.processes_per_node
    assert rank is not None
    node, local_rank = divmod(rank, per_node)
    if settings.plain:
        changed: dict[str, str | None] = {**env.snapshot(), **settings.plain}
        env.replace({name: text for name, text in changed.items() if text is not None})
    else:
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
    # `-m` put the current folder here; the script gets its own folder instead.
    if sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]
    settings = RehearsalSettings.load()
    recorder.rank = env.RANK.get()
    set_variables(settings)
    install()
    with recorder.watching_the_end():
        run_target(arguments, settings.local_rank_option)


if __name__ == "__main__":
    _main(sys.argv[1:])
