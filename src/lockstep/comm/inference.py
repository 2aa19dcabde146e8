"""Makes the methods of a group work inside `torch.inference_mode()` and `torch.compile`.

[Note: inference tensors] Tensors created in inference mode cannot be written outside of it, nor by another thread. A
group keeps some tensors, views of shared memory, and these must not become inference tensors just because the first
call was made in that mode. So the methods of a group leave the mode, and use plain tensors over the memory of those
passed in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lockstep.torch_private.dynamo import untraced

__all__ = ["leaves_inference_mode"]

Group = TypeVar("Group", bound=type)


def leaves_inference_mode(*verbs: str) -> Callable[[Group], Group]:
    """A class decorator that makes these methods, and their aliases in the class, work in inference mode."""

    def decorate(group: Group) -> Group:
        originals = {id(vars(group)[verb]) for verb in verbs}
        wrappers: dict[int, Callable[..., Any]] = {}
        for name, value in list(vars(group).items()):
            if id(value) in originals:
                wrapper = wrappers.setdefault(id(value), _wrap(value))
                setattr(group, name, wrapper)
        return group

    return decorate


def _wrap(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(self, *args, **kwargs)
        with torch.inference_mode(False):
            return method(
                self, *[_plain(each) for each in args], **{name: _plain(each) for name, each in kwargs.items()}
            )

    return untraced(call)


def _plain(value: Any) -> Any:
    """`value` with inference tensors, even in nested lists, replaced by plain tensors over their memory."""
    if isinstance(value, torch.Tensor):
        if not value.is_inference() or value.layout is not torch.strided:
            return value
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
