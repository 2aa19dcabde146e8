"""On which device the ranks of a recipe train, by the backend that was asked for and the GPUs that are there."""

from __future__ import annotations

import torch

from lockstep import env
from lockstep.device_choice import default_gpu
from lockstep.errors import InputError
from lockstep.topology import Topology

__all__ = ["choose_device"]

# These move tensors of GPUs, each in its own way; of others nobody knows.
_FOR_GPUS = frozenset({"auto", "nccl", "gloo", "lockstep"})


def choose_device(backend: str, topology: Topology) -> tuple[str | None, list[str]]:
    """Where the ranks train, unless a person has said. Local, and the same on all ranks of a host.

    Args:
        backend: as it was asked for.
        topology: the ranks.

    Returns:
        `device` for `lockstep.init`, None for its own choice; and what a person should know of it.

    Raises:
        InputError: the backend needs a GPU for each rank, and there are too few.
    """
    if not torch.cuda.is_available():
        return None, []
    name = backend.lower()
    if name not in _FOR_GPUS and "cuda:" not in name:
        return None, [f"training on the CPU: whether backend {backend} moves tensors of GPUs is not known"]
    count = torch.cuda.device_count()
    needed, _ = default_gpu(topology, count)
    if needed <= count or not _is_whole_job_here(topology):
        return "cuda", []  # on one of several hosts, `lockstep.init` says what there is too little of
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    if "nccl" in name:
        raise InputError(
            f"backend {backend} needs a GPU for each rank, and here are {needed} ranks and {gpus}: start {count} "
            f"(--nproc {count}), or give another --backend"
        )
    return "cpu", [f"{needed} ranks, but {gpus} here: training on the CPU. --nproc {count} trains on {gpus}"]


def _is_whole_job_here(topology: Topology) -> bool:
    """Whether all ranks are on this host for sure, and therefore choose alike."""
    is_guess = topology.launcher == "environment" and env.LOCAL_WORLD_SIZE.get() is None
    return topology.num_nodes == 1 and not is_guess
