"""Optimizers, schedulers, loss scalers and clipping, and their order within a step.

Records `optimizer` (`lr` as constructed, `first_lr` at its first step, `steps`),
`steps` (`sizes`: samples in the batch of every step), `scheduler` (`gaps`: calls of its step between two steps of its
optimizer; `rest`: calls after the last), `clip` (`count`: steps whose gradients were clipped while still multiplied by
the loss scale) and `ddp` (`device`: index among all GPUs of the node; `backend`: name that the script used).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lockstep.parallel.distributed import DistributedDataParallel as OwnDistributedDataParallel
from lockstep.tools.rehearse.devices.groups import nominal_backend
from lockstep.tools.rehearse.devices.marks import mark_of
from lockstep.tools.rehearse.devices.naming import devices
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.patching import replace, wrap
from lockstep.tools.rehearse.sites import chain, is_own
from lockstep.tools.rehearse.watch import passes
from lockstep.tools.rehearse.watch.recorder import recorder

__all__ = ["install", "on_step"]

_MAX_SIZES = 1000

_listeners: list[Callable[[], None]] = []


class _Optimizer:
    """What was recorded about an optimizer."""

    def __init__(self, sites: tuple[Site, ...]) -> None:
        self.sites = sites
        self.lr: float | None = None
        self.first_lr: float | None = None
        self.steps = 0


class _Scheduler:
    """What was recorded about a scheduler."""

    def __init__(self, optimizer: Any, sites: tuple[Site, ...]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.sites = sites
        self.gaps: list[int] = []
        self.calls = 0


_optimizers: dict[int, _Optimizer] = {}
_schedulers: dict[int, _Scheduler] = {}
_sizes: list[int] = []
_step_sites: list[tuple[Site, ...]] = []
# Parameters clipped since the last scaled step: id -> where.
_clipped: dict[int, tuple[Site, ...]] = {}
_scaled_clips: dict[tuple[Site, ...], int] = {}
_torch_ddp: list[tuple[Site, ...]] = []


def on_step(listener: Callable[[], None]) -> None:
    """Call `listener` after every step of an optimizer."""
    _listeners.append(listener)


def _lr_of(optimizer: Any) -> float | None:
    lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return float(lr) if isinstance(lr, int | float) else None


def _remember_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        known = _Optimizer(chain())
        known.lr = _lr_of(self)
        _optimizers[id(self)] = known

    return init


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    known = _optimizers.setdefault(id(optimizer), _Optimizer(chain()))
    if known.steps == 0:
        known.first_lr = _lr_of(optimizer)
    known.steps += 1
    now = passes.current()
    if now is not None:
        now.steps += 1
        if len(_sizes) < _MAX_SIZES:
            _sizes.append(-1 if now.is_finished else now.last_size)
            _step_sites[:] = [chain()]
    for scheduler in _schedulers.values():
        if scheduler.optimizer() is optimizer and scheduler.calls:
            scheduler.gaps.append(scheduler.calls)
            scheduler.calls = 0
    for listener in _listeners:
        listener()


def _scheduler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Libraries may step a schedule differently on purpose; Accelerate does so once per rank.
        if is_own(sys._getframe(1)):
            known = _schedulers.get(id(self))
            if known is None:
                known = _schedulers[id(self)] = _Scheduler(self.optimizer, chain())
            known.calls += 1
            known.sites = chain()
        return original(self, *args, **kwargs)

    return step


def _clip(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        where = chain()
        _clipped.update((id(tensor), where) for tensor in tensors)
        return original(tensors, *args, **kwargs)

    return clip


def _scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled() and _clipped:
            state = self._per_optimizer_states[id(optimizer)]
            is_scaled = state["stage"].name == "READY" and self.get_scale() != 1.0
            own = (parameter for group in optimizer.param_groups for parameter in group["params"])
            where = next((_clipped[id(parameter)] for parameter in own if id(parameter) in _clipped), None)
            if is_scaled and where is not None:
                _scaled_clips[where] = _scaled_clips.get(where, 0) + 1
            _clipped.clear()
        return original(self, optimizer, *args, **kwargs)

    return step


def _ddp_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        sites = chain()
        parameter = next(module.parameters(), None)
        index = None if parameter is None else mark_of(parameter)
        recorder.note(
            "ddp",
            sites,
            device=None if index is None else devices.visible()[index],
            backend=nominal_backend(kwargs.get("process_group")),
        )
        _torch_ddp.append(sites)
        original(self, module, *args, **kwargs)
        _note_model(self)

    return init


def _own_ddp_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _note_model(self)

    return init


def _note_model(engine: Any) -> None:
    if engine.process_group.size() == dist.get_world_size():
        passes.add_model(engine.module)


def _finish() -> None:
    for optimizer in _optimizers.values():
        recorder.note(
            "optimizer",
            optimizer.sites,
            lr=optimizer.lr,
            first_lr=optimizer.first_lr,
            steps=optimizer.steps,
        )
    for scheduler in _schedulers.values():
        recorder.note("scheduler", scheduler.sites, gaps=scheduler.gaps, rest=scheduler.calls)
    for sites, count in _scaled_clips.items():
        recorder.note("clip", sites, count=count)
    if _torch_ddp and _step_sites:
        recorder.note("steps", _step_sites[0], sizes=_sizes)


def install() -> None:
    """Watch optimizers, schedulers, clipping, loss scalers and DistributedDataParallel."""
    wrap(Optimizer, "__init__", _remember_optimizer)
    register_optimizer_step_post_hook(_after_step)
    wrap(LRScheduler, "step", _scheduler_step)
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
        wrap(torch.nn.utils.clip_grad, name, _clip)
        replace(torch.nn.utils, name, getattr(torch.nn.utils.clip_grad, name))
    wrap(torch.amp.GradScaler, "step", _scaler_step)
    wrap(DistributedDataParallel, "__init__", _ddp_init)
    wrap(OwnDistributedDataParallel, "__init__", _own_ddp_init)
    recorder.finishers.append(_finish)
