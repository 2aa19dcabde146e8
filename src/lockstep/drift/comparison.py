"""Parameters that ranks compare when they leave their world.

[Note: comparison at the end] When the world is left without an error, ranks that suspect optimizers compare their
parameters, and raise `ModelError` if those differ. They meet in the store, not in a collective: a rank that has left
already, or suspects nothing, must neither hang the others nor make their call a mismatch.

[Note: rounding at the end] An engine's parameters may follow those of another one, as a momentum teacher's do, and
these may differ in the last bits on processors of different kinds ([Note: rounding] in `parallel/divergence.py`). So
such suspects also say some values of each parameter, in short: their sum with signs at random, which is as far from
that of another rank as the values are from each other. What is no farther than rounding is no other model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lockstep.comm.backend import nonce_of
from lockstep.comm.group_nonce import agree_on_nonce
from lockstep.comm.group_stores import store_of
from lockstep.errors import ModelError
from lockstep.world import World

__all__ = ["Suspect", "compare", "digest"]

# How long a rank with suspected optimizers waits at its end for what the others have to say.
_PATIENCE_S = 5.0
# How long rank 0, which may be the host of the store, stays for others to read it.
_STAY_S = 2.0
_COMPARED_VALUES = 4096  # of each parameter; see [Note: rounding at the end]
# Times the distance from 1.0 to the next number, relative to the norm of the values; and at most.
_ROUNDING, _MOST_ROUNDING = 1000, 0.01


class Suspect(Protocol):
    """An optimizer whose parameters nobody averages, as far as is known.

    Attributes:
        parameters: that it steps.
        label: its class and the user's line.
        synced: hashes of the parameters at points where somebody may have averaged them.
        may_round: see [Note: rounding at the end].
        advice: what to write instead.
        undo: what to write where each rank is to train a model of its own.
    """

    parameters: list[torch.Tensor]
    label: str
    synced: Any
    may_round: bool

    @property
    def advice(self) -> str:
        """What to write instead."""

    @property
    def undo(self) -> str:
        """What to write where each rank is to train a model of its own."""


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


def compare(world: World, suspects: Sequence[Suspect]) -> None:
    """Raise if suspected optimizers hold different parameters on each rank. See [Note: comparison at the end].

    Args:
        world: that is about to be left.
        suspects: of this rank, at least one.

    Raises:
        ModelError: they do.
    """
    own = [_summary(record) for record in suspects]
    by_rank = _exchange(json.dumps(own), world)
    if by_rank is None or any(_shapes(other) != _shapes(own) for other in by_rank):
        return
    for number, record in enumerate(suspects):
        entries = [other[number] for other in by_rank]
        was_averaged = set.intersection(*(set(entry["synced"]) for entry in entries))
        if len({entry["now"] for entry in entries}) > 1 and not was_averaged and not _are_close(entries):
            raise ModelError(
                f"the {world.world_size} ranks have trained different models: {record.label} stepped "
                f"{len(record.parameters)} parameter(s) that nobody averaged, and they differ between ranks now. "
                f"{record.advice}. If each rank is to train a model of its own, {record.undo}"
            )


def _summary(record: Suspect) -> dict[str, Any]:
    return {
        "shapes": [list(parameter.shape) for parameter in record.parameters],
        "now": digest(record.parameters),
        "synced": list(record.synced),
        "about": [_about(parameter) for parameter in record.parameters] if record.may_round else [],
    }


def _about(tensor: torch.Tensor) -> list[float]:
    """Of some values their sum with signs at random, and how far rounding may take it. Local."""
    values = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _COMPARED_VALUES)].cpu()
    values = (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).double()
    signs = torch.randint(2, values.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu") * 2 - 1
    share = min(_ROUNDING * torch.finfo(tensor.dtype).eps, _MOST_ROUNDING)
    return [float((values * signs).sum()), float(values.norm()) * share]


def _are_close(entries: list[dict[str, Any]]) -> bool:
    """Whether the parameters of one suspect differ between ranks by rounding alone, as far as is known."""
    by_parameter = list(zip(*(entry["about"] for entry in entries), strict=False))
    sums = [[total for total, _ in ranks] for ranks in by_parameter]
    bounds = [max(bound for _, bound in ranks) for ranks in by_parameter]
    return bool(sums) and all(max(each) - min(each) <= bound for each, bound in zip(sums, bounds, strict=True))


def _shapes(summaries: list[Any]) -> list[Any]:
    return [summary["shapes"] for summary in summaries]


def _exchange(text: str, world: World) -> list[Any] | None:
    """What each rank says; None where one of them says nothing soon, or what no rank says. Collective."""
    try:
        group = world.process_group
        sealed = store_of(group, "drift")
        if sealed is None:
            return None
        if nonce_of(group) is None:
            nonce = agree_on_nonce(sealed, world.rank, range(world.world_size), _PATIENCE_S)
            sealed = store_of(group, "drift", nonce)
            assert sealed is not None  # it was there
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
        and isinstance(one.get("about"), list)
        and all(isinstance(pair, list) and list(map(type, pair)) == [float, float] for pair in one["about"])
        for one in found
    )
    if not is_known:
        raise ValueError("no summary")
    return list(found)
