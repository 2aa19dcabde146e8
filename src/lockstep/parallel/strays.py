"""Strays: gradients that bypassed the engine, so that nobody has averaged them.

A script that calls `net(x)` instead of `model(x)`, where `model = DistributedDataParallel(net)`, gets gradients that
are each rank's own. The reducer's sentinels fire all the same, outside of any backward pass that the engine knows of,
and note that a gradient *strayed*. When an optimizer is about to step, the ranks compare what they have, once: equal
gradients are fine (a regulariser's own backward pass over the parameters gives those), others are an error.

Gradients that `torch.autograd.grad` returned and the script wrote to `.grad` are strays, too: no sentinel fires, but
the last forward pass had no backward pass.

A strayed gradient that a later pass of the engine averages with its own is no stray any more. Gradients of passes under
`no_sync()` are never strays; a rank that steps by them alone gets a warning, since local SGD does so on purpose. It
gets none where the script averages them itself (`by_hand.py`).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.drift.comparison import digest
from lockstep.drift.engines import engines, engines_of
from lockstep.drift.watch import describe_step
from lockstep.errors import ModelError
from lockstep.log import get_logger, warn_once
from lockstep.parallel.closures import explain_lone_steps
from lockstep.rank_zero import collective_device
from lockstep.torch_private.autograd import current_graph_task_id

__all__ = ["install"]

_logger = get_logger(__name__)

# Comparisons that may end well before an engine's strayed gradients are taken for equal in every step.
_COMPARISONS = 3

_comparisons: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_warned: WeakSet[Any] = WeakSet()
_averaged_by_hand: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # in how many steps


@functools.cache
def install() -> None:
    """From now on look at gradients before optimizers step. Local; may be called again."""
    register_optimizer_step_pre_hook(_check_gradients)
    register_optimizer_step_post_hook(_check_gradients)  # those that came from a closure


def _check_gradients(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise if this optimizer steps strayed gradients that differ between ranks. Collective where some strayed."""
    if not any(engine.has_signs for engine in engines()):
        return
    if current_graph_task_id() != -1:
        _refuse_within(optimizer)
        return
    if not _is_suspicious(optimizer):
        return
    gc.collect()  # see [Note: engines that are gone] in `drift/engines.py`
    own = engines_of(optimizer)
    for engine in own:
        if engine.awaits_gradients:
            engine.refuse_step(describe_step(optimizer))
    for engine in sorted(_to_compare(own), key=lambda each: str(each.process_group.group_name)):
        engine.forget_strayed()
        _comparisons[engine] = _comparisons.get(engine, 0) + 1
        with explain_lone_steps(optimizer):
            are_equal = _are_equal(engine)
        if not are_equal:
            raise ModelError(
                f"{describe_step(optimizer)}: gradients of {type(engine.module).__name__} differ between ranks, "
                "because they came past DistributedDataParallel, which averages those of its own forward passes. Call "
                "model(x), where model = lockstep.DistributedDataParallel(net), and neither net(x) nor "
                "model.module(x); call backward() on the loss, since what torch.autograd.grad returns is this rank's "
                "alone; and where a loss contains gradients (create_graph=True), call backward() once, on the whole "
                "loss"
            )


def _refuse_within(optimizer: Optimizer) -> None:
    """Raise if this optimizer steps, as by hooks of parameters, what the backward pass that runs is to average."""
    if any(engine.note_step_within() for engine in engines_of(optimizer)):
        raise ModelError(
            f"{describe_step(optimizer)}: the optimizer steps within the backward pass, by this rank's own gradients: "
            "DistributedDataParallel averages them at its end. Step after backward()"
        )


def _is_suspicious(optimizer: Optimizer) -> bool:
    """Whether to look closer, when garbage is collected: so this keeps no engine in use. Local."""
    own = engines_of(optimizer)
    for engine in own:
        if engine.stray_signs.have_accumulated:
            _warn_of_accumulated(engine, optimizer)
    return bool(_to_compare(own)) or any(engine.awaits_gradients for engine in own)


def _warn_of_accumulated(engine: Any, optimizer: Optimizer) -> None:
    if engine in _warned or not _has_gradients(engine, optimizer):
        return
    if engine.has_averaged_by_hand():  # which waits for a GPU
        _averaged_by_hand[engine] = _averaged_by_hand.get(engine, 0) + 1
        if _averaged_by_hand[engine] == _COMPARISONS:
            _warned.add(engine)  # it always does
        return
    _warned.add(engine)
    if dist.get_world_size(engine.process_group) == 1 or dist.get_rank(engine.process_group) != 0:
        return
    warn_once(
        _logger,
        f"{describe_step(optimizer)}: gradients of {type(engine.module).__name__} were accumulated under no_sync() (or "
        "disable_allreduce()) and no pass has averaged them, so each rank steps by its own, and their parameters "
        "differ from here on. Have the last pass before each step outside of it, that of a window which the end of the "
        "data cuts short, too",
    )


def _has_gradients(engine: Any, optimizer: Optimizer) -> bool:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(each.grad is not None and id(each) in stepped for each in engine.module.parameters())


def _to_compare(own: Sequence[Any]) -> list[Any]:
    """Those of an optimizer's engines whose gradients may have strayed, and were not equal in some steps. Local.

    Of a forward pass without a backward pass only the engine used last is suspected: one that the script has replaced
    may be gone on some ranks.
    """
    latest = max((engine.last_used for engine in own), default=0)
    found = []
    for engine in own:
        signs = engine.stray_signs
        if engine.process_group.size() == 1:
            continue
        if not signs.have_strayed and not (signs.lacks_backward and engine.last_used == latest):
            continue
        if _comparisons.get(engine, 0) < _COMPARISONS:
            found.append(engine)
        else:
            engine.forget_strayed()
    return found


def _are_equal(engine: Any) -> bool:
    """Whether all ranks hold the same gradients, bit for bit. Collective."""
    gradients = [each.grad for each in engine.module.parameters() if each.grad is not None]
    value = int(digest(gradients)[:15], 16)
    own = torch.tensor([value], dtype=torch.int64, device=collective_device(engine.process_group, engine.device))
    rows = [torch.empty_like(own) for _ in range(engine.process_group.size())]
    dist.all_gather(rows, own, group=engine.process_group)
    return all(int(row.item()) == value for row in rows)
