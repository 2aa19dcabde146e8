"""Compares the models of all engines over the ranks, once, when the world is left without an error.

Gradients that ranks average keep their models equal only if nothing else differs. A rank that loads the weights which
its own validation found best, that steps past its engine (`torch.autograd.grad`, Reptile, evolution strategies on
`model.module`), or by gradients that `no_sync()` has left, ends with a model of its own, and no collective fails. So
ranks that leave say a hash of each engine's model, and raise ModelError if these differ.

[Note: comparison at the end] They meet in the store, not in a collective: a rank that has left already, or has failed,
must neither hang the others nor make their call a mismatch. Who waits for it in vain says nothing. An engine that is
not there on a rank any more does not count for it.

[Note: rounding at the end] On processors of different kinds, or with other numbers of threads, ranks may end with
values that differ in the last bits. So ranks whose hashes differ also say, for each tensor, the sum of its values with
signs at random, which is as far from that of another rank as the values are from each other. What is no farther than
rounding is no other model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lockstep.comm.backend import nonce_of
from lockstep.comm.group_nonce import agree_on_nonce
from lockstep.comm.group_setup import BootstrapStore
from lockstep.comm.group_stores import store_of
from lockstep.drift.engines import engines
from lockstep.errors import ModelError
from lockstep.world import World

__all__ = ["compare_engines", "digest"]

# How long a rank waits at its end for what the others have to say; the last one may still be saving what it has.
_PATIENCE_S = 30.0
# How long rank 0, which may be the host of the store, stays for others to read it.
_STAY_S = 2.0
# Times the distance from 1.0 to the next number, relative to the norm of the values; and at most.
_ROUNDING, _MOST_ROUNDING = 1000, 0.01
_ADVICE = (
    "Let all ranks decide alike which weights to load (by lockstep.mean of the loss, lockstep.metrics, or "
    "torch.distributed.broadcast); have backward() compute what is stepped, of what model(x) returns, or average by "
    "dist.all_reduce what is not its work, before it changes parameters; make the last pass before each step outside "
    "of no_sync(). What is to differ says so: parameter.allreduce = False, a name in "
    "module._ddp_params_and_buffers_to_ignore, broadcast_buffers=False; or is not wrapped in DistributedDataParallel"
)

Summary = dict[str, Any]  # of each engine, by its group and number


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


def compare_engines(world: World) -> None:
    """Raise if the ranks hold different models in one of their engines. See [Note: comparison at the end].

    Args:
        world: that is about to be left.

    Raises:
        ModelError: they do; names a tensor that differs.
    """
    own = {f"{each.process_group.group_name}/{each.number}": each for each in engines() if each.number >= 0}
    models = {key: each.tensors_alike() for key, each in own.items() if each.process_group.size() > 1}
    if world.world_size == 1 or not models:
        return
    store = _Meeting(world)
    hashes = store.exchange("hashes", {key: digest(tensors.values()) for key, tensors in models.items()}, str)
    differing = sorted({key for one in hashes for key in one if len({each[key] for each in hashes if key in each}) > 1})
    if differing:
        # All of those that have said something come to the same; one that lacks an engine says nothing of it.
        about = store.exchange("values", {key: _about(models[key]) for key in differing if key in models}, dict)
        for key in differing:
            found = _find_apart([one[key] for one in about if key in one])
            if found and key in models:
                store.leave()
                raise ModelError(
                    f"the {world.world_size} ranks end with different models: {len(found)} of the {len(models[key])} "
                    f"tensors of {type(own[key].module).__name__}, which DistributedDataParallel wraps, differ between "
                    f"ranks, such as {found[0]}. {_ADVICE}"
                )
    store.leave()


def _about(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Of each tensor the sum of its values with signs at random, and how far rounding may take it. Local."""
    generator = torch.Generator("cpu").manual_seed(0)
    found = {}
    for name, tensor in tensors.items():
        values = tensor.detach()
        values = (values.coalesce().to_dense() if values.is_sparse else values).reshape(-1).cpu()
        eps = torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0.0
        values = (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).double()
        signs = torch.randint(2, values.shape, generator=generator, device="cpu") * 2 - 1
        share = min(_ROUNDING * eps, _MOST_ROUNDING)
        found[name] = [float((values * signs).sum()), float(values.norm()) * share]
    return found


def _find_apart(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> list[str]:
    """The tensors that are farther apart than rounding, the farthest first. Those of a name of all ranks count."""
    distances = {}
    for name in by_rank[0] if by_rank else ():
        entries = [one[name] for one in by_rank if name in one]
        sums = [total for total, _ in entries]
        distance, bound = max(sums) - min(sums), max(bound for _, bound in entries)
        if not distance <= bound:  # nor where it is nan
            distances[name] = distance / bound if bound else float("inf")
    return sorted(distances, key=lambda name: -distances[name])


class _Meeting:
    """What the ranks of a world tell each other when they leave it. Who does not come is not waited for again.

    Args:
        world: that is about to be left.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._world_size = world.rank, world.world_size
        self._store: BootstrapStore | None = None
        with contextlib.suppress(RuntimeError, AttributeError, ValueError):
            group = world.process_group
            store = store_of(group, "drift")
            if store is not None and nonce_of(group) is None:
                nonce = agree_on_nonce(store, world.rank, range(world.world_size), _PATIENCE_S)
                store = store_of(group, "drift", nonce)
            self._store = store

    def exchange(self, topic: str, own: Summary, kind: type) -> list[Summary]:
        """What each rank says; nothing where one of them says nothing soon, or what no rank says. Collective."""
        if self._store is None:
            return []
        with contextlib.suppress(RuntimeError, AttributeError, ValueError):
            said = self._store.share(topic, self._rank, self._world_size, json.dumps(own), _PATIENCE_S)
            if said is not None:
                return [_read_summary(one, kind) for one in said]
        self._store = None  # a rank is not there any more, or has taken the store with it
        return []

    def leave(self) -> None:
        """Stay until all have read, on rank 0, which may hold the store."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            if self._rank == 0:
                self._store.share("has read ", self._rank, self._world_size, "", _STAY_S)
            else:
                self._store.set(f"has read {self._rank}", "")


def _read_summary(text: str, kind: type) -> Summary:
    """What a rank said, if it has the form that `compare_engines` gives it.

    Raises:
        ValueError: it has another.
    """
    try:
        summary = json.loads(text)
    except RecursionError:
        raise ValueError("no summary") from None
    is_known = isinstance(summary, dict) and all(isinstance(each, kind) for each in summary.values())
    if is_known and kind is dict:
        pairs = [pair for each in summary.values() for pair in each.values()]
        is_known = all(isinstance(pair, list) and list(map(type, pair)) == [float, float] for pair in pairs)
    if not is_known:
        raise ValueError("no summary")
    return dict(summary)
