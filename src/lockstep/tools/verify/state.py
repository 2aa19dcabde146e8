"""Passes rank 0's parameters, buffers, optimizers and random state at each step's beginning to the one process.

[Note: each step by itself] The one process starts each step from rank 0's state, so that a difference in one step
neither hides nor causes others. State that the script keeps elsewhere (a running mean in a variable) is not copied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.parallel.sharded.optimizer import ZeroRedundancyOptimizer
from lockstep.tools.verify.rows import whole

__all__ = ["dump_state", "load_state", "others_than", "plain_name", "write_at_once"]

_ROUNDING = 1e-5  # relative


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of engines."""
    parts = name.split(".")
    while parts and parts[0] in ("module", "_forward_module", "_orig_mod", "model_engine"):
        parts = parts[1:]
    return ".".join(parts)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module, by `plain_name`."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {plain_name(name): tensor for name, tensor in named}


def _own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; in one process, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _of_optimizer(optimizer: Any, sharded: Mapping[str, Any] | None) -> list[dict[Any, Any]]:
    """An optimizer's parameters and the state of each, returned for modification.

    Args:
        optimizer: the optimizer.
        sharded: its `state_dict()`, if ranks hold parts of the state.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    states, keys = (optimizer.state, parameters) if sharded is None else (sharded["state"], range(len(parameters)))
    return [dict(enumerate(parameters)), *(states.get(key, {}) for key in keys)]


def _sharded_state_of(optimizer: Any) -> dict[str, Any] | None:
    """A copy of the whole state of an optimizer of which ranks hold parts; None for any other. Collective."""
    return optimizer.state_dict() if isinstance(optimizer, ZeroRedundancyOptimizer) else None


def _whole(part: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: whole(value) if isinstance(value, Tensor) else value for key, value in part.items() if _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor | int | float | bool)


def dump_state(path: Path | None, roots: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Write the state at the beginning of a step. Collective if ranks hold parts of a tensor, else local.

    Args:
        path: the file; None on ranks that do not write.
        roots: models, in the order in which they were first called.
        optimizers: optimizers, in the order of their first steps.
    """
    content = {
        "roots": [_whole(_tensors_of(root)) for root in roots],
        "optimizers": [
            [_whole(part) for part in _of_optimizer(optimizer, _sharded_state_of(optimizer))]
            for optimizer in optimizers
        ],
        "rng": torch.get_rng_state(),
    }
    if path is not None:
        write_at_once(path, content)


def write_at_once(path: Path, content: Any) -> None:
    """Write a file atomically."""
    draft = path.with_suffix(".tmp")
    torch.save(content, draft)
    os.replace(draft, path)


def _copy(target: Tensor, source: Any) -> None:
    target = _own_part(target)
    # Equal values are left alone: a graph may already refer to the tensor.
    if isinstance(source, Tensor) and target.shape == source.shape and not torch.equal(target, source):
        target.copy_(source)


def others_than(path: Path, root: nn.Module) -> list[str]:
    """Names of the first model's parameters that differ from rank 0's initial ones by more than rounding."""
    if not path.exists():
        return []
    values = torch.load(path, weights_only=True)["roots"][0]
    named = [(plain_name(name), _own_part(each)) for name, each in root.named_parameters()]
    pairs = [(name, each, values[name]) for name, each in named if name in values and values[name].numel()]
    return [
        name
        for name, each, other in pairs
        if each.shape == other.shape and bool((each - other).abs().max() > _ROUNDING * other.abs().max())
    ]


def load_state(path: Path, roots: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
    """Begin a step with rank 0's state, if it has been written. State that rank 0 did not have is left unchanged."""
    if not path.exists():
        return
    content = torch.load(path, weights_only=True)
    pairs = list(zip(map(_tensors_of, roots), content["roots"], strict=False))
    sharded: list[tuple[Any, dict[str, Any]]] = []
    for optimizer, values in zip(optimizers, content["optimizers"], strict=False):
        state = _sharded_state_of(optimizer)
        pairs += zip(_of_optimizer(optimizer, state), values, strict=False)
        sharded += [] if state is None else [(optimizer, state)]
    with torch.no_grad():
        for part, values in pairs:
            for key in part.keys() & values.keys():
                if isinstance(part[key], Tensor):
                    _copy(part[key], values[key])
                elif _is_plain(part[key]):
                    part[key] = values[key]
    for optimizer, state in sharded:
        optimizer.load_state_dict(state)
    with contextlib.suppress(RuntimeError):
        torch.set_rng_state(content["rng"])
