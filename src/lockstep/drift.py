"""Ranks that drift apart: optimizers that step parameters which nobody averages.

Without `DistributedDataParallel` around the model, ranks that train on different parts of a batch hold different models
after the first step, and no collective fails. Here is who notices it.

[Note: quiet steps] A loader that splits batches over the ranks switches the watch on. From then on each optimizer's
steps are looked at, locally. Between two steps of data-parallel training there is at least one collective, whoever
averages: this engine, torch's, FSDP, Horovod's optimizer, or `dist.all_reduce` in a loop. Two steps with none in
between are quiet. An optimizer whose parameters belong to no engine is *suspected* after its first quiet step, and
rank 0 warns.

[Note: comparison at the end] When the world is left without an error, ranks that suspect optimizers compare their
parameters, and raise `ModelError` if those differ. They meet in the store, not in a collective: a rank that has left
already, or suspects nothing, must neither hang the others nor make their call a mismatch.

[Note: local SGD] Ranks may average parameters only now and then, and may end in between. So a suspected optimizer's
parameters are also hashed before each step that had a collective since the last. If all ranks had the same
parameters at one of those points, somebody does average them, and the difference at the end is on purpose.

[Note: beside an engine] A criterion with parameters of its own (a margin head, weights of several losses, a
temperature) is easily left out of the model, and its optimizer steps are not quiet, because the model's engine
communicates. So optimizers in programs with engines are suspected of what they step that no engine has: with a warning
if they step an engine's parameters, too. Sharded parameters are those of others.

[Note: engines that are gone] An engine that is part of a reference cycle lives until the garbage collector comes, which
is another moment on each rank. What ranks decide by the engines of an optimizer they must decide alike. So who is about
to communicate because of an engine, or to raise, collects garbage before; or goes by engines that were used just now.

[Note: uneven batches] Of a batch that the ranks do not divide, a rank may hold more samples than another, or a filler.
Our engine weights them; torch's, FSDP, Horovod's optimizer and an all_reduce by hand count each rank alike. So a step
behind such a batch is warned of, unless an engine of ours is there, or the script has used what weights a loss
(`lockstep.mean`) or asked for fillers.

Not seen: a program without an engine that communicates within every step for another reason, such as a metric; and
ranks that end without leaving their world.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep import batch
from lockstep.comm import clock
from lockstep.comm.backend import engine_of, nonce_of
from lockstep.comm.callsite import make_locator, site_text
from lockstep.comm.group_nonce import agree_on_nonce
from lockstep.comm.group_setup import BootstrapStore
from lockstep.errors import ModelError
from lockstep.log import get_logger, warn_once
from lockstep.torch_private.autograd import version_of
from lockstep.torch_private.groups import default_store, open_groups, sequence_number_of
from lockstep.torch_private.stores import PrefixStore
from lockstep.world import World, check_at_shutdown

__all__ = [
    "AveragingModule",
    "describe_step",
    "digest",
    "engines",
    "engines_of",
    "engines_used",
    "is_engine",
    "latest_use",
    "note_engine",
    "note_use",
    "watch_optimizers",
]

_logger = get_logger(__name__)

# How long a rank with suspected optimizers waits at its end for what the others have to say.
_PATIENCE_S = 5.0
# How long rank 0, which may be the host of the store, stays for others to read it.
_STAY_S = 2.0
_MAX_SUSPECTS = 4  # their parameters are kept alive
_MAX_SYNCED = 16
_ADVICE = "Before the loop write model = lockstep.DistributedDataParallel(model), and call that in the loop"
_ADVICE_BESIDE = (
    "Have the model that lockstep.DistributedDataParallel wraps hold them, and its forward() call what they belong to, "
    "such as the criterion; or average their gradients before each step by dist.all_reduce"
)
_LOOKS = 3


class AveragingModule(Protocol):
    """What is known of an engine: it averages the gradients of its module's parameters over a group.

    Attributes:
        last_used: the number of its last use (`note_use`); of two engines the one used later has the greater.
    """

    module: torch.nn.Module
    process_group: dist.ProcessGroup
    last_used: int


class _Record:
    """What one optimizer did.

    Attributes:
        marker: how much this process had communicated at its last step.
        version: of its first parameter then. Steps of subclasses call those of their parents, and both call the hooks.
        parameters: those it steps, once it is suspected.
        label: its class and the user's line.
        synced: hashes of the parameters before steps that had a collective since the last one.
        is_beside: it is suspected beside an engine; see [Note: beside an engine].
        looks_left: steps after which it is looked for parameters that no engine has.
        num_weighed: how often the script had asked how samples count, at its last step.
    """

    def __init__(self) -> None:
        self.marker: object = None
        self.version = -1
        self.parameters: list[torch.Tensor] = []
        self.label = ""
        self.synced: deque[str] = deque(maxlen=_MAX_SYNCED)
        self.is_beside = False
        self.looks_left = _LOOKS
        self.num_weighed = 0

    @property
    def advice(self) -> str:
        """What to write instead."""
        return _ADVICE_BESIDE if self.is_beside else _ADVICE


# A new list with each engine, in which the dead ones stay until the next: every step reads it, sooner than a WeakSet.
_engines: list[weakref.ref[Any]] = []
_engines_lock = threading.Lock()  # ranks may be threads
_num_uses = 0
_records: WeakKeyDictionary[Optimizer, _Record] = WeakKeyDictionary()
_suspects: deque[_Record] = deque(maxlen=_MAX_SUSPECTS)
_is_installed = False
_watched: weakref.ref[dist.ProcessGroup] | None = None  # the default group over which a loader splits batches
_find_line = make_locator()


def note_engine(engine: AveragingModule) -> None:
    """This engine averages the gradients of its module's parameters. Local."""
    global _engines
    note_use(engine)
    with _engines_lock:
        _engines = [*(each for each in _engines if each() not in (None, engine)), weakref.ref(engine)]


def note_use(engine: AveragingModule) -> None:
    """This engine begins a forward pass. Local."""
    global _num_uses
    _num_uses += 1
    object.__setattr__(engine, "last_used", _num_uses)  # past that of modules, which looks for parameters


def latest_use() -> int:
    """The number of the last use of an engine. Local."""
    return _num_uses


def is_engine(module: torch.nn.Module) -> bool:
    """Whether it is an engine. Local."""
    return any(each() is module for each in _engines)


def engines() -> list[Any]:
    """All engines of this process. Local."""
    return [engine for each in _engines if (engine := each()) is not None]


def engines_of(optimizer: Optimizer) -> list[Any]:
    """The engines that average any of its parameters. Local. See [Note: engines that are gone]."""
    own = set(map(id, _parameters_of(optimizer)))
    return [engine for engine in engines() if not own.isdisjoint(map(id, engine.module.parameters()))]


def engines_used(optimizer: Optimizer, after: int) -> list[Any]:
    """The engines that average any of its parameters and were used after that number of `latest_use`. Local."""
    return [engine for engine in engines_of(optimizer) if engine.last_used > after]


def describe_step(optimizer: Optimizer) -> str:
    """`SGD.step() at train.py:81 in main`; called below that step. Local."""
    return f"{type(optimizer).__name__}.step() at {site_text(_find_line())}"


def watch_optimizers(world_size: int) -> None:
    """A loader splits its batches over this many ranks: look at optimizers until the world is left. Local."""
    global _is_installed, _watched
    group = dist.group.WORLD
    if world_size == 1 or group is None or group.size() != world_size or _is_watching():
        return
    _forget()  # what belongs to a world that was left by an error
    _watched = weakref.ref(group)
    if not _is_installed:
        _is_installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        check_at_shutdown(_compare_at_shutdown)


def _is_watching() -> bool:
    group = None if _watched is None else _watched()
    return group is not None and group is dist.group.WORLD


# ---- during training -------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    record = _records.get(optimizer) if _is_watching() else None
    # Parameters are kept from the moment of suspicion on. See [Note: local SGD].
    if record is None or record.is_beside:
        return
    if record.parameters and record.marker != _communication():
        record.synced.append(digest(record.parameters))


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _is_watching():
        return
    first = next(_parameters_with_gradient(optimizer), None)
    if first is None:
        return
    record = _records.get(optimizer)
    if record is None:
        record = _records[optimizer] = _Record()
    if record.version == version_of(first):
        return
    record.version = version_of(first)
    marker = _communication()
    is_quiet, record.marker = marker == record.marker, marker
    weighed, record.num_weighed = batch.num_weighed() != record.num_weighed, batch.num_weighed()
    if not is_quiet and not weighed and not engines():
        _look_at_batch(optimizer)
    if record.parameters:
        return
    if is_quiet and not engines_of(optimizer):
        _suspect(optimizer, record)
    elif record.looks_left:
        record.looks_left -= 1
        _look_beside_engines(optimizer, record)


def _suspect(optimizer: Optimizer, record: _Record) -> None:
    """See [Note: quiet steps]."""
    record.parameters = list(_parameters_of(optimizer))
    record.label = describe_step(optimizer)
    _suspects.append(record)
    _warn_of(record, optimizer)


def _look_beside_engines(optimizer: Optimizer, record: _Record) -> None:
    """See [Note: beside an engine]."""
    averaged = {id(parameter) for engine in engines() for parameter in engine.module.parameters()}
    stepped = [parameter for parameter in _parameters_with_gradient(optimizer) if not _is_sharded(parameter)]
    alone = [parameter for parameter in stepped if id(parameter) not in averaged]
    if not averaged or not alone:
        return
    record.parameters, record.label, record.is_beside = alone, describe_step(optimizer), True
    _suspects.append(record)
    if len(alone) < len(stepped):
        _warn_of(record, optimizer)


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
    """Whether each rank holds a part of it, as FSDP and tensor parallelism have it."""
    return type(parameter) not in (torch.Tensor, torch.nn.Parameter)


def _warn_of(record: _Record, optimizer: Optimizer) -> None:
    if dist.get_rank() == 0:
        warn_once(
            _logger,
            f"{record.label}: nobody averages the {_describe_parameters(optimizer, record.parameters)} over the "
            f"{dist.get_world_size()} ranks, while lockstep.DataLoader gives each rank its own part of every batch. So "
            f"each rank trains a model of its own. {record.advice}",
        )


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _parameters_with_gradient(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for parameter in _parameters_of(optimizer) if parameter.grad is not None)


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


def _communication() -> tuple[object, ...]:
    """Changes with every collective of this process, and with every message of our groups."""
    counts: list[object] = [clock.total()]
    group: Any
    for group in open_groups():
        if engine_of(group) is not None:
            continue  # What it does is on the clock.
        number = sequence_number_of(group)
        counts.append(object() if number is None else number)  # else every step may have had one
    return tuple(counts)


# ---- at the end ------------------------------------------------------------------------------------


def digest(tensors: list[torch.Tensor]) -> str:
    """A hash of the tensors' bytes, with shapes and dtypes. Local."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        dense = tensor.detach()
        dense = dense.coalesce().to_dense() if dense.is_sparse else dense
        state.update(f"{dense.dtype}{list(dense.shape)}".encode())
        flat = dense.contiguous().cpu().reshape(-1)
        if flat.numel() > 0:
            state.update(flat.view(torch.uint8).numpy().data)
    return state.hexdigest()


def _compare_at_shutdown(world: World) -> None:
    """Raise if suspected optimizers hold different parameters on each rank. See [Note: comparison at the end]."""
    suspects = list(_suspects)
    _forget()
    if not suspects:
        return
    own = [_summary(record) for record in suspects]
    by_rank = _exchange(json.dumps(own), world)
    if by_rank is None or any(_shapes(other) != _shapes(own) for other in by_rank):
        return
    for number, record in enumerate(suspects):
        entries = [other[number] for other in by_rank]
        was_averaged = set.intersection(*(set(entry["synced"]) for entry in entries))
        if len({entry["now"] for entry in entries}) > 1 and not was_averaged:
            raise ModelError(
                f"the {world.world_size} ranks have trained different models: {record.label} stepped "
                f"{len(record.parameters)} parameter(s) that nobody averaged, and they differ between ranks now. "
                f"{record.advice}. If each rank is to train a model of its own, give each loader rank=0 and "
                "world_size=1"
            )


def _forget() -> None:
    global _watched
    _watched = None
    _suspects.clear()
    _records.clear()


def _summary(record: _Record) -> dict[str, Any]:
    return {
        "shapes": [list(parameter.shape) for parameter in record.parameters],
        "now": digest(record.parameters),
        "synced": list(record.synced),
    }


def _shapes(summaries: list[Any]) -> list[Any]:
    return [summary["shapes"] for summary in summaries]


def _exchange(text: str, world: World) -> list[Any] | None:
    """What each rank says; None where one of them says nothing soon, or what no rank says. Collective."""
    try:
        group = world.process_group
        store: Any = group.get_group_store() if engine_of(group) is not None else default_store()
        if store is None:
            return None
        name = group.group_name
        below, scope = PrefixStore(f"lockstep/drift/{name}", store), ("drift", name)
        nonce = nonce_of(group)
        if nonce is None:
            unsealed = BootstrapStore(below, *scope)
            nonce = agree_on_nonce(unsealed, world.rank, range(world.world_size), _PATIENCE_S)
        sealed = BootstrapStore(below, *scope, nonce=nonce)
        said = sealed.share("parameters", world.rank, world.world_size, text, _PATIENCE_S)
        found = None if said is None else [_read_summaries(one) for one in said]
    except (RuntimeError, AttributeError, ValueError):
        return None  # A rank is not there any more, or has taken the store with it.
    with contextlib.suppress(RuntimeError):
        if world.rank == 0:  # It may hold the store, and stays until all have read.
            sealed.share("has read ", world.rank, world.world_size, "", _STAY_S)
        else:
            sealed.set(f"has read {world.rank}", "")
    return found


def _read_summaries(text: str) -> list[Any]:
    """What `_summary` made of each optimizer of a rank.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("no summary") from None
    is_known = isinstance(found, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("shapes"), list)
        and isinstance(one.get("now"), str)
        and isinstance(one.get("synced"), list)
        and all(isinstance(digest, str) for digest in one["synced"])
        for one in found
    )
    if not is_known:
        raise ValueError("no summary")
    return list(found)
