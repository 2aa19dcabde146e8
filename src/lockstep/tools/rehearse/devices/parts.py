"""Tensors that are made of others: nested ones, and those of DTensor, which FSDP2 and tensor parallelism have.

Such a tensor has no memory of its own. It lies where its first part does (`marks.storage_of`), what is computed with
it is computed with its parts, which the mode sees (`mode.StandIn`), and it moves by its parts (`tensors.move`).
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
    """What is made of parts on a stand-in is told to torch as what it is; autograd would look for the GPU."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return original(*map(_on_host, args), **{name: _on_host(value) for name, value in kwargs.items()})

    return make


def _nested(original: Callable[..., Any]) -> Callable[..., Any]:
    """Nested tensors of the strided layout, made of a list: where they are asked for, else where its first lies."""

    def make(tensors: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        first = next((each for each in tensors if isinstance(each, torch.Tensor)), None)
        index = devices.index_of(device) if device is not None else None if first is None else mark_of(first)
        wants_grad = kwargs.pop("requires_grad", False)
        result = move(original(tensors, *args, device=CPU, **kwargs), index)
        return result.requires_grad_() if wants_grad else result

    return make


@contextlib.contextmanager
def _any_kernel(query: torch.Tensor) -> Iterator[None]:
    """A context: scripts choose among the kernels of GPUs, most of which the CPU lacks; one that it has is allowed."""
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
    """DTensor knows how to shard the fused kernels of GPUs, but not the CPU's: each rank attends to its own heads."""

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(query, "placements") or attn_mask is not None:
            with _any_kernel(query):
                return original(query, key, value, attn_mask, *args, **kwargs)
        from torch.distributed.tensor import DTensor, Replicate

        # As on GPUs: sharded over samples or heads, whole otherwise.
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
    """Whether ranks can draw the parts of one tensor from one stream: with the generators of GPUs only."""
    return lambda device_mesh: False


def _replace_draws() -> None:
    wrap_everywhere(sys.modules[_DRAWS], "is_rng_supported_mesh", _own_draws)


def install() -> None:
    """Replace what makes such tensors."""
    make_wrapper = _wrapper_on_host(torch.Tensor._make_wrapper_subclass)
    replace(torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper))
    wrap(sys.modules["torch._C._nested"], "nested_tensor", _nested)
    wrap(torch.nn.functional, "scaled_dot_product_attention", _attention)
    call_after_import(_DRAWS, _replace_draws)
