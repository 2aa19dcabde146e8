"""`replicate`: copies a module to several devices.

[Note: the first replica] The first replica's parameters and buffers share memory with the module's, as torch
documents: in-place changes in its forward pass (running statistics, the vectors of spectral norm) are kept. The
others have copies, whose changes are lost.

[Note: order of gradients] The gradients of all replicas are added in the pairwise tree in which ranks add theirs
(shm/kernels.py), 16-bit floats in float32. So runs are bit-identical whichever thread
is faster, and N replicas that each return a loss give the same sum as N ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.parallel as torch_parallel
from torch import nn
from torch.autograd import Function

from lockstep.errors import ModelError
from lockstep.replicas.devices import Device, are_on_cpu, resolve_devices
from lockstep.torch_private.modules import buffers_of, children_of, copy_for_replica, parameters_of

__all__ = ["replicate"]

M = TypeVar("M", bound=nn.Module)

_NARROW = (torch.float16, torch.bfloat16)


def replicate(network: M, devices: Sequence[Device] | int, detach: bool = False) -> list[M]:
    """Copy a module, with gradients that flow to the original. Local. Mirrors `torch.nn.parallel.replicate`.

    Args:
        network: a module, on the first device.
        devices: devices of the copies, or their number. On accelerators this is torch's own function.
        detach: whether to cut the flow of gradients.

    Returns:
        One module per device. The first shares memory with `network`. See [Note: the first replica].

    Raises:
        ModelError: a module compiled by TorchScript, which cannot be copied.
    """
    chosen = resolve_devices(devices)
    if not are_on_cpu(chosen):
        return torch_parallel.replicate(network, chosen, detach)
    if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
        raise ModelError("a ScriptModule cannot be replicated on the CPU; replicate the original module")
    count = len(chosen)
    # First, because modules that cannot be replicated (lazy ones) raise here.
    replicas = {module: [_copy_of(module) for _ in chosen] for module in network.modules()}
    tensors = _ReplicatedTensors(count, detach)
    for module, copies in replicas.items():
        for name, child in children_of(module).items():
            _assign(copies, name, [None] * count if child is None else replicas[child])
        for name, parameter in parameters_of(module).items():
            if parameter is None:
                _assign(copies, name, [None] * count, "_parameters")
            else:
                _assign_parameter(copies, name, tensors.of_parameter(parameter))
        for name, buffer in buffers_of(module).items():
            _assign(copies, name, [None] * count if buffer is None else tensors.of_buffer(buffer), "_buffers")
    return replicas[network]  # type: ignore[return-value]


def _copy_of(module: nn.Module) -> nn.Module:
    copy: nn.Module = copy_for_replica(module)
    # As in torch's replicas, for parameters that `parameters()` does not show; some code reads gradients there.
    copy.__dict__["_former_parameters"] = OrderedDict()
    return copy


def _assign(copies: Sequence[nn.Module], name: str, values: Sequence[Any], into: str | None = None) -> None:
    for copy, value in zip(copies, values, strict=True):
        if value is None and into is not None:
            getattr(copy, into)[name] = None
        else:
            # By setattr, on which recurrent modules rely to update their flat weights.
            setattr(copy, name, value)


def _assign_parameter(copies: Sequence[nn.Module], name: str, tensors: Sequence[torch.Tensor]) -> None:
    _assign(copies, name, tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.__dict__["_former_parameters"][name] = tensor


class _ReplicatedTensors:
    """The replicas of a module's tensors; a tensor shared by several submodules is replicated once.

    Args:
        count: the number of replicas.
        detach: whether to cut the flow of gradients.
    """

    def __init__(self, count: int, detach: bool) -> None:
        self._count = count
        self._detach = detach
        self._made: dict[torch.Tensor, tuple[torch.Tensor, ...]] = {}

    def of_parameter(self, parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if parameter not in self._made:
            self._made[parameter] = self._replicate_parameter(parameter)
        return self._made[parameter]

    def of_buffer(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if buffer not in self._made:
            self._made[buffer] = self._replicate_buffer(buffer)
        return self._made[buffer]

    def _replicate_parameter(self, parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._detach or not parameter.requires_grad:
            return (parameter.detach(), *(parameter.detach().clone() for _ in range(self._count - 1)))
        replicas: tuple[torch.Tensor, ...] = _Replicate.apply(self._count, parameter)  # type: ignore[no-untyped-call]
        return replicas

    def _replicate_buffer(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if buffer.requires_grad and not self._detach:
            return self._replicate_parameter(buffer)
        return (buffer, *(buffer.detach().clone() for _ in range(self._count - 1)))


class _Replicate(Function):
    """Forward, a tensor per replica; backward, the sum of gradients. See [Note: order of gradients]."""

    @staticmethod
    def forward(ctx: Any, count: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return (tensor.view_as(tensor), *(tensor.clone() for _ in range(count - 1)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        # A replica that did not use the tensor has no gradient of it.
        present = [grad for grad in grads if grad is not None]
        if not present:
            return None, None
        dtype = present[0].dtype
        if dtype in _NARROW and len(present) > 1:
            return None, _add_up([grad.float() for grad in present]).to(dtype)
        return None, _add_up(present)


def _add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return _add_up(parts[:middle]) + _add_up(parts[middle:])
