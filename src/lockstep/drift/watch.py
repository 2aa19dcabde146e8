"""Ranks that drift apart: optimizers that step parameters which nobody averages.

Without `DistributedDataParallel` around the model, ranks that train on different parts of the data hold different
models after the first step, and no collective fails. Here is who notices it.

[Note: quiet steps] A loader that splits batches over the ranks switches the watch on; or a sampler that does, such as
torch's DistributedSampler (`samplers.py`), which is looked for when an optimizer first steps beside a default group of
ours; or an engine. From then on each optimizer's steps are looked at, locally. Between two steps of data-parallel
training there is at least one collective, whoever averages: this engine, torch's, FSDP, Horovod's optimizer, or
`dist.all_reduce` in a loop. Two steps with none in between are quiet. An optimizer whose parameters belong to no engine
is *suspected* after its first quiet step, and rank 0 warns; and after a few steps with no collective between a gradient
and the step that uses it ([Note: gradients of one rank] in `gradients.py`).

[Note: local SGD] Ranks may average parameters only now and then, and may end in between. So a suspected optimizer's
parameters are also hashed before each step that had a collective since the last. If all ranks had the same
parameters at one of those points, somebody does average them, and the difference at the end is on purpose.

[Note: beside an engine] A criterion with parameters of its own (a margin head, weights of several losses, a
temperature) is easily left out of the model, and its optimizer steps are not quiet, because the model's engine
communicates. So optimizers in programs with engines are suspected of what they step that no engine has ([Note: short
lives] in `record.py`): with a warning if they step an engine's parameters, too. Sharded parameters are those of others;
of master weights, the parameters that they are copies of count.

[Note: engines alone] Reinforcement learning has no loader, and a temperature or a critic beside an engine all the same.
Where nothing is known to split data, there is a watch while an engine over all ranks lives; and what an optimizer of
other tensors does when the engine trains no more (each rank trying something by itself) is nobody's business.

[Note: engines that average nothing] A script may step an engine's parameters past it: by `torch.autograd.grad` and no
optimizer, or towards a copy that an inner loop has trained. No hook tells of it. So when the world is left, ranks
compare the parameters of engines over all of them that are there, have made a training pass or were stepped, and have
averaged nothing. Steps by what `no_sync` has left are local SGD.

[Note: parts of ranks] A head of which each rank has some classes, or experts, are other parameters on each rank, and
look like a criterion that was left out. A script says so by an attribute, `parameter.allreduce = False`: the name that
Megatron-LM and DeepSpeed have for it.

[Note: uneven batches] Of a batch that the ranks do not divide, a rank may hold more samples than another, or a filler.
Our engine weights them; torch's, FSDP, Horovod's optimizer and an all_reduce by hand count each rank alike. So a step
behind such a batch is warned of, unless an engine of ours is there, or the script has used what weights a loss
(`lockstep.mean`) or asked for fillers.

Not seen: ranks that end without leaving their world hear the warning, and no error.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DistributedSampler, Sampler

from lockstep import batch
from lockstep.comm import clock
from lockstep.comm.backend import engine_of
from lockstep.comm.callsite import make_locator, site_text
from lockstep.drift.comparison import Suspect, compare, digest
from lockstep.drift.copies import original_of
from lockstep.drift.engines import engines, engines_of, parameters_of
from lockstep.drift.gradients import LoneGradients
from lockstep.drift.record import ENGINE, LOADER, SAMPLER, IdleEngine, OptimizerRecord, Splitter, splitter_named
from lockstep.drift.samplers import num_ranks_of
from lockstep.log import get_logger, warn_once
from lockstep.torch_private.autograd import version_of
from lockstep.torch_private.groups import open_groups, sequence_number_of
from lockstep.world import World, check_at_shutdown

__all__ = ["communication", "describe_step", "watch_beside_engine", "watch_optimizers", "watch_samplers"]

_logger = get_logger(__name__)

# What Megatron-LM and DeepSpeed (experts), Tutel, and Megatron-LM (tensor parallelism) set on parameters.
_MARKS_OF_PARTS = {"allreduce": False, "skip_allreduce": True, "tensor_model_parallel": True}
_MAX_SUSPECTS = 4  # their parameters are kept alive
_records: WeakKeyDictionary[Optimizer, OptimizerRecord] = WeakKeyDictionary()
_suspects: deque[OptimizerRecord] = deque(maxlen=_MAX_SUSPECTS)
_stepped: WeakSet[Any] = WeakSet()  # engines of which an optimizer has stepped parameters
_num_engine_steps = 0  # of optimizers whose parameters an engine averages
_is_installed = False
_watched: weakref.ref[dist.ProcessGroup] | None = None  # the default group over which data is split
_splitter = LOADER
_searched: weakref.ref[dist.ProcessGroup] | None = None  # the default group beside which samplers were looked for
_find_line = make_locator()


def describe_step(optimizer: Optimizer) -> str:
    """`SGD.step() at train.py:81 in main`; called below that step. Local."""
    return f"{type(optimizer).__name__}.step() at {site_text(_find_line())}"


def watch_optimizers(world_size: int) -> None:
    """A loader splits its batches over this many ranks: look at optimizers until the world is left. Local."""
    group = dist.group.WORLD
    if world_size == 1 or group is None or group.size() != world_size or _knows_what_splits():
        return
    _watch(group, LOADER)


def watch_beside_engine(world_size: int) -> None:
    """An engine averages over this many ranks: look at other optimizers while it lives. Local."""
    group = dist.group.WORLD
    if world_size > 1 and group is not None and group.size() == world_size and not _is_watching():
        _watch(group, ENGINE)


def watch_samplers() -> None:
    """A default group of ours is made: when an optimizer steps beside it, look for samplers that split data. Local."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        check_at_shutdown(_compare_at_shutdown)


def _watch(group: dist.ProcessGroup, splitter: Splitter) -> None:
    global _watched, _splitter
    if not _is_of_world():
        _forget()  # what belongs to a world that was left by an error
    _watched, _splitter = weakref.ref(group), splitter
    watch_samplers()


def _is_of_world() -> bool:
    """Whether what is known belongs to the default group that is there."""
    group = None if _watched is None else _watched()
    return group is not None and group is dist.group.WORLD


def _knows_what_splits() -> bool:
    return _splitter is not ENGINE and _is_of_world()


def _is_watching() -> bool:
    """See [Note: engines alone]."""
    return _is_of_world() and (_splitter is not ENGINE or bool(engines()))


def _begins_to_watch() -> bool:
    """Whether a sampler splits data over the default group, which is ours; each group is asked once."""
    global _searched
    group = dist.group.WORLD
    if group is None or (_searched is not None and _searched() is group):
        return False
    _searched = weakref.ref(group)
    world_size = group.size()
    if world_size == 1 or engine_of(group) is None:
        return False
    # Not isinstance, which asks objects that import or compute something when they are asked.
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, Sampler) and num_ranks_of(each) == world_size:
            _watch(group, SAMPLER if issubclass(kind, DistributedSampler) else splitter_named(kind.__name__))
            return True
    return False


# ---- during training -------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    record = _records.get(optimizer) if _is_watching() else None
    # Parameters are kept from the moment of suspicion on. See [Note: local SGD].
    if record is None or record.is_beside:
        return
    if record.parameters and record.marker != communication():
        record.synced.append(digest(record.parameters))


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not (_knows_what_splits() or _begins_to_watch() or _is_watching()):
        return
    first = next(_parameters_with_gradient(optimizer), None)
    if first is None:
        return
    record = _records.get(optimizer) or _begin_record(optimizer, first)
    if record.version == version_of(first):
        return
    record.version = version_of(first)
    _count_step(record)
    marker = communication()
    is_quiet, record.marker = marker == record.marker, marker
    record.was_quiet = record.was_quiet or is_quiet
    weighed, record.num_weighed = batch.num_weighed() != record.num_weighed, batch.num_weighed()
    if not is_quiet and not weighed and not engines():
        _look_at_batch(optimizer)
    if not record.parameters:
        _look_at_parameters(optimizer, record)


def _count_step(record: OptimizerRecord) -> None:
    global _num_engine_steps
    record.num_steps += 1
    _num_engine_steps += record.has_engine


def _begin_record(optimizer: Optimizer, first: torch.Tensor) -> OptimizerRecord:
    if not _records and engines():
        gc.collect()  # see [Note: engines that are gone] in `engines.py`
    own = engines_of(optimizer)
    _stepped.update(own)
    record = _records[optimizer] = OptimizerRecord(_splitter, _num_engine_steps, has_engine=bool(own))
    if not record.has_engine and not _is_sharded(first):
        record.lone = LoneGradients(first, communication)
    return record


def _look_at_parameters(optimizer: Optimizer, record: OptimizerRecord) -> None:
    if not record.lives_long(_num_engine_steps):
        return
    is_alone = record.lone is not None and record.lone.note_step()
    if (record.was_quiet or is_alone) and not engines_of(optimizer):
        _suspect(optimizer, record)
    elif record.looks_left:
        record.looks_left -= 1
        _look_beside_engines(optimizer, record)


def _suspect(optimizer: Optimizer, record: OptimizerRecord) -> None:
    """See [Note: quiet steps]."""
    record.parameters = [parameter for parameter in parameters_of(optimizer) if not _is_marked(parameter)]
    if not record.parameters:
        return
    record.label = describe_step(optimizer)
    record.stop()
    _suspects.append(record)
    _warn_of(record, optimizer)


def _look_beside_engines(optimizer: Optimizer, record: OptimizerRecord) -> None:
    """See [Note: beside an engine]."""
    if not _beside_engines(optimizer)[1]:
        return
    gc.collect()  # see [Note: engines that are gone] in `engines.py`
    stepped, alone = _beside_engines(optimizer)
    if not alone:
        return
    record.parameters, record.label, record.is_beside = alone, describe_step(optimizer), True
    record.stop()
    _suspects.append(record)
    if len(alone) < len(stepped):
        _warn_of(record, optimizer)


def _beside_engines(optimizer: Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What it steps, without what is sharded, and of that what no engine has; the latter empty without an engine."""
    averaged = {id(parameter) for engine in engines() for parameter in engine.module.parameters()}
    stepped = [parameter for parameter in _parameters_with_gradient(optimizer) if not _is_sharded(parameter)]
    return stepped, [parameter for parameter in stepped if averaged and id(original_of(parameter)) not in averaged]


def _look_at_batch(optimizer: Optimizer) -> None:
    """See [Note: uneven batches]."""
    share, world_size = batch.current(), dist.get_world_size()
    if share is None or share.evaluation or share.world_size != world_size or share.global_samples % world_size == 0:
        return
    if dist.get_rank() == 0:
        warn_once(
            _logger,
            f"{describe_step(optimizer)}: the {world_size} ranks do not divide this batch of {share.global_samples} "
            "samples, and what averages here counts each rank alike, so some samples count more than others. Give the "
            "loader drop_last=True and a batch size that the ranks divide, train by "
            "lockstep.DistributedDataParallel, or divide the loss by lockstep.mean(loss_sum, count)",
        )


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Whether each rank holds a part of it, as FSDP and tensor parallelism have it; see [Note: parts of ranks]."""
    return type(parameter) not in (torch.Tensor, torch.nn.Parameter) or _is_marked(parameter)


def _is_marked(parameter: torch.Tensor) -> bool:
    return any(getattr(parameter, name, None) is value for name, value in _MARKS_OF_PARTS.items())


def _warn_of(record: OptimizerRecord, optimizer: Optimizer) -> None:
    if dist.get_rank() == 0:
        warn_once(
            _logger,
            f"{record.label}: nobody averages the {_describe_parameters(optimizer, record.parameters)} over the "
            f"{dist.get_world_size()} ranks, while {record.splitter.deed}. So each rank trains a model of its own. "
            f"{record.advice}",
        )


def _parameters_with_gradient(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for parameter in parameters_of(optimizer) if parameter.grad is not None)


def _describe_parameters(optimizer: Optimizer, chosen: Sequence[torch.Tensor]) -> str:
    """`4 parameters that it steps (0.weight, 0.bias, …)`; shapes where an optimizer was not given names."""
    names: list[str] = []
    wanted = set(map(id, chosen))
    for group in optimizer.param_groups:
        shapes = [str(list(parameter.shape)) for parameter in group["params"]]
        named = zip(group["params"], group.get("param_names") or shapes, strict=True)
        names += [name for parameter, name in named if id(parameter) in wanted]
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} parameter(s) that it steps ({listed})"


def communication() -> tuple[object, ...]:
    """Changes with every collective of this process, and with every message of our groups. Local."""
    counts: list[object] = [clock.total()]
    group: Any
    for group in open_groups():
        if engine_of(group) is not None:
            continue  # What it does is on the clock.
        number = sequence_number_of(group)
        counts.append(object() if number is None else number)  # else every step may have had one
    return tuple(counts)


# ---- at the end ------------------------------------------------------------------------------------


def _compare_at_shutdown(world: World) -> None:
    suspects: list[Suspect] = [*_suspects, *_idle_engines(world)]
    _forget()
    if suspects:
        compare(world, suspects)


def _idle_engines(world: World) -> list[IdleEngine]:
    """See [Note: engines that average nothing]."""
    if not _find_idle(world):
        return []
    gc.collect()  # see [Note: engines that are gone] in `engines.py`
    return [IdleEngine(engine.module, parameters) for engine, parameters in _find_idle(world)]


def _find_idle(world: World) -> list[tuple[Any, list[torch.Tensor]]]:
    if world.world_size == 1:
        return []
    own = [each for each in engines() if each.process_group is world.process_group]
    used = [each for each in own if each.has_trained or each in _stepped]
    found = [(each, [one for one in each.unaveraged if not _is_sharded(one)]) for each in used]
    return [(engine, parameters) for engine, parameters in found if parameters]


def _forget() -> None:
    global _watched, _num_engine_steps
    _watched, _num_engine_steps = None, 0
    for record in _records.values():
        record.stop()
    _suspects.clear()
    _stepped.clear()
    _records.clear()
