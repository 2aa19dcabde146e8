"""The divisors that losses have on this rank, under torch's DistributedDataParallel or ours.

Notes `loss` for every line that walks one backward: `count` (how often), and `found`: of each time at which the loss
was seen to be no mean over samples, its number, what it is, and what it is divided by (None for a sum).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from lockstep import batch
from lockstep.parallel.loss_kinds import find_other_divisor
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.rehearse.sites import chain
from lockstep.tools.rehearse.watch import passes
from lockstep.tools.rehearse.watch.recorder import recorder
from lockstep.tree import tensors_in

__all__ = ["install"]

_OUTPUT = "lockstep.rehearsed"
# Losses of one line that are looked at: what differs between ranks shows early.
_MAX_LOOKS = 200


class _Line:
    """What one line has walked backward."""

    def __init__(self) -> None:
        self.count = 0
        self.found: list[tuple[int, str, float | None]] = []


_lines: dict[tuple[Site, ...], _Line] = {}


def _metadata(node: Node) -> dict[Any, Any]:
    return cast("dict[Any, Any]", node.metadata)  # typed as a method in torch's stubs, but a property


def _mark_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn)[_OUTPUT] = True
                batch.note_shape(tensor)
        return output

    return forward


def _is_output(node: Node) -> bool:
    return batch.is_marked(node) or _OUTPUT in _metadata(node)


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for loss in tensors if isinstance(tensors, Sequence) else (tensors,):
            if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.grad_fn is not None:
                _look_at(loss)
        return original(tensors, *args, **kwargs)

    return backward


def _look_at(loss: torch.Tensor) -> None:
    line = _lines.setdefault(chain(), _Line())
    if line.count >= _MAX_LOOKS:
        return
    now = passes.current()
    try:
        found = find_other_divisor(loss, None if now is None else now.last_size or None, _is_output)
    except RuntimeError:  # walked backward before, so there is nothing left to see
        return
    if found is not None:
        line.found.append((line.count, found.text, found.value))
    line.count += 1


def _finish() -> None:
    for sites, line in _lines.items():
        recorder.note("loss", sites, count=line.count, found=line.found)


def install() -> None:
    """Watch forward passes of torch's engine, and all backward passes."""
    wrap(DistributedDataParallel, "forward", _mark_outputs)
    wrap(torch.autograd, "backward", _backward)  # Tensor.backward calls it
    recorder.finishers.append(_finish)
