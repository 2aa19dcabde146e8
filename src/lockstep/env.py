"""Every environment variable that Lockstep reads or sets, typed and in one place.

Nothing else in the package touches `os.environ`; a test enforces it. A variable
is read from the process by default, or from any mapping passed in, so that callers
can be pure functions. Explicit arguments always take precedence over variables.

    >>> WORLD_SIZE.get({"WORLD_SIZE": "4"})
    4
    >>> WORLD_SIZE.get({}) is None
    True
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Generic, TypeVar

from lockstep.errors import SetupError

T = TypeVar("T")

_OWN = "LOCKSTEP_"
# More than any job has; loops over a number with too many digits would take forever.
MOST_RANKS = 1 << 20

__all__ = ["Variable", "check", "class_of_environment", "registry", "replace", "snapshot"]

registry: dict[str, Variable[object]] = {}


class Variable(Generic[T]):
    """One environment variable.

    Args:
        name: its name in the environment.
        parse: turns its text into a value; raises ValueError if it cannot.
        doc: what it means and who sets it.
        is_secret: whether errors must not quote its text.
    """

    def __init__(self, name: str, parse: Callable[[str], T], doc: str, is_secret: bool = False) -> None:
        self.name = name
        self.parse = parse
        self.doc = doc
        self.is_secret = is_secret
        registry[name] = self  # type: ignore[assignment]

    def get(self, env: Mapping[str, str] | None = None) -> T | None:
        """Its value, or None if unset or empty.

        Raises:
            SetupError: the text is malformed; the message quotes it, unless it is a secret.
        """
        text = (os.environ if env is None else env).get(self.name)
        if text is None or text == "":
            return None
        try:
            return self.parse(text)
        except ValueError as error:
            shown = "" if self.is_secret else f"={text!r}"
            raise SetupError(f"environment variable {self.name}{shown}: {error}. {self.doc}") from None

    def set(self, value: T, env: MutableMapping[str, str] | None = None) -> None:
        """Set it in the process environment, or in `env`."""
        (os.environ if env is None else env)[self.name] = str(value)

    def set_in_python(self, value: T, *, in_c: str) -> None:
        """Set it in `os.environ` only; C libraries, and programs that this process starts, see `in_c`."""
        os.environ[self.name] = str(value)
        os.putenv(self.name, in_c)

    def unset(self, env: MutableMapping[str, str] | None = None) -> None:
        """Remove it if it is set."""
        (os.environ if env is None else env).pop(self.name, None)


def snapshot() -> dict[str, str]:
    """A copy of the process environment, to modify and pass to a child."""
    return dict(os.environ)


def class_of_environment() -> type:
    """The class of `os.environ`, for tools that watch which variables a script reads."""
    return type(os.environ)


def replace(variables: Mapping[str, str]) -> None:
    """Make the process environment equal to `variables`, changing only what differs."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, text in variables.items():
        if os.environ.get(name) != text:
            os.environ[name] = text


def check(variables: Mapping[str, str] | None = None) -> None:
    """Check all of Lockstep's own variables, and MASTER_PORT: some are otherwise read late, or only on errors. Local.

    Raises:
        SetupError: one is malformed; the message quotes it, unless it is a secret.
    """
    for name, variable in registry.items():
        if name.startswith(_OWN) or name == MASTER_PORT.name:
            variable.get(variables)


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError("expected 0 or 1")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected an integer") from None


def _port(text: str) -> int:
    port = _integer(text)
    if not 0 <= port <= 65535:
        raise ValueError("expected 0 to 65535")
    return port


def _rank_count(text: str) -> int:
    count = _integer(text)
    if count > MOST_RANKS:
        raise ValueError(f"expected at most {MOST_RANKS}")
    return count


def _token(text: str) -> str:
    token = text.strip()
    # Bytes that are not UTF-8 have become surrogates, which are not printable.
    if not token or not token.isprintable():
        raise ValueError("expected a line of text, such as `openssl rand -hex 32` prints")
    return token


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in values:
            raise ValueError(f"expected one of {', '.join(values)}")
        return text.strip().lower()

    return parse


def _level(text: str) -> str:
    known = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if text.strip().upper() not in known:
        raise ValueError(f"expected one of {', '.join(known)}")
    return text.strip().upper()


# Common to all launchers, under torchrun's names; ours sets them all.
RANK = Variable("RANK", _integer, "Global rank of this process, 0 … WORLD_SIZE-1.")
WORLD_SIZE = Variable("WORLD_SIZE", _rank_count, "Number of ranks over all hosts.")
LOCAL_RANK = Variable("LOCAL_RANK", _integer, "Rank among the processes of this host.")
LOCAL_WORLD_SIZE = Variable("LOCAL_WORLD_SIZE", _integer, "Number of ranks on this host.")
GROUP_RANK = Variable("GROUP_RANK", _integer, "Number of this host (torchrun's name for the node rank).")
NODE_RANK = Variable("NODE_RANK", _integer, "Number of this host.")
MASTER_ADDR = Variable("MASTER_ADDR", str, "Address of rank 0's store for torch's env:// rendezvous.")
MASTER_PORT = Variable("MASTER_PORT", _port, "Port of rank 0's store for torch's env:// rendezvous.")
TORCH_CPP_LOG_LEVEL = Variable("TORCH_CPP_LOG_LEVEL", str, "Log level of torch's C++ code; WARNING by default.")
OMP_NUM_THREADS = Variable("OMP_NUM_THREADS", str, "Threads per process for torch's CPU operators.")
GLIBC_TUNABLES = Variable("GLIBC_TUNABLES", str, "C library settings, such as glibc.malloc.hugetlb=1.")
MALLOC_MMAP_THRESHOLD_ = Variable(
    "MALLOC_MMAP_THRESHOLD_", str, "Size in bytes from which glibc maps an allocation by itself."
)
MALLOC_TRIM_THRESHOLD_ = Variable(
    "MALLOC_TRIM_THRESHOLD_", str, "Bytes of free memory that glibc keeps at the top of the heap."
)
TORCHELASTIC_RUN_ID = Variable("TORCHELASTIC_RUN_ID", str, "Name of the job; set by torchrun.")
TORCHELASTIC_RESTART_COUNT = Variable(
    "TORCHELASTIC_RESTART_COUNT",
    _integer,
    "Number of restarts of the job so far; set by torchrun and by `lockstep run`.",
)
TORCHELASTIC_MAX_RESTARTS = Variable(
    "TORCHELASTIC_MAX_RESTARTS",
    _integer,
    "Maximum number of restarts of the job; set by torchrun and by `lockstep run`.",
)
TORCHELASTIC_USE_AGENT_STORE = Variable(
    "TORCHELASTIC_USE_AGENT_STORE", str, "True if torchrun's agent hosts the store; `lockstep run` sets it to False."
)
TORCHELASTIC_ERROR_FILE = Variable(
    "TORCHELASTIC_ERROR_FILE", str, "File to which torch.distributed.elastic's `@record` writes an exception, as JSON."
)
GROUP_WORLD_SIZE = Variable("GROUP_WORLD_SIZE", _integer, "Number of hosts (torchrun's name for it).")
ROLE_RANK = Variable("ROLE_RANK", _integer, "Rank within its role; as there is only one role, the global rank.")
ROLE_WORLD_SIZE = Variable(
    "ROLE_WORLD_SIZE", _integer, "Number of ranks in the role; as there is only one role, all ranks."
)
ROLE_NAME = Variable("ROLE_NAME", str, "Name of the role; torchrun's default is `default`.")
CUDA_VISIBLE_DEVICES = Variable("CUDA_VISIBLE_DEVICES", str, "The GPUs a process may use; empty for none.")
GLOO_SOCKET_IFNAME = Variable(
    "GLOO_SOCKET_IFNAME",
    str,
    "Network interface for Gloo, and for Lockstep between hosts; Lockstep sets it for Gloo unless it is already set.",
)
NCCL_SOCKET_IFNAME = Variable(
    "NCCL_SOCKET_IFNAME",
    str,
    "Network interface for NCCL, and for Lockstep between hosts unless GLOO_SOCKET_IFNAME is set.",
)
PYTHONHASHSEED = Variable(
    "PYTHONHASHSEED", str, "Seed for hashing strings, which decides the order of a set of them; the same on all ranks."
)
PYTHONUNBUFFERED = Variable("PYTHONUNBUFFERED", str, "Keeps Python from buffering a rank's output.")
PATH = Variable("PATH", str, "Folders that are searched for programs.")
PYTHONPATH = Variable("PYTHONPATH", str, "Python's module search path.")

# Set by Slurm, for a job and for each task of a step (what `srun` starts).
SLURM_JOB_ID = Variable("SLURM_JOB_ID", _integer, "Number of the job; set by Slurm.")
SLURM_JOBID = Variable("SLURM_JOBID", _integer, "Older name of SLURM_JOB_ID; set by Slurm.")
SLURM_RESTART_COUNT = Variable("SLURM_RESTART_COUNT", _integer, "Number of times Slurm has restarted the job.")
SLURM_STEP_ID = Variable("SLURM_STEP_ID", _integer, "Number of the step within its job; set by srun.")
SLURM_STEPID = Variable("SLURM_STEPID", _integer, "Older name of SLURM_STEP_ID; set by srun.")
SLURM_PROCID = Variable("SLURM_PROCID", _integer, "Number of this task in its step; 0 in a batch script, too.")
SLURM_NTASKS = Variable("SLURM_NTASKS", _integer, "Number of tasks of the step; in a batch script, of the job.")
SLURM_NPROCS = Variable("SLURM_NPROCS", _integer, "Older name of SLURM_NTASKS; set by Slurm.")
SLURM_STEP_NUM_TASKS = Variable("SLURM_STEP_NUM_TASKS", _integer, "Number of tasks of the step; set by srun.")
SLURM_PTY_PORT = Variable("SLURM_PTY_PORT", _integer, "Set if `srun --pty` gives task 0 of the step a terminal.")
SLURM_LOCALID = Variable("SLURM_LOCALID", _integer, "Number of this task on its node; set by srun.")
SLURM_NODEID = Variable("SLURM_NODEID", _integer, "Number of this node in the step; set by srun.")
SLURM_NNODES = Variable("SLURM_NNODES", _integer, "Number of nodes of the step; in a batch script, of the job.")
SLURM_STEP_NUM_NODES = Variable("SLURM_STEP_NUM_NODES", _integer, "Number of nodes of the step; set by srun.")
SLURM_TASKS_PER_NODE = Variable("SLURM_TASKS_PER_NODE", str, "Tasks on each node, such as 2(x2),1; set by Slurm.")
SLURM_STEP_TASKS_PER_NODE = Variable(
    "SLURM_STEP_TASKS_PER_NODE", str, "Tasks of the step on each node, such as 2(x2),1; set by srun."
)
SLURM_GPUS_ON_NODE = Variable(
    "SLURM_GPUS_ON_NODE", _integer, "Number of GPUs on this node that the step may use; set by Slurm."
)
SLURM_STEP_NODELIST = Variable("SLURM_STEP_NODELIST", str, "Nodes of the step, such as n[1-3,7]; set by srun.")
SLURM_NODELIST = Variable("SLURM_NODELIST", str, "Older name of SLURM_JOB_NODELIST; set by Slurm.")
SLURM_JOB_NODELIST = Variable("SLURM_JOB_NODELIST", str, "Nodes of the job, such as n[1-3,7]; set by Slurm.")

# Set by MPI launchers: Open MPI's mpirun, then those of MPICH and Intel MPI (PMI).
OMPI_COMM_WORLD_RANK = Variable("OMPI_COMM_WORLD_RANK", _integer, "Rank of this process; set by Open MPI's mpirun.")
OMPI_COMM_WORLD_SIZE = Variable("OMPI_COMM_WORLD_SIZE", _integer, "Number of ranks; set by Open MPI's mpirun.")
OMPI_COMM_WORLD_LOCAL_RANK = Variable(
    "OMPI_COMM_WORLD_LOCAL_RANK", _integer, "Rank among the processes of this host; set by Open MPI's mpirun."
)
OMPI_COMM_WORLD_LOCAL_SIZE = Variable(
    "OMPI_COMM_WORLD_LOCAL_SIZE", _integer, "Number of ranks on this host; set by Open MPI's mpirun."
)
OMPI_MCA_ess_base_jobid = Variable("OMPI_MCA_ess_base_jobid", str, "Id of the job; set by Open MPI's mpirun.")
OMPI_MCA_mpi_yield_when_idle = Variable(
    "OMPI_MCA_mpi_yield_when_idle",
    str,
    "1: Open MPI yields its core while it waits; set by Lockstep if ranks outnumber cores and it is not set already.",
)
PMIX_RANK = Variable("PMIX_RANK", _integer, "Rank of this process; set by launchers that speak PMIx.")
PMIX_NAMESPACE = Variable("PMIX_NAMESPACE", str, "Id of the job; set by launchers that speak PMIx.")
PMI_RANK = Variable("PMI_RANK", _integer, "Rank of this process; set by launchers that speak PMI.")
PMI_SIZE = Variable("PMI_SIZE", _integer, "Number of ranks; set by launchers that speak PMI.")
PMI_LOCAL_RANK = Variable("PMI_LOCAL_RANK", _integer, "Rank among the processes of this host; set by Cray's launchers.")
PMI_LOCAL_SIZE = Variable("PMI_LOCAL_SIZE", _integer, "Number of ranks on this host; set by Cray's launchers.")
MPI_LOCALRANKID = Variable(
    "MPI_LOCALRANKID", _integer, "Rank among the processes of this host; set by the mpirun of MPICH and Intel MPI."
)
MPI_LOCALNRANKS = Variable(
    "MPI_LOCALNRANKS", _integer, "Number of ranks on this host; set by the mpirun of MPICH and Intel MPI."
)

# Set by horovodrun for its workers, and here by `lockstep horovodrun` and `hvd.init()`.
HOROVOD_RANK = Variable("HOROVOD_RANK", _integer, "Global rank of this process (Horovod's name for it).")
HOROVOD_SIZE = Variable("HOROVOD_SIZE", _integer, "Number of ranks.")
HOROVOD_LOCAL_RANK = Variable("HOROVOD_LOCAL_RANK", _integer, "Rank among the processes of this host.")
HOROVOD_LOCAL_SIZE = Variable("HOROVOD_LOCAL_SIZE", _integer, "Number of ranks on this host.")
HOROVOD_CROSS_RANK = Variable("HOROVOD_CROSS_RANK", _integer, "Number of this host.")
HOROVOD_CROSS_SIZE = Variable("HOROVOD_CROSS_SIZE", _integer, "Number of hosts.")
HOROVOD_HOSTNAME = Variable("HOROVOD_HOSTNAME", str, "Name of this host.")
HOROVOD_STALL_CHECK_DISABLE = Variable("HOROVOD_STALL_CHECK_DISABLE", _flag, "1: no warnings about stalled requests.")
HOROVOD_STALL_CHECK_TIME_SECONDS = Variable(
    "HOROVOD_STALL_CHECK_TIME_SECONDS", float, "Seconds before a warning about a request that some ranks have not made."
)
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS = Variable(
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    float,
    "Seconds before a request that some ranks have not made is an error; 0 for the group's timeout.",
)
HOROVOD_TIMELINE = Variable(
    "HOROVOD_TIMELINE", str, "File for rank 0's Chrome trace of Horovod's operations; DYNAMIC to start without one."
)
HOROVOD_TIMELINE_MARK_CYCLES = Variable(
    "HOROVOD_TIMELINE_MARK_CYCLES", _flag, "1: mark each cycle in the trace that HOROVOD_TIMELINE names."
)

# Lockstep's own.
LOCKSTEP_RENDEZVOUS = Variable(
    "LOCKSTEP_RENDEZVOUS",
    str,
    "Private folder (mode 0700) of one attempt of one job on one host; the launcher creates and removes it.",
)
LOCKSTEP_SHOWS_ERRORS = Variable(
    "LOCKSTEP_SHOWS_ERRORS", _flag, "1: the launcher shows the uncaught exceptions of ranks, so they do not print them."
)
LOCKSTEP_PARENT_PID = Variable(
    "LOCKSTEP_PARENT_PID", _integer, "Pid of the launcher; a rank with a different parent exits."
)
LOCKSTEP_JOB = Variable(
    "LOCKSTEP_JOB",
    str,
    "Id of the job, after the ids of the jobs in which it is nested, separated by ':'. Every process of a job has it; "
    "that is how the launcher finds those that have left their rank's session.",
)
LOCKSTEP_TOKEN = Variable(
    "LOCKSTEP_TOKEN",
    _token,
    "The job's secret, by which its launchers and ranks recognise each other; the same in all of its processes. Set by "
    "`lockstep run` for its ranks. Never shown.",
    is_secret=True,
)
LOCKSTEP_REHEARSAL = Variable(
    "LOCKSTEP_REHEARSAL",
    str,
    "Settings that `lockstep rehearse` passes to the processes of its job, as JSON; set only by it.",
)
LOCKSTEP_VERIFY = Variable(
    "LOCKSTEP_VERIFY",
    str,
    "Settings that `lockstep verify` passes to the processes of its jobs, as JSON; set only by it.",
)
LOCKSTEP_COMPAT = Variable(
    "LOCKSTEP_COMPAT",
    _flag,
    "0: `import horovod` and `import apex` do not find Lockstep's shims, and torch is not changed; 1: torch is changed "
    'for old scripts whatever the script contains, and find_spec("apex") finds the shim in every program. Set by '
    "`lockstep run --no-compat` and `--compat`.",
)
LOCKSTEP_OLD_TORCH = Variable(
    "LOCKSTEP_OLD_TORCH",
    str,
    "The changes to torch that the job's script needs, as JSON; set by the launcher for its ranks.",
)
LOCKSTEP_LOG_LEVEL = Variable("LOCKSTEP_LOG_LEVEL", _level, "Level of Lockstep's logger; WARNING by default.")
LOCKSTEP_ELASTIC_FOLDER = Variable(
    "LOCKSTEP_ELASTIC_FOLDER",
    str,
    "Folder for elastic states between two attempts of a job; `lockstep horovodrun` creates and removes it.",
)
LOCKSTEP_SHM_DIR = Variable(
    "LOCKSTEP_SHM_DIR",
    str,
    "Folder for shared-memory segments, for containers that share it but not their pid namespace. Without it, "
    "segments are memfds, which peers open through /proc/<pid>/fd, or in /dev/shm if the system refuses memfds.",
)
LOCKSTEP_WIRE = Variable(
    "LOCKSTEP_WIRE",
    _one_of("fp32", "bf16", "fp16", "int8"),
    "Format of float sums between hosts: fp32 (exact, default), bf16, fp16 or int8. lockstep.init(wire=…) wins.",
)
LOCKSTEP_DEBUG = Variable(
    "LOCKSTEP_DEBUG",
    _flag,
    "1: tracebacks keep all frames, including Lockstep's own, and every rank prints its traceback.",
)
