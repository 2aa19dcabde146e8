"""Reads a Slurm task's rank in its step from the variables that `srun` sets.

[Note: inside a step] Only `srun` starts one process per task. The shell of `sbatch` or `salloc` is a single process,
though Slurm describes the whole job to it: in a batch script SLURM_PROCID is 0 and SLURM_NTASKS is what the job
requested. Reading these as rank and world size would wait for ranks that are never started. The differences between a
task of a step and that shell are:

* SLURM_STEP_ID is set, and is not one of the numbers that Slurm reserves for special steps, one of which is the shell
  that `salloc` opens on a node.
* None of its ancestors is an interactive shell. `srun --pty bash` opens one as task 0 of a step, and what is started
  there is a single process, whatever the number of tasks. The environment only says that there may be such a shell.
* The step's own count of tasks agrees with SLURM_NTASKS. A batch script that was submitted from inside a step inherits
  that step's variables, while SLURM_NTASKS always describes what is running now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lockstep import env
from lockstep.errors import SetupError
from lockstep.topology.processes import name_and_parent
from lockstep.topology.slurm_forms import expand_counts, expand_hosts
from lockstep.topology.topology import Topology

__all__ = ["SlurmStep", "describe_allocation", "is_in_a_shell_of_slurm", "read_slurm", "read_step", "topology_of_step"]

_T = TypeVar("_T")

_LAUNCHER = "slurm"
_STEP_DAEMON = "slurmstepd"
_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh", "tcsh", "csh", "fish"})

# Steps without user tasks: batch script, interactive shell, extern, pending (slurm.h).
_FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class SlurmStep:
    """One task, and its step.

    Attributes:
        job_id: number of the job.
        step_id: number of the step within the job.
        restart_count: how often the job has been restarted.
        rank: number of this task, 0 … num_tasks-1.
        local_rank: number of this task on its node.
        node_rank: number of its node.
        tasks_per_node: number of tasks on each node.
        hosts: names of the nodes; empty if Slurm does not provide them.
    """

    job_id: int
    step_id: int
    restart_count: int
    rank: int
    local_rank: int
    node_rank: int
    tasks_per_node: tuple[int, ...]
    hosts: tuple[str, ...]

    @property
    def num_tasks(self) -> int:
        """Number of tasks of the step, over all nodes."""
        return sum(self.tasks_per_node)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the step."""
        return len(self.tasks_per_node)

    def topology(self) -> Topology:
        """The topology with one rank per task."""
        return Topology(
            self.rank,
            self.num_tasks,
            self.local_rank,
            self.tasks_per_node[self.node_rank],
            self.node_rank,
            self.num_nodes,
            _LAUNCHER,
            self.hosts,
        )


def read_slurm(variables: Mapping[str, str]) -> Topology | None:
    """The topology with one rank per task of a step; None outside of a step. See [Note: inside a step].

    Raises:
        SetupError: the variables contradict each other.
    """
    step = read_step(variables)
    return None if step is None else step.topology()


def read_step(variables: Mapping[str, str]) -> SlurmStep | None:
    """The step of which this process is a task, or None. See [Note: inside a step].

    Raises:
        SetupError: the variables contradict each other, or do not have Slurm's format.
    """
    if not _is_inside_step(variables):
        return None
    num_tasks = _need(variables, env.SLURM_STEP_NUM_TASKS, env.SLURM_NTASKS, env.SLURM_NPROCS)
    num_nodes = _first(variables, env.SLURM_STEP_NUM_NODES, env.SLURM_NNODES) or 1
    tasks_per_node = _expand(variables, expand_counts, env.SLURM_STEP_TASKS_PER_NODE, env.SLURM_TASKS_PER_NODE)
    if not tasks_per_node and num_nodes == 1:
        tasks_per_node = (num_tasks,)
    if len(tasks_per_node) != num_nodes or sum(tasks_per_node) != num_tasks:
        raise SetupError(
            f"Slurm's variables contradict each other: {num_tasks} tasks on {num_nodes} nodes, but tasks per node are "
            f"{list(tasks_per_node)} (SLURM_STEP_TASKS_PER_NODE). Start the script with one srun, without --het-group"
        )
    hosts = _expand(variables, expand_hosts, env.SLURM_STEP_NODELIST, env.SLURM_JOB_NODELIST, env.SLURM_NODELIST)
    step = SlurmStep(
        job_id=_need(variables, env.SLURM_JOB_ID, env.SLURM_JOBID),
        step_id=_need(variables, env.SLURM_STEP_ID, env.SLURM_STEPID),
        restart_count=env.SLURM_RESTART_COUNT.get(variables) or 0,
        rank=_need(variables, env.SLURM_PROCID),
        local_rank=_need(variables, env.SLURM_LOCALID),
        node_rank=_need(variables, env.SLURM_NODEID),
        tasks_per_node=tasks_per_node,
        # If the step's list is missing, the job's list can only be used if they are the same.
        hosts=hosts if len(hosts) == num_nodes else (),
    )
    if not 0 <= step.node_rank < num_nodes:
        raise SetupError(
            f"SLURM_NODEID is {step.node_rank}, but the step has {num_nodes} nodes: expected 0 … {num_nodes - 1}"
        )
    return step


def topology_of_step(variables: Mapping[str, str], rank: int, world_size: int) -> Topology | None:
    """The position of a rank whose number was given by hand, if it can be derived from the step.

    It can if the numbers are the step's own, or if each node has one task that has started the same number of ranks,
    counted node by node: a script that spawns one process per GPU.

    Args:
        variables: the environment.

    Returns:
        None outside of a step, or if rank and world size are unrelated to it.

    Raises:
        SetupError: Slurm's variables contradict each other.
    """
    step = read_step(variables)
    if step is None:
        return None
    if (rank, world_size) == (step.rank, step.num_tasks):
        return step.topology()
    ranks_per_node, rest = divmod(world_size, step.num_nodes)
    if max(step.tasks_per_node) > 1 or rest or not ranks_per_node or rank // ranks_per_node != step.node_rank:
        return None
    local_rank = rank % ranks_per_node
    return Topology(rank, world_size, local_rank, ranks_per_node, step.node_rank, step.num_nodes, _LAUNCHER, step.hosts)


def describe_allocation(variables: Mapping[str, str]) -> str | None:
    """For a single process: the unused allocation of its Slurm job. None outside of a job.

    >>> describe_allocation({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"})
    'job 7 of Slurm has 4 tasks on 2 nodes'
    """
    job_id = _first(variables, env.SLURM_JOB_ID, env.SLURM_JOBID)
    num_tasks = _first(variables, env.SLURM_NTASKS, env.SLURM_NPROCS) or 1
    num_nodes = _first(variables, env.SLURM_NNODES) or 1
    if job_id is None or _is_inside_step(variables) or max(num_tasks, num_nodes) == 1:
        return None
    # Without --ntasks Slurm starts one task per node.
    num_tasks = max(num_tasks, num_nodes)
    return f"job {job_id} of Slurm has {num_tasks} tasks on {num_nodes} {'node' if num_nodes == 1 else 'nodes'}"


def _is_inside_step(variables: Mapping[str, str]) -> bool:
    """See [Note: inside a step]."""
    step_id = _first(variables, env.SLURM_STEP_ID, env.SLURM_STEPID)
    if step_id is None or step_id >= _FIRST_RESERVED_STEP or env.SLURM_PROCID.get(variables) is None:
        return False
    now = _first(variables, env.SLURM_NTASKS, env.SLURM_NPROCS)
    of_step = env.SLURM_STEP_NUM_TASKS.get(variables)
    if not (now is None or of_step is None or now == of_step):
        return False
    return not (_may_have_a_shell(variables) and is_in_a_shell_of_slurm(os.getppid()))


def _may_have_a_shell(variables: Mapping[str, str]) -> bool:
    """Whether this is the task to which `srun --pty` gives a terminal."""
    return env.SLURM_PTY_PORT.get(variables) is not None and env.SLURM_PROCID.get(variables) == 0


def is_in_a_shell_of_slurm(pid: int) -> bool:
    """Whether that process of a Slurm step, or one of its ancestors, is an interactive shell."""
    while pid > 1:
        try:
            name, parent = name_and_parent(pid)
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[1:-1]
        except OSError:
            return False
        if name == _STEP_DAEMON:
            return False
        if name in _SHELLS and all(_begins_a_dialog(word) for word in words):
            return True
        pid = parent
    return False


def _begins_a_dialog(word: str) -> bool:
    """Whether a word after the name of a shell is neither a script nor `-c`."""
    return word.startswith("--") or (word.startswith("-") and "c" not in word)


def _first(variables: Mapping[str, str], *names: env.Variable[int]) -> int | None:
    """The value of the first of these variables that is set; None if none is."""
    return next((value for name in names if (value := name.get(variables)) is not None), None)


def _need(variables: Mapping[str, str], *names: env.Variable[int]) -> int:
    value = _first(variables, *names)
    if value is None:
        raise SetupError(
            f"{names[0].name} is not set, but SLURM_STEP_ID is: a task of Slurm has both. Start the script with srun, "
            "and let containers and wrappers pass all variables that begin with SLURM_"
        )
    return value


def _expand(
    variables: Mapping[str, str], expand: Callable[[str], tuple[_T, ...]], *names: env.Variable[str]
) -> tuple[_T, ...]:
    """The first of these variables that is set, expanded; empty if none is."""
    for name in names:
        text = name.get(variables)
        if text is not None:
            try:
                return expand(text)
            except ValueError as error:
                raise SetupError(f"environment variable {name.name}={text!r} {error}. {name.doc}") from None
    return ()
