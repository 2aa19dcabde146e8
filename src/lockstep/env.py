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
TORCH_CPP_LOG_LEVEL = Variable("TORCH_CPP_LOG_LEVEL", str, "How much torch's C++ parts say; WARNING by default.")
OMP_NUM_THREADS = Variable("OMP_NUM_THREADS", str, "Threads per process for torch's CPU operators.")
GLIBC_TUNABLES = Variable("GLIBC_TUNABLES", str, "Settings of the C library, such as glibc.malloc.hugetlb=1.")
MALLOC_MMAP_THRESHOLD_ = Variable("MALLOC_MMAP_THRESHOLD_", str, "From which size on glibc maps memory by itself.")
MALLOC_TRIM_THRESHOLD_ = Variable("MALLOC_TRIM_THRESHOLD_", str, "How much free memory glibc keeps at the heap's end.")
TORCHELASTIC_RUN_ID = Variable("TORCHELASTIC_RUN_ID", str, "Set by torchrun; name of the job.")
TORCHELASTIC_RESTART_COUNT = Variable(
    "TORCHELASTIC_RESTART_COUNT", _integer, "How often the job was restarted; set by torchrun and by `lockstep run`."
)
TORCHELASTIC_MAX_RESTARTS = Variable(
    "TORCHELASTIC_MAX_RESTARTS", _integer, "How often the job may restart; set by torchrun and by `lockstep run`."
)
TORCHELASTIC_USE_AGENT_STORE = Variable(
    "TORCHELASTIC_USE_AGENT_STORE", str, "True where torchrun's agent hosts the store; `lockstep run` sets False."
)
TORCHELASTIC_ERROR_FILE = Variable(
    "TORCHELASTIC_ERROR_FILE", str, "Where torch.distributed.elastic's `@record` writes an exception as JSON."
)
GROUP_WORLD_SIZE = Variable("GROUP_WORLD_SIZE", _integer, "Number of hosts, in torchrun's words.")
ROLE_RANK = Variable("ROLE_RANK", _integer, "Rank within its role; there is one role, so the rank.")
ROLE_WORLD_SIZE = Variable("ROLE_WORLD_SIZE", _integer, "Number of ranks of the role; there is one role, so all.")
ROLE_NAME = Variable("ROLE_NAME", str, "Name of the role; torchrun's own default is `default`.")
CUDA_VISIBLE_DEVICES = Variable("CUDA_VISIBLE_DEVICES", str, "The GPUs a process may use; empty for none.")
GLOO_SOCKET_IFNAME = Variable(
    "GLOO_SOCKET_IFNAME", str, "Network interface for Gloo, and for Lockstep between hosts; set for Gloo if nobody has."
)
NCCL_SOCKET_IFNAME = Variable(
    "NCCL_SOCKET_IFNAME",
    str,
    "Network interface for NCCL, and for Lockstep between hosts unless GLOO_SOCKET_IFNAME is set.",
)
PYTHONHASHSEED = Variable("PYTHONHASHSEED", str, "In which order a set of texts is walked; the same on all ranks.")
PYTHONUNBUFFERED = Variable("PYTHONUNBUFFERED", str, "Keeps Python from holding back the output of a rank.")
PATH = Variable("PATH", str, "Folders in which programs are looked for.")
PYTHONPATH = Variable("PYTHONPATH", str, "Python's module search path.")

# Set by Slurm, for a job and for each task of a step (what `srun` starts).
SLURM_JOB_ID = Variable("SLURM_JOB_ID", _integer, "Number of the job; set by Slurm.")
SLURM_JOBID = Variable("SLURM_JOBID", _integer, "Older name of SLURM_JOB_ID; set by Slurm.")
SLURM_RESTART_COUNT = Variable("SLURM_RESTART_COUNT", _integer, "How often Slurm has started the job again.")
SLURM_STEP_ID = Variable("SLURM_STEP_ID", _integer, "Number of the step within its job; set by srun.")
SLURM_STEPID = Variable("SLURM_STEPID", _integer, "Older name of SLURM_STEP_ID; set by srun.")
SLURM_PROCID = Variable("SLURM_PROCID", _integer, "Number of this task in its step; 0 in a batch script too.")
SLURM_NTASKS = Variable("SLURM_NTASKS", _integer, "Number of tasks of the step; in a batch script, of the job.")
SLURM_NPROCS = Variable("SLURM_NPROCS", _integer, "Older name of SLURM_NTASKS; set by Slurm.")
SLURM_STEP_NUM_TASKS = Variable("SLURM_STEP_NUM_TASKS", _integer, "Number of tasks of the step; set by srun.")
SLURM_PTY_PORT = Variable("SLURM_PTY_PORT", _integer, "Set where srun --pty gives task 0 of the step a terminal.")
SLURM_LOCALID = Variable("SLURM_LOCALID", _integer, "Number of this task on its node; set by srun.")
SLURM_NODEID = Variable("SLURM_NODEID", _integer, "Number of this node in the step; set by srun.")
SLURM_NNODES = Variable("SLURM_NNODES", _integer, "Number of nodes of the step; in a batch script, of the job.")
SLURM_STEP_NUM_NODES = Variable("SLURM_STEP_NUM_NODES", _integer, "Number of nodes of the step; set by srun.")
SLURM_TASKS_PER_NODE = Variable("SLURM_TASKS_PER_NODE", str, "Tasks on each node, such as 2(x2),1; set by Slurm.")
SLURM_STEP_TASKS_PER_NODE = Variable(
    "SLURM_STEP_TASKS_PER_NODE", str, "Tasks of the step on each node, such as 2(x2),1; set by srun."
)
SLURM_GPUS_ON_NODE = Variable("SLURM_GPUS_ON_NODE", _integer, "GPUs of this node that the step may use; set by Slurm.")
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
    "1: Open MPI gives up its core while it waits; Lockstep sets it where ranks outnumber cores and nobody else has.",
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
HOROVOD_RANK = Variable("HOROVOD_RANK", _integer, "Global rank of this process, in Horovod's words.")
HOROVOD_SIZE = Variable("HOROVOD_SIZE", _integer, "Number of ranks.")
HOROVOD_LOCAL_RANK = Variable("HOROVOD_LOCAL_RANK", _integer, "Rank among the processes of this host.")
HOROVOD_LOCAL_SIZE = Variable("HOROVOD_LOCAL_SIZE", _integer, "Number of ranks on this host.")
HOROVOD_CROSS_RANK = Variable("HOROVOD_CROSS_RANK", _integer, "Number of this host.")
HOROVOD_CROSS_SIZE = Variable("HOROVOD_CROSS_SIZE", _integer, "Number of hosts.")
HOROVOD_HOSTNAME = Variable("HOROVOD_HOSTNAME", str, "Name of this host.")
HOROVOD_STALL_CHECK_DISABLE = Variable("HOROVOD_STALL_CHECK_DISABLE", _flag, "1: no warning of requests that wait.")
HOROVOD_STALL_CHECK_TIME_SECONDS = Variable(
    "HOROVOD_STALL_CHECK_TIME_SECONDS", float, "Seconds until a warning of a request that some ranks have not made."
)
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS = Variable(
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", float, "Seconds until such a request is an error; 0 for the group's timeout."
)
HOROVOD_TIMELINE = Variable(
    "HOROVOD_TIMELINE", str, "Where rank 0 writes a Chrome trace of Horovod's operations; DYNAMIC for none at first."
)
HOROVOD_TIMELINE_MARK_CYCLES = Variable("HOROVOD_TIMELINE_MARK_CYCLES", _flag, "1 notes each round in that trace.")

# Lockstep's own.
LOCKSTEP_RENDEZVOUS = Variable(
    "LOCKSTEP_RENDEZVOUS",
    str,
    "Private folder (mode 0700) of one attempt of one job on one host, made by the launcher and removed by it.",
)
LOCKSTEP_SHOWS_ERRORS = Variable(
    "LOCKSTEP_SHOWS_ERRORS", _flag, "The launcher shows the uncaught exceptions of ranks, which then do not print them."
)
LOCKSTEP_PARENT_PID = Variable(
    "LOCKSTEP_PARENT_PID", _integer, "Pid of the launcher; a rank whose parent differs exits."
)
LOCKSTEP_JOB = Variable(
    "LOCKSTEP_JOB",
    str,
    "Id of the job, after those of the jobs it is nested in, joined by ':'. Every process of a job carries it, "
    "which is how the launcher finds those that left the session of their rank.",
)
LOCKSTEP_TOKEN = Variable(
    "LOCKSTEP_TOKEN",
    _token,
    "The secret of the job, by which its launchers and ranks know each other; every process of it has the same. Set by "
    "`lockstep run` for its ranks. Never shown.",
    is_secret=True,
)
LOCKSTEP_REHEARSAL = Variable(
    "LOCKSTEP_REHEARSAL", str, "What `lockstep rehearse` tells the processes of its job, as JSON; set by it alone."
)
LOCKSTEP_VERIFY = Variable(
    "LOCKSTEP_VERIFY", str, "What `lockstep verify` tells the processes of its jobs, as JSON; set by it alone."
)
LOCKSTEP_COMPAT = Variable(
    "LOCKSTEP_COMPAT",
    _flag,
    "0 keeps `import horovod` and `import apex` from finding Lockstep's shims, and torch as it is; 1 changes torch for "
    'old scripts whatever the script says, and lets find_spec("apex") find the shim for every program. Set by '
    "`lockstep run --no-compat` and `--compat`.",
)
LOCKSTEP_OLD_TORCH = Variable(
    "LOCKSTEP_OLD_TORCH",
    str,
    "Which changes to torch the job's script needs, as JSON; set by the launcher for its ranks.",
)
LOCKSTEP_LOG_LEVEL = Variable("LOCKSTEP_LOG_LEVEL", _level, "Level of Lockstep's logger; WARNING by default.")
LOCKSTEP_ELASTIC_FOLDER = Variable(
    "LOCKSTEP_ELASTIC_FOLDER",
    str,
    "Where elastic states are kept from one attempt of a job to the next; `lockstep horovodrun` makes and removes it.",
)
LOCKSTEP_SHM_DIR = Variable(
    "LOCKSTEP_SHM_DIR",
    str,
    "Folder for shared-memory segments, for containers that share it but no pid namespace; default: no folder, but "
    "memfds that peers open through /proc/<pid>/fd, or /dev/shm where the system refuses memfds.",
)
LOCKSTEP_WIRE = Variable(
    "LOCKSTEP_WIRE",
    _one_of("fp32", "bf16", "fp16", "int8"),
    "What float sums travel as between hosts: fp32 (exact, default), bf16, fp16 or int8. lockstep.init(wire=…) wins.",
)
LOCKSTEP_DEBUG = Variable(
    "LOCKSTEP_DEBUG", _flag, "1 keeps all frames in tracebacks, Lockstep's own too, and lets each rank print its own."
)
