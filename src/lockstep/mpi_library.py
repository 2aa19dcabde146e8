"""Finds, initialises and checks mpi4py and its MPI library, or raises an error that says how to install them."""

from __future__ import annotations

import os
from types import ModuleType

from lockstep import env
from lockstep.errors import BackendUnavailable, NotInitialized, SetupError
from lockstep.topology.mpi import read_mpi

__all__ = ["is_installed", "load"]

_INSTALL_MPI4PY = "Install it with `pip install mpi4py`"
_INSTALL_MPI = (
    "Install Open MPI (Debian, Ubuntu: `apt install openmpi-bin libopenmpi-dev`; Fedora: `dnf install "
    "openmpi-devel`) or MPICH, or load your cluster's module of it"
)

_mpi: ModuleType | None = None


def is_installed() -> bool:
    """Whether mpi4py can be imported. Local; imports and initialises nothing."""
    import importlib.util

    return importlib.util.find_spec("mpi4py") is not None


def load() -> ModuleType:
    """`mpi4py.MPI`, initialised. Local, but every process that mpirun started must call it at some point.

    Raises:
        BackendUnavailable: mpi4py or the MPI library is missing; says how to install it.
        SetupError: the library was initialised without support for threads, or is not that of mpirun.
        NotInitialized: MPI was finalized.
    """
    global _mpi
    if _mpi is None:
        module = _initialise()
        _check(module)
        _mpi = module
    if _mpi.Is_finalized():
        raise NotInitialized("MPI was finalized in this process and cannot be used again; start a new one")
    return _mpi


def _initialise() -> ModuleType:
    topology = read_mpi(env.snapshot())
    is_crowded = topology is not None and topology.local_world_size > len(os.sched_getaffinity(0))
    if is_crowded and env.OMPI_MCA_mpi_yield_when_idle.get() is None:
        # Open MPI busy-waits, during initialisation for example, on cores that the awaited ranks need.
        env.OMPI_MCA_mpi_yield_when_idle.set("1")
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise BackendUnavailable(f"backend 'mpi' needs mpi4py's MPI module: {error}. {_INSTALL_MPI4PY}") from error
        raise BackendUnavailable(f"backend 'mpi' needs mpi4py, which is not installed. {_INSTALL_MPI4PY}") from None
    except (ImportError, RuntimeError, OSError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise BackendUnavailable(
            f"backend 'mpi' needs an MPI library, and mpi4py finds none ({first_line}). {_INSTALL_MPI}"
        ) from error
    return MPI


def _check(mpi: ModuleType) -> None:
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise SetupError(
            "MPI was initialised in this process without support for several threads, which backend 'mpi' needs. "
            "Remove `mpi4py.rc.thread_level` or `mpi4py.rc.threads` from the script, or call lockstep.init() first"
        )
    topology = read_mpi(env.snapshot())
    size = mpi.COMM_WORLD.Get_size()
    if topology is not None and size != topology.world_size:
        raise SetupError(
            f"mpirun started {topology.world_size} ranks, but MPI says there are {size}: mpi4py uses another MPI "
            f"library ({mpi.get_vendor()[0]}) than that mpirun. Use the mpirun that belongs to it"
        )
