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

__all__ = ["dump_state", "load_state", "plain_name", "tensors_of"]

_ROUNDING = 1e-5  # relative


def plain_name(name: str) -> str:
    """A parameter's name without what engines put around a model."""
    parts = name.split(".")
    while parts and parts[0] in ("module", "_forward_module", "_orig_mod", "model_engine"):
        parts = parts[1:]
    return ".".join(parts)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module, by `plain_name`."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {plain_name(name): tensor for name, tensor in named}


def _of_optimizer(optimizer: Any) -> tuple[list[Tensor], list[dict[str, Any]]]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    states = [optimizer.state.get(each, {}) for each in parameters]
    return parameters, [{key: value for key, value in state.items() if _is_plain(value)} for state in states]


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor | int | float | bool) and not isinstance(value, nn.Parameter)


def dump_state(path: Path, roots: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Write what a step begins with.

    Args:
        path: the file.
        roots: models, in the order in which they were first called.
        optimizers: in the order of their first steps.
    """
    content: dict[str, Any] = {
        "roots": [{name: tensor.detach() for name, tensor in tensors_of(root).items()} for root in roots],
        "optimizers": [],
        "rng": torch.get_rng_state(),
    }
    for optimizer in optimizers:
        parameters, states = _of_optimizer(optimizer)
        content["optimizers"].append({"parameters": [each.detach() for each in parameters], "states": states})
    draft = path.with_suffix(".tmp")
    torch.save(content, draft)
    os.replace(draft, path)


def _copy(target: Tensor, source: Any) -> float:
    """Overwrite a tensor; returns how far it was from that, relative to its greatest value."""
    # What is the same is left alone: a graph may hold it already.
    if not isinstance(source, Tensor) or target.shape != source.shape or torch.equal(target, source):
        return 0.0
    before = target.detach().clone()
    target.copy_(source)
    if not target.is_floating_point():
        return 0.0
    return float((target - before).abs().max() / target.abs().max().clamp(min=1e-30))


def load_state(path: Path, roots: Iterable[nn.Module], optimizers: Iterable[Any]) -> list[str]:
    """Begin a step with what rank 0 had, if it has written that. What it had not is left as it is.

    Returns:
        Names of the parameters that were others, by more than rounding.
    """
    if not path.exists():
        return []
    others: list[str] = []
    content = torch.load(path, weights_only=True)
    with torch.no_grad():
        for root, values in zip(roots, content["roots"], strict=False):
            for name, tensor in tensors_of(root).items():
                if _copy(tensor, values.get(name)) > _ROUNDING and isinstance(tensor, nn.Parameter):
                    others.append(name)
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
    return others
