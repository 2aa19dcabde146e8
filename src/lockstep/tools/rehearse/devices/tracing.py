"""Programs that torch traces instead of running: `torch.compile`, export, and fake tensors.

A traced program sees the CPU. Fake tensors have no memory to mark, and autograd would look for the GPU that they claim
to be on; torch aborts the process when it finds none. When the program runs, its operators get real tensors and pass
marks on as usual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses.meta_utils import MetaTensorDescriber

from lockstep.tools.rehearse.devices.mode import mixing
from lockstep.tools.rehearse.devices.naming import CPU
from lockstep.tools.rehearse.patching import wrap

__all__ = ["install"]


def _describe_as_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def describe_tensor(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        description = original(self, tensor, *args, **kwargs)
        if description.device.type != "cuda":
            return description
        return dataclasses.replace(description, device=CPU)

    return describe_tensor


def _with_own_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """TorchScript recognizes the device type by identity, but annotations in torch's own code have the original."""

    def convert(annotation: Any, *rest: Any) -> Any:
        return original(torch.device if annotation == torch.device else annotation, *rest)

    return convert


def _unchecked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Allows a traced program to mix devices: its constants are on the CPU, which is not the script's mistake."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with mixing():
            return original(*args, **kwargs)

    return call


def _no_compile(model: object = None, **options: object) -> object:
    """`torch.compile`, as a function and as a decorator with options."""
    return (lambda function: function) if model is None else model


def install() -> None:
    """Make `torch.compile` return the function unchanged, and put fake tensors on the CPU."""
    # Compiled code would bypass the mode; eager execution computes the same.
    wrap(torch, "compile", lambda original: _no_compile)
    wrap(torch.jit.annotations, "try_ann_to_type", _with_own_device)
    wrap(torch.fx.graph_module._WrappedCall, "__call__", _unchecked)
    wrap(MetaTensorDescriber, "describe_tensor", _describe_as_on_cpu)
