"""The single hook on optimizer steps, which consults the engines, and warnings of drift if nothing is communicated.

[Note: quiet steps] Between two steps of data-parallel training there is at least one collective, no matter what does
the averaging: this engine, torch's, FSDP, Horovod's optimizer, or `dist.all_reduce` in a loop. So if a
`lockstep.DataLoader` gives each rank its own part of every batch, and nothing is communicated from the first step on,
ranks diverge: each trains its own model. Rank 0 warns of this after `_QUIET_STEPS`, since local SGD averages parameters
only now and then. A script may take fewer steps, or communicate for another reason. So ranks without an engine also
compare a small parameter when the world is left, and rank 0 warns if it began alike on all of them and did not end so.
It is no constant if there are others: parts of a sharded one could begin alike.

[Note: uncounted evaluations] A loader gives each rank its share of the samples. If the script has iterated over a
loader with `evaluation=True`, or under no_grad, to its end, and this process communicates nothing from the beginning of
that iteration until it iterates over the loader again or leaves the world, then its counts cover only one rank's
samples. Rank 0 says so, once for each loader. It need not be a mistake: if each rank writes its own predictions, there
is nothing to add up. A loader created in the head of a loop is freed before that, so the state at its end is kept here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep.comm import clock
from lockstep.comm.backend import engine_of
from lockstep.comm.callsite import make_locator, site_text
from lockstep.comm.staging import is_capturing
from lockstep.drift.comparison import comparison_of_engines, digest
from lockstep.drift.engines import StepArguments, engines, parameters_of
from lockstep.log import get_logger, warn_once
from lockstep.torch_private.groups import open_groups, sequence_number_of
from lockstep.world import World, check_at_shutdown

__all__ = ["EvaluationWatch", "describe_step", "watch_optimizers", "watch_shutdown", "watch_steps"]

_logger = get_logger(__name__)
_QUIET_STEPS = 64
_SMALL = 1 << 18  # number of values
_find_line = make_locator()


def _communication() -> tuple[object, ...]:
    """A value that changes with every collective of this process, and with every message of our groups. Local."""
    counts: list[object] = [clock.total()]
    for group in open_groups():
        if engine_of(group) is None:  # otherwise our clock counts its calls
            number = sequence_number_of(group)
            counts.append(object() if number is None else number)  # unknown: every step may have communicated
    return tuple(counts)


@dataclass
class _Watched:
    """Optimizer steps in a process with a loader that splits its batches.

    Attributes:
        group: the default group over which it splits them.
        communication: value of `_communication` at the first step.
        label: class and line of the first step; "" before it.
        num_steps: number of quiet steps.
        sample: the parameter to compare at the end, after a hash of its first values.
    """

    group: weakref.ref[dist.ProcessGroup]
    communication: object = None
    label: str = ""
    num_steps: int = 0
    sample: tuple[str, torch.Tensor] | None = None


class EvaluationWatch:
    """Whether anything was communicated since the last evaluation by one loader began. Local."""

    def __init__(self) -> None:
        self._text = ""
        self._communication: object = None  # when the iteration began

    def begin(self) -> None:
        """An iteration over the loader begins: the last one is over. Local."""
        self.look()
        self._communication = _communication()

    def end(self, num_local: int, num_total: int, world_size: int) -> None:
        """Note that the loader was iterated to its end, and gave this rank `num_local` of `num_total` samples."""
        group = dist.group.WORLD
        if group is None or group.size() != world_size or world_size == 1 or group.rank() != 0:
            return
        self._text = (
            f"rank 0 evaluated {num_local} of {num_total} samples, and nothing was communicated, so what the script "
            f"counted here covers one rank of {world_size}. Count with lockstep.metrics, or add up the "
            "ranks, such as accuracy = lockstep.mean(torch.tensor(float(right)), n). If each rank keeps its own "
            "results, ignore this"
        )
        current = _communication()
        _pending.difference_update([each for each in _pending if each._communication != current])
        _pending.add(self)

    def look(self) -> None:
        """Warn if nothing was communicated since `begin`; called before the next one and on leaving the world."""
        if self._text and self._communication == _communication():
            warn_once(_logger, self._text)
        self._text = ""
        _pending.discard(self)


_watched: _Watched | None = None
_is_quiet = False  # whether nothing was communicated since the first step
_pending: set[EvaluationWatch] = set()  # ended evaluations whose counts may not have been added up yet


def describe_step(optimizer: Optimizer) -> str:
    """`SGD.step() at train.py:81 in main`; called below that step. Local."""
    return f"{type(optimizer).__name__}.step() at {site_text(_find_line())}"


@functools.cache
def watch_steps() -> None:
    """Start checking optimizers before each step, and models when a world is left. Local; may be called repeatedly."""
    register_optimizer_step_pre_hook(_before_step)
    watch_shutdown()


def watch_shutdown() -> None:
    """Start checking models and evaluations when a world is left. Local; may be called repeatedly."""
    check_at_shutdown(_at_shutdown)


def watch_optimizers(world_size: int) -> None:
    """Watch optimizers, as a loader splits its batches over this many ranks. Local."""
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
    if _is_quiet and not known:  # otherwise models are compared when the world is left
        _look_for_communication(optimizer)
    return arguments


def _look_for_communication(optimizer: Optimizer) -> None:
    """See [Note: quiet steps]."""
    global _is_quiet
    watched, current = _watched, _communication()
    assert watched is not None
    if not watched.label:
        watched.label, watched.communication = describe_step(optimizer), current
        watched.sample = _sample_of(optimizer)
    group = watched.group()  # None once the group is freed; then the default group may be gone, too
    _is_quiet = group is not None and group is dist.group.WORLD and watched.communication == current
    watched.num_steps += _is_quiet
    if watched.num_steps == _QUIET_STEPS:
        if dist.get_rank() == 0:
            warn_once(_logger, _text_of(watched, f"nothing was communicated in the first {_QUIET_STEPS} steps"))
        _is_quiet, watched.sample = False, None


def _sample_of(optimizer: Optimizer) -> tuple[str, torch.Tensor] | None:
    """The last small parameter that is no constant, or else the last small one, after a hash of its values. Local."""
    small = [each for each in parameters_of(optimizer) if type(each) is Parameter and 0 < each.numel() < _SMALL]
    small = [each for each in small if each.layout is torch.strided and not is_capturing(each.device)]

    def varies(parameter: torch.Tensor) -> bool:
        values = parameter.detach().reshape(-1).view(torch.uint8).reshape(parameter.numel(), -1)  # of any dtype
        return bool((values != values[0]).any())

    sample = max(small[::-1], key=varies, default=None)
    return None if sample is None else (digest([sample]), sample)


def _text_of(watched: _Watched, measured: str) -> str:
    return (
        f"{watched.label}: {measured}, but lockstep.DataLoader gives each rank its own part of every batch. So each "
        "rank trains its own model. Before the loop write model = lockstep.DistributedDataParallel(model), and call "
        "that in the loop. If the script averages parameters now and then, average them after the last step, too. If "
        "each rank should train its own, give each loader rank=0 and world_size=1"
    )


def _at_shutdown(world: World) -> Callable[[], None] | None:
    global _watched, _is_quiet
    watched, _watched, _is_quiet = _watched, None, False
    for evaluation in list(_pending):  # before the comparison, which communicates
        evaluation.look()
    if watched is None or watched.sample is None:
        return comparison_of_engines(world)
    text = _text_of(watched, f"the {world.world_size} ranks end with different parameters")
    return comparison_of_engines(world, *watched.sample, text)
