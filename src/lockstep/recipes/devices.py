"""Chooses the device of a recipe's ranks by the requested backend and the available GPUs."""

from __future__ import annotations

import torch

from lockstep import env
from lockstep.device_choice import default_gpu
from lockstep.errors import InputError
from lockstep.topology import Topology

__all__ = ["choose_device"]

# Backends that can move GPU tensors; unknown for any other.
_FOR_GPUS = frozenset({"auto", "nccl", "gloo", "lockstep"})


def choose_device(backend: str, topology: Topology) -> tuple[str | None, list[str]]:
    """The device to train on, if the user has not chosen one. Local, and the same on all ranks of a host.

    Args:
        backend: the requested backend.
        topology: the ranks.

    Returns:
        `device` for `lockstep.init`, None to let it choose; and notes to print.

    Raises:
        InputError: the backend needs a GPU per rank, and there are too few.
    """
    if not torch.cuda.is_available():
        return None, []
    name = backend.lower()
    if name not in _FOR_GPUS and "cuda:" not in name:
        return None, [f"training on the CPU: it is not known whether backend {backend} supports GPU tensors"]
    count = torch.cuda.device_count()
    needed, _ = default_gpu(topology, count)
    if needed <= count or not _is_whole_job_here(topology):
        return "cuda", []  # on one of several hosts, `lockstep.init` reports missing GPUs
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    if "nccl" in name:
        raise InputError(
            f"backend {backend} needs a GPU per rank, but there are {needed} ranks and {gpus}: start {count} "
            f"(--nproc {count}), or choose another --backend"
        )
    return "cpu", [
        f"training on the CPU, because there are {needed} ranks but {gpus}; --nproc {count} trains on {gpus}"
    ]


def _is_whole_job_here(topology: Topology) -> bool:
    """Whether all ranks are known to be on this host, and therefore make the same choice."""
    is_guess = topology.launcher == "environment" and env.LOCAL_WORLD_SIZE.get() is None
    return topology.num_nodes == 1 and not is_guess
