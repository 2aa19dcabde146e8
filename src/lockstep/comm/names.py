"""The backend names that Lockstep registers with torch.distributed, and `is_ours`, which recognises its groups."""

from __future__ import annotations

from typing import Any

__all__ = ["BACKEND_NAME", "MPI_BACKEND_NAME", "is_ours"]

BACKEND_NAME = "lockstep"
# torch handles "mpi" in a branch of its own; see [Note: the name "mpi"] in mpi/name.py.
MPI_BACKEND_NAME = "mpi4py"


def is_ours(group: Any) -> bool:
    """Whether the group is ours, by an attribute: a process may have imported this package, and its classes, twice."""
    return hasattr(group, "engine")
