"""`lockstep.ZeroRedundancyOptimizer` with parameters on the GPU, beside the plain optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep
from check_engines import batches, mine, scaled_step
from gpu_context import Context, close, make_model, same

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def sharded(run: Context, backend: str) -> dict[str, Any]:
    """Adam, accumulated and clipped: parameters and state of the plain optimizer. Then half precision with a scaler."""
    world = run.init(backend)
    facts = {}
    for dtype, tolerance in _TOLERANCE.items():
        models, optimizers = _pair(run, dtype)
        for inputs, targets in batches(6, dtype, run.device):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                with model.no_sync():
                    cross_entropy(model(mine(inputs)), mine(targets)).backward()
                cross_entropy(model(mine(inputs) * 0.5), mine(targets)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
        facts[str(dtype)] = _compare(models, tolerance)
        _compare_states(optimizers, tolerance)
    facts["scaled"] = _scaled(run)
    world.shutdown()
    return facts


def _pair(run: Context, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    ids = [0] if run.is_cuda else None
    models = [lockstep.DistributedDataParallel(make_model(dtype, run.device), device_ids=ids) for _ in range(2)]
    ours = lockstep.ZeroRedundancyOptimizer(models[0].parameters(), torch.optim.Adam, lr=1e-2)
    return models, [ours, torch.optim.Adam(models[1].parameters(), lr=1e-2)]


def _compare(models: list[Any], tolerance: float) -> float:
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(close(one.detach(), other.detach(), tolerance, "weights") for one, other in pairs)


def _compare_states(optimizers: list[Any], tolerance: float) -> None:
    """The unsharded form has what the plain optimizer has, and loads into one."""
    ours, plain = (copy.deepcopy(each.state_dict()) for each in optimizers)
    same(ours["state"].keys(), plain["state"].keys(), "parameters with a state")
    for key, entries in plain["state"].items():
        for name, value in entries.items():
            found = ours["state"][key][name]
            close(found.to(value.device), value, tolerance, f"{name} of parameter {key}")
    optimizers[1].load_state_dict(ours)


def _scaled(run: Context) -> float:
    """As `grad_scaler` has it: a scale that is too high at first, and steps that both must skip alike."""
    models, optimizers = _pair(run, torch.float32)
    scalers = [torch.amp.GradScaler(run.device.type, init_scale=2.0**40) for _ in models]
    for inputs, targets in batches(30, torch.float32, run.device):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            scaled_step(model, optimizer, scaler, mine(inputs), mine(targets), torch.float16)
    same(scalers[0].get_scale(), scalers[1].get_scale(), "scale")
    # Adam divides by its own moments: rounding of float16 activations is larger in the weights than in gradients.
    return _compare(models, 1e-3)
