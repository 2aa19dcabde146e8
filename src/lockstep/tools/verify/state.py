"""Parameters, buffers, optimizers and random numbers: of rank 0 at the beginning of each step, for the one process.

[Note: each step by itself] The one process starts each step from what rank 0 had, so that a difference of one step
neither hides nor breeds others. What the script keeps elsewhere (a running mean in a variable) is its own on either
side.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.tools.verify.rows import whole

__all__ = ["dump_state", "load_state", "others_than", "plain_name"]

_ROUNDING = 1e-5  # relative


def plain_name(name: str) -> str:
    """A parameter's name without what engines put around a model."""
    parts = name.split(".")
    while parts and parts[0] in ("module", "_forward_module", "_orig_mod", "model_engine"):
        parts = parts[1:]
    return ".".join(parts)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module, by `plain_name`."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {plain_name(name): tensor for name, tensor in named}


def _own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: of one process, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _of_optimizer(optimizer: Any) -> tuple[list[Tensor], list[dict[str, Any]]]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    states = [optimizer.state.get(each, {}) for each in parameters]
    return parameters, [{key: value for key, value in state.items() if _is_plain(value)} for state in states]


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor | int | float | bool) and not isinstance(value, nn.Parameter)


def dump_state(path: Path | None, roots: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Write what a step begins with. Collective where ranks hold parts of a tensor, else local.

    Args:
        path: the file; None on ranks that write none.
        roots: models, in the order in which they were first called.
        optimizers: in the order of their first steps.
    """
    content: dict[str, Any] = {
        "roots": [{name: whole(tensor) for name, tensor in _tensors_of(root).items()} for root in roots],
        "optimizers": [],
        "rng": torch.get_rng_state(),
    }
    for optimizer in optimizers:
        parameters, states = _of_optimizer(optimizer)
        states = [{key: whole(one) if isinstance(one, Tensor) else one for key, one in each.items()} for each in states]
        content["optimizers"].append({"parameters": list(map(whole, parameters)), "states": states})
    if path is None:
        return
    draft = path.with_suffix(".tmp")
    torch.save(content, draft)
    os.replace(draft, path)


def _copy(target: Tensor, source: Any) -> None:
    target = _own_part(target)
    # What is the same is left alone: a graph may hold it already.
    if isinstance(source, Tensor) and target.shape == source.shape and not torch.equal(target, source):
        target.copy_(source)


def others_than(path: Path, root: nn.Module) -> list[str]:
    """Names of the parameters of the first model that are not those which rank 0 began with, by more than rounding."""
    if not path.exists():
        return []
    values = torch.load(path, weights_only=True)["roots"][0]
    named = [(plain_name(name), _own_part(each)) for name, each in root.named_parameters()]
    return [name for name, each in named if name in values and _is_another(each, values[name])]


def _is_another(value: Tensor, other: Tensor) -> bool:
    if value.shape != other.shape or torch.equal(value, other):
        return False
    return bool((value - other).abs().max() > _ROUNDING * other.abs().max())


def load_state(path: Path, roots: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
    """Begin a step with what rank 0 had, if it has written that. What it had not is left as it is."""
    if not path.exists():
        return
    content = torch.load(path, weights_only=True)
    with torch.no_grad():
        for root, values in zip(roots, content["roots"], strict=False):
            for name, tensor in _tensors_of(root).items():
                _copy(tensor, values.get(name))
        for optimizer, values in zip(optimizers, content["optimizers"], strict=False):
            parameters, states = _of_optimizer(optimizer)
            for parameter, value in zip(parameters, values["parameters"], strict=False):
                _copy(parameter, value)
            for parameter, state, value in zip(parameters, states, values["states"], strict=False):
                for key, old in state.items():
                    if isinstance(old, Tensor):
                        _copy(old, value.get(key))
                    elif key in value:
                        optimizer.state[parameter][key] = value[key]
    with contextlib.suppress(RuntimeError):
        torch.set_rng_state(content["rng"])
