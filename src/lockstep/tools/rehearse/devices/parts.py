"""Tensors composed of other tensors: nested tensors, and DTensor, which FSDP2 and tensor parallelism use.

Such a tensor has no memory itself. It is on the device of its first part (`marks.storage_of`), operators run on its
parts and so reach the mode (`mode.StandIn`), and it is moved by moving its parts (`tensors.move`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.after_import import call_after_import
from lockstep.tools.rehearse.devices.marks import mark_of
from lockstep.tools.rehearse.devices.naming import CPU, devices
from lockstep.tools.rehearse.devices.tensors import move
from lockstep.tools.rehearse.patching import replace, wrap, wrap_everywhere

__all__ = ["install"]

_DRAWS = "torch.distributed.tensor._random"


def _on_host(word: Any) -> Any:
    return CPU if isinstance(word, torch.device) and word.type == "cuda" else word


def _wrapper_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tells torch the real device of a tensor with parts on a stand-in; autograd would look for the GPU."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return original(*map(_on_host, args), **{name: _on_host(value) for name, value in kwargs.items()})

    return make


def _nested(original: Callable[..., Any]) -> Callable[..., Any]:
    """Creates a strided nested tensor from a list, on the requested device or else that of the list's first tensor."""

    def make(tensors: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        first = next((each for each in tensors if isinstance(each, torch.Tensor)), None)
        index = devices.index_of(device) if device is not None else None if first is None else mark_of(first)
        wants_grad = kwargs.pop("requires_grad", False)
        result = move(original(tensors, *args, device=CPU, **kwargs), index)
        return result.requires_grad_() if wants_grad else result

    return make


@contextlib.contextmanager
def _any_kernel(query: torch.Tensor) -> Iterator[None]:
    """Context manager: enables the math kernel for a query on a stand-in, as the CPU lacks most kernels for GPUs."""
    is_on = torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
    is_missing = mark_of(query) is not None and not is_on
    if is_missing:
        torch.backends.cuda.enable_math_sdp(True)
    try:
        yield
    finally:
        if is_missing:
            torch.backends.cuda.enable_math_sdp(False)


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor can shard the fused kernels of GPUs, but not the CPU's: each rank computes its own samples or heads."""

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(query, "placements") or attn_mask is not None:
            with _any_kernel(query):
                return original(query, key, value, attn_mask, *args, **kwargs)
        from torch.distributed.tensor import DTensor, Replicate

        # As on GPUs: sharded over samples or heads, replicated otherwise.
        places = [each if each.is_shard(0) or each.is_shard(1) else Replicate() for each in query.placements]
        parts = [each.redistribute(placements=places).to_local() for each in (query, key, value)]
        with _any_kernel(parts[0]):
            result = original(*parts, None, *args, **kwargs)
        shape = torch.Size((*query.shape[:-1], value.shape[-1]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            result.contiguous(), query.device_mesh, places, run_check=False, shape=shape, stride=stride
        )

    return attend


def _own_draws(original: Callable[..., Any]) -> Callable[..., Any]:
    """Says that ranks cannot draw a tensor's shards from one random stream, which needs generators of GPUs."""
    return lambda device_mesh: False


def _replace_draws() -> None:
    wrap_everywhere(sys.modules[_DRAWS], "is_rng_supported_mesh", _own_draws)


def install() -> None:
    """Replace the functions that create such tensors, attention, and DTensor's check for random streams."""
    make_wrapper = _wrapper_on_host(torch.Tensor._make_wrapper_subclass)
    replace(torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper))
    wrap(sys.modules["torch._C._nested"], "nested_tensor", _nested)
    wrap(torch.nn.functional, "scaled_dot_product_attention", _attention)
    call_after_import(_DRAWS, _replace_draws)
