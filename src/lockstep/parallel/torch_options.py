"""Arguments of torch's `DistributedDataParallel` that mean nothing here, or something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import InputError
from lockstep.log import get_logger, warn_once

__all__ = ["check_refused", "choose_broadcast_buffers", "choose_devices", "choose_group"]

_logger = get_logger(__name__)

_REFUSED = {
    "mixed_precision": (
        "the engine averages gradients in the dtype of the parameters. Compute in 16 bits with torch.autocast, and "
        "send 16 bits with register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks."
        "bf16_compress_hook)"
    ),
    "delay_all_reduce_named_params": (
        "it lets torch average some parameters by hand. Name those in module._ddp_params_and_buffers_to_ignore, and "
        "average them with dist.all_reduce"
    ),
    "param_to_hook_all_reduce": "it belongs to delay_all_reduce_named_params, which is not supported either",
    "dim": "one process handles one part of the batch, along dimension 0",
    "bucket_cap_mb_list": "give one size for all buckets: bucket_cap_mb",
}


def check_refused(**given: object) -> None:
    """Refuse what cannot be had, with what to write instead.

    Raises:
        InputError: names the argument.
    """
    for name, value in given.items():
        if value is not None:
            raise InputError(f"DistributedDataParallel: {name} is not supported: {_REFUSED[name]}")


def choose_broadcast_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Whether all ranks get the buffers of the first; the second is the new name of the first.

    Raises:
        InputError: the two contradict each other.
    """
    if None not in (broadcast_buffers, forward_sync_buffers) and broadcast_buffers != forward_sync_buffers:
        raise InputError(
            f"broadcast_buffers={broadcast_buffers} and forward_sync_buffers={forward_sync_buffers} are two names for "
            "one thing: give one of them"
        )
    chosen = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    return chosen is not False


def choose_devices(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Sequence[torch.Tensor],
) -> list[torch.device] | None:
    """The one device that was named, in a list, as torch keeps it; None where none was.

    Raises:
        InputError: several were named, or another than that of the parameters.
    """
    if not device_ids:
        return None
    if len(device_ids) != 1:
        raise InputError(
            f"device_ids={list(device_ids)}: one process drives one device here. Give [local_rank], or None and "
            "start one process per device"
        )
    chosen = torch.device("cuda", device_ids[0]) if isinstance(device_ids[0], int) else torch.device(device_ids[0])
    devices = {parameter.device for parameter in parameters}
    if devices != {chosen}:
        raise InputError(
            f"device_ids names {chosen}, but parameters are on {', '.join(sorted(map(str, devices)))}. Move the "
            "model there first, or leave device_ids out (as CPU models and models on several devices must)"
        )
    if output_device is not None and torch.device(output_device) != chosen and output_device != device_ids[0]:
        warn_once(_logger, f"output_device={output_device} is ignored: outputs stay on {chosen}")
    return [chosen]


def choose_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup | None:
    """The group that was given, by itself or as a mesh of one dimension.

    Raises:
        InputError: both were given, or a mesh of several dimensions.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise InputError("both process_group and device_mesh were given: they say the same; give one of them")
    if device_mesh.ndim != 1:
        raise InputError(
            f"device_mesh has {device_mesh.ndim} dimensions: gradients are averaged along one. Give that one, such as "
            'mesh["dp"]'
        )
    group: dist.ProcessGroup = device_mesh.get_group()
    return group
