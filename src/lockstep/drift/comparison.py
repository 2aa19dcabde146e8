"""Compares the models of all engines between ranks, once, when the world is left without an error.

Averaged gradients keep the models of ranks equal only if nothing else differs. A rank that loads the weights that its
own validation found best, that updates the model without its engine (`torch.autograd.grad`, Reptile, evolution
strategies on `model.module`), or with gradients left by `no_sync()`, ends up with a different model, and no collective
fails. So ranks that leave exchange a hash of each engine's model, and raise ModelError if these differ.

[Note: comparison at the end] They meet in the store, not in a collective: a rank that has already left, or has failed,
must neither hang the others nor turn their call into a mismatch. If a rank does not come, there is no result. And they
meet after leaving the world: if a rank leaves a loop early while others still need it, these must notice at once. Over
gloo they notice when its process ends, which it does when the launcher's folder shows that they wait for it.

[Note: models of the past] A model that is local to a function is freed when that returns, or when the garbage collector
runs, which happens at different times on each rank. Its engine then keeps the hash instead of the model, and the number
of writes to each parameter. Only ranks with equal numbers of writes are compared, since other code may have continued
to train the same parameters. Nothing is reported if writes were not counted (`parameter.data.sub_`), or for an engine
that some rank has never created.

[Note: rounding at the end] On different processors, or with different numbers of threads, ranks may end with values
that differ in the last bits. So ranks whose hashes differ also exchange, for each tensor, the sum of its values times
random numbers between 1 and 2 of either sign. The distance of these sums between ranks reflects the distance of the
values. Models whose distance is within rounding count as equal.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.backend import engine_of, nonce_of
from lockstep.comm.group_nonce import agree_on_nonce
from lockstep.comm.group_setup import BootstrapStore
from lockstep.comm.group_stores import store_of
from lockstep.drift.engines import AveragingModule, engines, num_writes
from lockstep.errors import CollectiveMismatch, ModelError
from lockstep.log import get_logger, warn_once
from lockstep.rank_status import check_nobody_waits
from lockstep.shm.liveness import Watch
from lockstep.torch_private.groups import is_registered
from lockstep.world import World, current_world

__all__ = ["comparison_of_engines", "digest", "note_end", "rounding_of"]

# How long a leaving rank waits for the others, the last of which may still be saving its results.
_PATIENCE_S = 30.0
# How long rank 0, which may host the store, stays so that others can read it.
_STAY_S = 2.0
_ADVICE = (
    "Let all ranks agree on which weights to load (lockstep.mean of the loss, lockstep.metrics, or "
    "torch.distributed.broadcast); compute gradients with backward(), from the output of model(x), or average others "
    "with dist.all_reduce before they change parameters; run the last pass before each step outside of no_sync(). "
    "Mark what should differ: parameter.allreduce = False, a name in module._ddp_params_and_buffers_to_ignore, "
    "broadcast_buffers=False; or do not wrap it in DistributedDataParallel"
)

_ADVICE_ON_CALLS = (
    "No gradient was averaged: DistributedDataParallel averages the gradients of its own call, so call model(x), not "
    "model.module(x) or the model that was wrapped; or average gradients with dist.all_reduce before they change "
    "parameters"
)
_CHUNK = 1 << 18  # number of values multiplied at a time

Summary = dict[str, Any]  # entries of engines, by group and number
Projection = dict[str, list[float]]  # by tensor: the sum, and the bound on its rounding error


@dataclass(frozen=True)
class _Model:
    """What this rank knows about an engine's model.

    Attributes:
        kind: name of its class.
        hash: hash of all tensors that must be equal on all ranks.
        num_writes: total number of writes to its parameters since the engine was created.
        is_there: whether the model still exists.
        projection: its projection, if it no longer exists.
        warning: what to say if it differs, for a parameter without an engine; otherwise that is an error.
    """

    kind: str
    hash: str
    num_writes: int
    is_there: bool
    projection: Projection | None
    warning: str = ""


_past: weakref.WeakKeyDictionary[World, dict[str, _Model]] = weakref.WeakKeyDictionary()
_errors: weakref.WeakKeyDictionary[World, CollectiveMismatch] = weakref.WeakKeyDictionary()  # errors of freed engines


def digest(tensors: Iterable[torch.Tensor]) -> str:
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


def rounding_of(dtype: torch.dtype) -> float:
    """How much ranks may differ after the same steps, relative to the values."""
    return min(1000 * torch.finfo(dtype).eps, 0.01) if dtype.is_floating_point or dtype.is_complex else 0.0


def note_end(engine: AveragingModule, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """Keep the data to compare the model of an engine that is about to be freed. Local; see [Note: models of the past].

    Args:
        engine: the engine; its construction may have failed.
        is_finalizing: a default argument, because at interpreter exit this module's names vanish before the last
            engines.
    """
    world = None if is_finalizing() else current_world()
    if world is None or not _is_compared(engine) or num_writes(engine) == 0:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # a copy to the host would break the capture
    try:
        engine.check_unread()
    except CollectiveMismatch as error:  # raised on all ranks; here it could not be caught
        _errors[world] = error.with_traceback(None)
    past = _past.setdefault(world, {})
    past[_key_of(engine)] = _describe(engine, is_there=False, projection=_project(engine.tensors_alike()))


def comparison_of_engines(
    world: World, beginning: str = "", sample: torch.Tensor | None = None, warning: str = ""
) -> Callable[[], None] | None:
    """The function to call after the world has been left, or None. See [Note: comparison at the end].

    Args:
        world: the world that is being left.
        beginning: hash of the first values of `sample`.
        sample: a parameter without an engine.
        warning: what to say if ranks on which it began alike end with different values.

    Returns:
        A function that raises ModelError if ranks hold different models in one of their engines.

    Raises:
        CollectiveMismatch: in the last steps, whose comparison on a GPU was still unread, ranks averaged different
            batches.
    """
    there = {_key_of(each): each for each in engines() if _is_compared(each)}
    for engine in there.values():
        engine.check_unread()
    if world in _errors:
        raise _errors.pop(world)
    own = _past.pop(world, {}) | {key: _describe(each, is_there=True) for key, each in there.items()}
    if sample is not None:
        own[beginning] = _Model("", digest([sample]), 0, True, _project({"": sample}), warning)
    if world.world_size == 1 or not own:
        return None
    return functools.partial(_compare, _Meeting(world), world.world_size, own, there)


def _compare(store: _Meeting, world_size: int, own: Mapping[str, _Model], there: Mapping[str, AveragingModule]) -> None:
    """Raise if ranks hold different models in one of their engines; names a tensor that differs. Collective."""
    said = store.exchange(
        "models", {key: [each.is_there, each.num_writes, each.hash] for key, each in own.items()}, _is_said
    )
    # All ranks that took part reach the same conclusion; one that lacks an engine has no entry for it.
    differing = {key: teams for key in sorted(set().union(*said)) if (teams := _find_differing(key, said))}
    found: dict[str, list[str]] = {}
    if differing:
        values = {key: own[key].projection or _project(there[key].tensors_alike()) for key in differing if key in own}
        about = store.exchange("values", values, _is_projection)
        found = {key: _find_apart(differing[key], [one.get(key, {}) for one in about]) for key in values if about}
    store.leave()
    for key, names in found.items():
        warning = own[key].warning
        if names and warning and store.rank == 0:
            warn_once(get_logger(__name__), warning)
        elif names and not warning:
            raise ModelError(
                f"the {world_size} ranks end with different models: {len(names)} of the {len(values[key])} "
                f"tensors of {own[key].kind}, which DistributedDataParallel wraps, differ between ranks, such as "
                f"{names[0]}. {_advice_on(there.get(key))}"
            )


def _advice_on(engine: AveragingModule | None) -> str:
    """Advice for a model that differs; a specific one if its gradients were computed without calling the engine."""
    if engine is None or engine.has_averaged or all(each.grad is None for each in engine.module.parameters()):
        return _ADVICE
    return _ADVICE_ON_CALLS


def _is_compared(engine: AveragingModule) -> bool:
    """Whether other ranks of this world have created the same engine."""
    group, number = engine.process_group, vars(engine).get("number", -1)
    return number >= 0 and group.size() > 1 and is_registered(group)  # otherwise it belongs to an earlier world


def _key_of(engine: AveragingModule) -> str:
    return f"{engine.process_group.group_name}/{engine.number}"


def _describe(engine: AveragingModule, is_there: bool, projection: Projection | None = None) -> _Model:
    hash_ = digest(engine.tensors_alike().values())
    return _Model(type(engine.module).__name__, hash_, num_writes(engine), is_there, projection)


def _find_differing(key: str, said: Sequence[Summary]) -> list[list[int]]:
    """Groups of ranks that are compared with each other and whose hashes differ. See [Note: models of the past]."""
    teams: dict[object, list[int]] = {}
    are_there = all(one[key][0] for one in said if key in one)
    for rank, one in enumerate(said):
        if key in one:
            teams.setdefault(None if are_there else one[key][1], []).append(rank)
    return [team for team in teams.values() if len({said[rank][key][2] for rank in team}) > 1]


def _project(tensors: Mapping[str, torch.Tensor]) -> Projection:
    """For each tensor, the sum of its values times random numbers, and the bound on its rounding error. Local."""
    generator = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(2, (_CHUNK,), generator=generator, device="cpu").double() * 2 - 1
    # Random factors, or 0.1 more in one place and 0.1 less in another would cancel.
    factors *= 1 + torch.rand(_CHUNK, generator=generator, device="cpu", dtype=torch.float64)
    found = {}
    for name, tensor in tensors.items():
        values = tensor.detach()
        values = (values.coalesce().to_dense() if values.is_sparse else values).reshape(-1)
        values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
        total = square = 0.0
        for chunk in torch.split(values, _CHUNK):  # avoids a second copy of a large tensor
            part = chunk.cpu().double()
            sign = int(torch.randint(2, (), generator=generator, device="cpu")) * 2 - 1
            total += sign * float(part @ factors[: len(part)])
            square += float(part @ part)
        found[name] = [total, square**0.5 * rounding_of(tensor.dtype)]
    return found


def _find_apart(teams: Sequence[Sequence[int]], by_rank: Sequence[Projection]) -> list[str]:
    """Tensors that differ by more than rounding, the most different first; only names that all ranks have."""
    distances: dict[str, float] = {}
    for team in teams:
        for name in by_rank[team[0]]:
            entries = [by_rank[rank][name] for rank in team if name in by_rank[rank]]
            sums = [total for total, _ in entries]
            distance, bound = max(sums) - min(sums), max(bound for _, bound in entries)
            if not distance <= bound:  # also true for nan
                distances[name] = max(distance / bound if bound else float("inf"), distances.get(name, 0.0))
    return sorted(distances, key=lambda name: -distances[name])


class _Meeting:
    """Messages that the ranks of a world exchange when they leave it. A missing rank is awaited only once."""

    def __init__(self, world: World) -> None:
        self.rank, self._world_size = world.rank, world.world_size
        self._store: BootstrapStore | None = None
        self._has_nonce = nonce_of(world.process_group) is not None
        self._near = {}
        if (engine := engine_of(world.process_group)) is not None:
            near = [peer for peer in engine.team.near if peer != self.rank]
            self._near = {peer: engine.team.blocks.identity(peer) for peer in near}
        with contextlib.suppress(RuntimeError, AttributeError, ValueError):
            self._store = store_of(world.process_group, "drift")

    def exchange(self, topic: str, own: Summary, is_known: Callable[[Any], bool]) -> list[Summary]:
        """Each rank's summary; empty if any rank does not answer in time, or sends an invalid one. Collective."""
        if self._store is None:
            return []
        with contextlib.suppress(RuntimeError, AttributeError, ValueError):
            if not self._has_nonce:
                nonce = agree_on_nonce(self._store, self.rank, range(self._world_size), _PATIENCE_S)
                self._store, self._has_nonce = self._store.agreed(nonce), True
            said = self._share(self._store, topic, json.dumps(own), _PATIENCE_S)
            if said is not None:
                return [_read_summary(one, is_known) for one in said]
        self._store = None  # a rank has gone, or has taken the store with it
        return []

    def leave(self) -> None:
        """On rank 0, which may host the store, stay until all ranks have read it."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            if self.rank == 0:
                self._share(self._store, "has read ", "", _STAY_S)
            else:
                self._store.set(f"has read {self.rank}", "")

    def _share(self, store: BootstrapStore, topic: str, text: str, timeout_s: float) -> list[str] | None:
        """`BootstrapStore.share`, which does not wait for a rank of this host whose process has ended."""
        check = functools.partial(check_nobody_waits, self.rank)
        with contextlib.closing(Watch(self._near)) as watch:
            return store.share(topic, self.rank, self._world_size, text, timeout_s, watch, check)


def _read_summary(text: str, is_known: Callable[[Any], bool]) -> Summary:
    """A rank's summary, if it has the form that `_compare` gives it; otherwise ValueError."""
    try:
        summary = json.loads(text)
    except RecursionError:
        raise ValueError("no summary") from None
    if not isinstance(summary, dict) or not all(map(is_known, summary.values())):
        raise ValueError("no summary")
    return summary


def _is_said(value: Any) -> bool:
    return isinstance(value, list) and list(map(type, value)) == [bool, int, str]


def _is_projection(value: Any) -> bool:
    pairs = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(pair, list) and list(map(type, pair)) == [float, float] for pair in pairs)
