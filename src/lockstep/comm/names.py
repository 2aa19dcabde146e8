"""The names by which torch.distributed knows the groups of this package. Imports nothing."""

from __future__ import annotations

__all__ = ["BACKEND_NAME", "MPI_BACKEND_NAME"]

BACKEND_NAME = "lockstep"
# torch keeps "mpi" for a branch of its own; see [Note: the name "mpi"] in mpi/name.py.
MPI_BACKEND_NAME = "mpi4py"
