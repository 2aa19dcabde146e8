"""The functions that `torch.nn.DataParallel` is built on, for the stand-ins of one process.

torch's own DataParallel calls these: its replicas compute in one thread per stand-in, and gradients are added up
by the same functions as on GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import comm

from lockstep.tools.rehearse.devices.naming import devices
from lockstep.tools.rehearse.devices.tensors import move
from lockstep.tools.rehearse.patching import replace

__all__ = ["install"]


def _indices(targets: Sequence[Any]) -> list[int | None]:
    return [None if target == -1 else devices.index_of(target) for target in targets]


def _broadcast(tensor: torch.Tensor, devices: Any = None, *, out: Any = None) -> Any:
    if out is not None:
        for target in out:
            target.copy_(tensor)
        return tuple(out)
    return tuple(move(tensor.detach(), index) for index in _indices(devices))


def _broadcast_coalesced(tensors: Any, devices: Any, buffer_size: int = 0) -> Any:
    return [[move(tensor.detach(), index) for tensor in tensors] for index in _indices(devices)]


def _reduce_add(inputs: Any, destination: Any = None) -> torch.Tensor:
    target = devices.index_of(destination)
    total = move(inputs[0], target).clone()
    for tensor in inputs[1:]:
        total += move(tensor, target)
    return total


def _reduce_add_coalesced(inputs: Any, destination: Any = None, buffer_size: int = 0) -> Any:
    return tuple(_reduce_add(tensors, destination) for tensors in zip(*inputs, strict=True))


def _scatter(
    tensor: torch.Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> Any:
    if out is not None:
        for target, piece in zip(out, torch.split(tensor, [each.size(dim) for each in out], dim), strict=True):
            target.copy_(piece)
        return tuple(out)
    pieces = tensor.chunk(len(devices), dim) if chunk_sizes is None else torch.split(tensor, list(chunk_sizes), dim)
    return tuple(move(piece.clone(), index) for piece, index in zip(pieces, _indices(devices), strict=False))


def _gather(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> Any:
    target = None if destination == -1 else devices.index_of(destination)
    joined = torch.cat([move(tensor, target) for tensor in tensors], dim)
    return joined if out is None else out.copy_(joined)


def install() -> None:
    """Replace torch's functions, which are written in C++ for CUDA, by these."""
    for name, function in (
        ("broadcast", _broadcast),
        ("broadcast_coalesced", _broadcast_coalesced),
        ("reduce_add", _reduce_add),
        ("reduce_add_coalesced", _reduce_add_coalesced),
        ("scatter", _scatter),
        ("gather", _gather),
    ):
        for owner in (comm, sys.modules.get("torch.cuda.comm")):  # the second, older name, is there if imported
            if owner is not None:
                replace(owner, name, function)
