"""Chooses the device that a rank computes on: its own GPU if the group takes GPU tensors, else the CPU."""

from __future__ import annotations

import torch

from lockstep import env
from lockstep.errors import InputError, SetupError
from lockstep.topology import Topology

__all__ = ["as_device", "choose_device", "default_gpu", "takes_default_gpu", "visible_gpus"]

_UNSAID_HINT = (
    ". If ranks are on other hosts, or each sees GPUs of its own alone, set LOCAL_RANK to the number of each rank's "
    "GPU, and LOCAL_WORLD_SIZE to the number of ranks on its host"
)


def as_device(device: str | torch.device) -> torch.device:
    """The device of that name. Local.

    Raises:
        InputError: torch does not know it.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {device!r}, which torch does not know: {str(error).splitlines()[0]}") from None


def takes_default_gpu(backend: str, device: str | torch.device | None) -> bool:
    """Whether the device is a GPU, and its number depends on which ranks share this host."""
    if device is None:
        return "nccl" in backend
    return str(device) == "cuda"


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this process sees; empty if torch does not provide them."""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [str(one.uuid) for one in properties if hasattr(one, "uuid")]


def default_gpu(topology: Topology, count: int) -> tuple[int, torch.device]:
    """Number of GPUs that this rank, which sees `count`, must see for its host to have enough; and its own GPU."""
    of_host = env.SLURM_GPUS_ON_NODE.get() if topology.launcher == "slurm" else None
    if count > 0 and of_host is not None and count < topology.local_world_size <= of_host:
        # With --gpus-per-task or --gpu-bind, Slurm shows each task only its own GPUs, numbered from 0.
        return 1, torch.device("cuda", 0)
    if "local_world_size" in topology.unsaid and "local_rank" not in topology.unsaid:
        # Only LOCAL_RANK was given, and decides: ranks of this host may each see only some of its GPUs.
        return topology.local_rank + 1, torch.device("cuda", topology.local_rank)
    # By the number of ranks, so that all of them raise here, and none waits for others that did.
    return topology.local_world_size, torch.device("cuda", topology.local_rank)


def _why_no_gpu() -> str:
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} is built without CUDA"
    hidden = env.snapshot().get(env.CUDA_VISIBLE_DEVICES.name)  # if empty, it hides all
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}"
    return "`nvidia-smi` says whether the machine has one, and which driver"


def choose_device(backend: str, topology: Topology, device: str | torch.device | None) -> torch.device:
    """The device that this rank computes on; a GPU is made the current device. Local.

    Args:
        backend: backend of the group that will be created.
        topology: the position of this rank.
        device: the device that the script requests; None for a GPU with nccl, else the CPU.

    Raises:
        InputError: torch does not know such a device.
        SetupError: it is a GPU, and this host has too few.
    """
    default = "cuda" if "nccl" in backend else "cpu"
    chosen = as_device(device if device is not None else default)
    if chosen.type != "cuda":
        return chosen
    count = torch.cuda.device_count()
    if chosen.index is not None:
        needed = chosen.index + 1
    else:
        needed, chosen = default_gpu(topology, count)  # type: ignore[unreachable]  # stubs: always an index
    if count == 0:
        raise SetupError(
            f"rank {topology.rank} would use {chosen}, but torch sees no GPU here: {_why_no_gpu()}. To train on the "
            "CPU write lockstep.init(device='cpu')"
        )
    if needed > count:
        raise SetupError(
            f"rank {topology.rank} would use {chosen}, but this host has {count} GPU(s) for "
            f"{topology.local_world_size} rank(s). Start no more than that here (--nproc {count}), or have the ranks "
            "use the CPU: lockstep.init(device='cpu'), or CUDA_VISIBLE_DEVICES= before the command"
            f"{_UNSAID_HINT if 'local_world_size' in topology.unsaid else ''}"
        )
    torch.cuda.set_device(chosen)
    return chosen
