"""Conversion of models to 16 bits, and float32 master copies of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase

from lockstep.errors import InputTypeError
from lockstep.torch_private.modules import BatchNorm, buffers_of

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


class tofp16(nn.Module):  # noqa: N801 Apex's name
    """A module that casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """`input` in float16."""
        return input.half()


class FP16Model(nn.Module):
    """A model in float16, except for batch normalization, that takes inputs of any floating-point dtype.

    Args:
        network: the module to convert, in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any) -> Any:
        """Run the network on float16 inputs."""
        return self.network(*(each.half() for each in inputs))


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 Apex's name
    """Convert batch normalization with parameters in a 16-bit model back to float32. Returns the module."""
    for layer in module.modules():
        if isinstance(layer, BatchNorm) and layer.affine:
            layer.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """The model in float16, except for batch normalization, with a cast of its input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's floating-point parameters, gradients and buffers; not those of submodules."""
    for parameter in module.parameters(recurse=False):
        if parameter.dtype.is_floating_point:
            parameter.data = parameter.data.to(dtype)
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.to(dtype)
    for name, buffer in buffers_of(module).items():
        if buffer is not None and buffer.dtype.is_floating_point:
            buffers_of(module)[name] = buffer.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model, except for batch normalization with parameters. Returns the model."""
    for module in network.modules():
        if isinstance(module, BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, RNNBase):
            module.flatten_parameters()
    return network


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """The trained parameters of a model, and float32 masters of them.

    Args:
        model: a model with parameters of any floating-point dtypes.
        flat_master: create one flat master for all parameters, which must have the same dtype.

    Returns:
        Parameters and masters, in the same order; with `flat_master`, one master with a zero gradient.

    Raises:
        InputTypeError: `flat_master` with parameters of several dtypes.
    """
    parameters: list[Tensor] = [each for each in model.parameters() if each.requires_grad]
    if not flat_master:
        return parameters, [each.detach().clone().float().requires_grad_() for each in parameters]
    dtypes = {each.dtype for each in parameters}
    if len(dtypes) > 1:
        raise InputTypeError(
            f"prep_param_lists(flat_master=True) needs parameters of the same dtype, got {sorted(map(str, dtypes))}. "
            "Use flat_master=False, or FP16_Optimizer"
        )
    master = nn.Parameter(_flat([each.detach() for each in parameters]).float())
    master.grad = torch.zeros_like(master)
    return parameters, [master]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy gradients of the model to its masters; arguments as returned by `prep_param_lists`."""
    if flat_master:
        # One gradient for all; a missing one counts as zero.
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in model_params]
        wide = _flat(gradients).to(master_params[0].dtype)
        master_params[0].grad = wide if master_params[0].grad is None else master_params[0].grad.copy_(wide)
        return
    for model, master in zip(model_params, master_params, strict=True):
        if model.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = model.grad.to(master.dtype, copy=True)
        else:
            master.grad.copy_(model.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy masters to the model's parameters; arguments as returned by `prep_param_lists`."""
    if flat_master:
        pieces = torch.split(master_params[0], [each.numel() for each in model_params])
        for model, piece in zip(model_params, pieces, strict=True):
            model.copy_(piece.view(model.shape))
        return
    for model, master in zip(model_params, master_params, strict=True):
        model.copy_(master)


def clip_grad_norm(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_`, under its name before torch 0.4.1."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def to_python_float(t: Any) -> float:
    """The number in a tensor, or the first in a list."""
    return float(t.item() if hasattr(t, "item") else t[0])
