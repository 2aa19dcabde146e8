"""`lockstep.DataParallel`: a model on several devices of one process.

Each forward pass splits the batch along a dimension (`scatter_gather.py`), copies the module to the devices
(`replicate.py`), runs the copies in threads (`parallel_apply.py`) and concatenates their outputs; the backward pass
reverses these steps. Between accelerators, torch's own functions move the tensors.

[Note: one source of random numbers] Each GPU has its own generator; on the CPU all replicas share one, so dropout masks
would depend on which thread draws first. So in its first pass in training mode, a module runs its replicas one after
another. If it draws random numbers there, it continues like that; if not, replicas run in parallel from
then on. If a module draws for the first time later, this is detected, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from lockstep.errors import InputError, InputTypeError
from lockstep.log import get_logger, warn_once
from lockstep.replicas.devices import Device, are_on_cpu, resolve_device, resolve_devices
from lockstep.replicas.parallel_apply import parallel_apply
from lockstep.replicas.replicate import replicate
from lockstep.replicas.scatter_gather import gather, scatter_kwargs

__all__ = ["DataParallel", "data_parallel"]

_logger = get_logger(__name__)


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]  # generic in its module since torch 2.7
    """Runs a module on several devices of this process, each on a piece of the batch.

    A drop-in replacement for, and a subclass of, `torch.nn.DataParallel` that also works without GPUs, with replicas on
    CPU threads. Losses computed per replica must be averaged with care, because pieces of a batch may differ in size
    by one row or more. For several processes, or more speed, use `lockstep.DistributedDataParallel`.

    Args:
        module: the model, on the first device. Its forward takes and returns nested containers of tensors; other inputs
            are shared by all replicas. Attributes that forward sets on `self` are lost; in-place changes of
            buffers are kept if the first replica makes them. Hooks run once per replica.
        device_ids: indices, names or devices; or the number of devices; None for all accelerators. Without
            accelerators, numbers mean replicas on the CPU, and None the module itself.
        output_device: device of the outputs; by default the first device; "cpu" or -1 for the CPU.
        dim: the dimension along which inputs are split and outputs concatenated.

    Attributes:
        module: the model. Take `state_dict` from it for names without `module.`.
        device_ids: indices of accelerators, or CPU devices; empty for the module itself.

    Raises:
        InputError: no such device; in a call, also inputs that cannot be split or outputs that cannot be gathered.
        InputTypeError: not a module, or not devices.

    >>> model = DataParallel(nn.Linear(4, 2), device_ids=["cpu", "cpu"])
    >>> model(torch.ones(5, 4)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | int | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputTypeError(f"DataParallel wraps a torch.nn.Module, got {type(module).__name__}")
        devices = _choose_devices(device_ids)
        output = devices[0] if output_device is None and devices else resolve_device(output_device or 0)
        if are_on_cpu(devices):
            nn.Module.__init__(self)
            if output.type != "cpu":
                raise InputError(f"output_device is {output}, but the replicas are on the CPU")
            self.module = module
            self.device_ids: list[Any] = list(devices)
            self.src_device_obj = torch.device("cpu")
            self.dim = dim
        else:
            super().__init__(module, [device.index for device in devices], None, dim)
        self.output_device: Any = output if output.type == "cpu" else output.index
        self._draws: bool | None = None  # whether it draws random numbers in training mode; None before the first pass

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on all devices; returns the gathered outputs, on `output_device`.

        Raises:
            InputError: see `scatter` and `gather`; or the module is not on the first device.
            Exception: raised by a replica, with its number and device in the message.
        """
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            if not self.device_ids:
                return self.module(*inputs, **kwargs)
            _check_device(self.module, self.src_device_obj)
            pieces, named = self.scatter(inputs, kwargs, self.device_ids)
            if not pieces and not named:
                # Without inputs there is nothing to split.
                pieces, named = ((),), ({},)
            if len(self.device_ids) == 1:
                return self.module(*pieces[0], **named[0])
            replicas = self.replicate(self.module, self.device_ids[: len(pieces)])
            outputs = self.parallel_apply(replicas, pieces, named)
            return self.gather(outputs, self.output_device)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Device]) -> Any:
        """Split the arguments between replicas; may be overridden."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def replicate(self, module: nn.Module, device_ids: Sequence[Device]) -> list[nn.Module]:
        """Copy the module to the devices."""
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas; returns their outputs. See [Note: one source of random numbers]."""
        devices = self.device_ids[: len(replicas)]
        is_free = not self.training or _may_wait_for_each_other(self.module)
        if len(replicas) == 1 or self.src_device_obj.type != "cpu" or is_free:
            return parallel_apply(replicas, inputs, kwargs, devices)
        if self._draws:
            return parallel_apply(replicas, inputs, kwargs, devices, in_turn=True)
        is_first = self._draws is None
        before = torch.get_rng_state()
        outputs = parallel_apply(replicas, inputs, kwargs, devices, in_turn=is_first)
        self._draws = not torch.equal(before, torch.get_rng_state())
        if self._draws and not is_first:
            warn_once(
                _logger,
                f"{type(self.module).__name__} draws random numbers, and its {len(replicas)} replicas drew them in no "
                "fixed order; from now on they run one after another, so that runs are reproducible",
            )
        return outputs

    def gather(self, outputs: Any, output_device: Device) -> Any:
        """Gather the outputs; may be overridden."""
        return gather(outputs, output_device, self.dim)


def _may_wait_for_each_other(module: nn.Module) -> bool:
    """Whether replicas may wait for each other, as modules with replication callbacks do, and so cannot run in turn."""
    return any(hasattr(each, "__data_parallel_replicate__") for each in module.modules())


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | int | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a module once on several devices. Local. Mirrors `torch.nn.parallel.data_parallel`.

    Args:
        module: see `DataParallel`.
        inputs: its positional arguments (a tuple), its single argument, or None for none.
        device_ids: see `DataParallel`.
        output_device: see `DataParallel`.
        dim: see `DataParallel`.
        module_kwargs: its keyword arguments.

    Raises:
        InputError: see `DataParallel`.
    """
    arguments = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim).forward(*arguments, **(module_kwargs or {}))


def _choose_devices(device_ids: Sequence[Device] | int | None) -> list[torch.device]:
    if device_ids is not None:
        return resolve_devices(device_ids)
    return resolve_devices(torch.accelerator.device_count()) if torch.accelerator.is_available() else []


def _check_device(module: nn.Module, device: torch.device) -> None:
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.device != device:
            raise InputError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]) but found one of them "
                f"on device: {tensor.device}; move the module there first"
            )
