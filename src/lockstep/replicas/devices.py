"""Resolves the device ids of replicas in one process.

[Note: CPU devices] Without an accelerator, an id stands for a replica on the CPU: `[0, 1, 2, 3]`, `4` and
`["cpu"] * 4` all mean four of them. So a model that has four replicas on a machine with four GPUs has
four on any other, with the same pieces of the batch, statistics and results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.errors import InputError, InputTypeError

__all__ = ["Device", "are_on_cpu", "resolve_device", "resolve_devices"]

Device = int | str | torch.device

CPU = torch.device("cpu")


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def resolve_device(device: Device) -> torch.device:
    """The device of an id. See [Note: CPU devices].

    Args:
        device: a device, its name, an index, or -1 for the CPU.

    Raises:
        InputError: the device does not exist.
        InputTypeError: not a device.
    """
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise InputTypeError(
            f"{device!r} is not a device; expected an index, a name such as 'cuda:0' or 'cpu', or a device"
        )
    accelerator = _accelerator()
    if isinstance(device, int):
        if device < -1:
            raise InputError(f"device {device}: indices start at 0; -1 means the CPU")
        if device == -1 or accelerator is None:
            return CPU
        chosen = torch.device(accelerator.type, device)
    else:
        try:
            chosen = torch.device(device)
        except RuntimeError as error:
            raise InputError(f"{device!r} is not a device: {str(error).splitlines()[0]}") from None
        if chosen.type == "cpu":
            return CPU
    if accelerator is None or chosen.type != accelerator.type:
        raise InputError(f"there is no {chosen.type} device for {chosen}; use numbers or 'cpu' for replicas on the CPU")
    index = _current_index() if chosen.index is None else chosen.index
    if index >= torch.accelerator.device_count():
        raise InputError(f"{chosen} does not exist: there are {torch.accelerator.device_count()} devices")
    return torch.device(chosen.type, index)


def _current_index() -> int:
    """Index of the current accelerator. In torch 2.6 the function has another name."""
    current = getattr(torch.accelerator, "current_device_index", None) or torch.accelerator.current_device_idx
    return int(current())


def resolve_devices(devices: Sequence[Device] | int) -> list[torch.device]:
    """The devices of ids, one per replica.

    Args:
        devices: ids as in `resolve_device`, or the number of devices.

    Raises:
        InputError: a device does not exist, there are none, or they have different types.
        InputTypeError: not devices.

    >>> resolve_devices(["cpu", "cpu"])
    [device(type='cpu'), device(type='cpu')]
    """
    if isinstance(devices, int) and not isinstance(devices, bool):
        devices = range(devices)
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise InputTypeError(f"device_ids is {devices!r}; expected a list of devices, or their number")
    chosen = [resolve_device(device) for device in devices]
    if not chosen:
        raise InputError(f"device_ids is {devices!r}; expected at least one device")
    types = sorted({device.type for device in chosen})
    if len(types) > 1:
        raise InputError(f"device_ids mixes {' and '.join(types)}; replicas must be on devices of the same type")
    return chosen


def are_on_cpu(devices: Sequence[torch.device]) -> bool:
    """Whether replicas on these devices run in Lockstep's threads rather than in torch's functions."""
    return all(device.type == "cpu" for device in devices)
