"""The one hook on steps of optimizers: asks the engines, and warns where nobody averages.

[Note: quiet steps] Between two steps of data-parallel training there is at least one collective, whoever averages: this
engine, torch's, FSDP, Horovod's optimizer, or `dist.all_reduce` in a loop. So where a `lockstep.DataLoader` gives each
rank its own part of every batch, and nothing is communicated from the first step on, ranks drift apart: each trains a
model of its own. Rank 0 says so after `_QUIET_STEPS`, since local SGD averages parameters only now and then, or when
the world is left. A script that communicates for another reason, such as to show a loss, hears nothing: `lockstep
verify` tells what it trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep.comm.callsite import make_locator, site_text
from lockstep.drift.communication import communication
from lockstep.drift.comparison import comparison_of_engines
from lockstep.drift.engines import StepArguments, engines
from lockstep.drift.evaluations import look_at_evaluations
from lockstep.log import get_logger, warn_once
from lockstep.world import World, check_at_shutdown

__all__ = ["describe_step", "watch_optimizers", "watch_shutdown", "watch_steps"]

_logger = get_logger(__name__)
_QUIET_STEPS = 64
_find_line = make_locator()
_is_installed = False


@dataclass
class _Watched:
    """Steps beside a loader that splits its batches.

    Attributes:
        group: the default group over which it does.
        communication: at the first step.
        label: class and line of the first step; "" before.
        num_steps: that were quiet.
    """

    group: weakref.ref[dist.ProcessGroup]
    communication: object = None
    label: str = ""
    num_steps: int = 0


_watched: _Watched | None = None
_is_quiet = False  # nothing was communicated since the first step


def describe_step(optimizer: Optimizer) -> str:
    """`SGD.step() at train.py:81 in main`; called below that step. Local."""
    return f"{type(optimizer).__name__}.step() at {site_text(_find_line())}"


def watch_steps() -> None:
    """From now on look at optimizers before they step, and at models when a world is left. Local; once."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        register_optimizer_step_pre_hook(_before_step)
        watch_shutdown()


def watch_shutdown() -> None:
    """From now on look at models and evaluations when a world is left. Local; once."""
    check_at_shutdown(_at_shutdown)


def watch_optimizers(world_size: int) -> None:
    """A loader splits its batches over this many ranks. Local."""
    global _watched, _is_quiet
    group = dist.group.WORLD
    is_known = _watched is not None and _watched.group() is group
    if world_size > 1 and not is_known and group is not None and group.size() == world_size:
        _watched, _is_quiet = _Watched(weakref.ref(group)), True
        watch_steps()


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
    arguments: StepArguments | None = None
    known = engines()
    for engine in known:
        arguments = engine.pre_step(optimizer, arguments or (args, kwargs)) or arguments
    if _is_quiet and not known:  # else what it averages is compared when the world is left
        _look_for_communication(optimizer)
    return arguments


def _look_for_communication(optimizer: Optimizer) -> None:
    """See [Note: quiet steps]."""
    global _is_quiet
    watched, current = _watched, communication()
    assert watched is not None
    if not watched.label:
        watched.label, watched.communication = describe_step(optimizer), current
    group = watched.group()  # None once it is gone, and so may be the default group
    _is_quiet = group is not None and group is dist.group.WORLD and watched.communication == current
    watched.num_steps += _is_quiet
    if watched.num_steps == _QUIET_STEPS:
        _warn_of(watched)


def _warn_of(watched: _Watched) -> None:
    global _is_quiet
    _is_quiet = False
    if dist.get_rank() == 0:
        warn_once(
            _logger,
            f"{watched.label}: in the first {watched.num_steps} steps nothing was communicated, while "
            f"lockstep.DataLoader gives each of the {dist.get_world_size()} ranks its own part of every batch. So each "
            "rank trains a model of its own. Before the loop write model = lockstep.DistributedDataParallel(model), "
            "and call that in the loop; if each rank is to train its own, give each loader rank=0 and world_size=1",
        )


def _at_shutdown(world: World) -> Callable[[], None] | None:
    global _watched, _is_quiet
    watched = _watched
    if _is_quiet and watched is not None and watched.num_steps > 1 and watched.communication == communication():
        _warn_of(watched)
    _watched, _is_quiet = None, False
    look_at_evaluations()  # before the comparison, which communicates
    return comparison_of_engines(world)
