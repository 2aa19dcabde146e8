"""The state of a sharded optimizer in the form of one process, and back.

Every rank describes its part of the state of each parameter. A tensor in the shape of a piece is a part of a tensor in
the parameter's shape; anything else (`step`) is the same for all pieces of a parameter. Values are sent as bytes, with
a description in JSON.

[Note: the state that a script sees] `optimizer.state` is the state of this rank's pieces. Parameters of the model are
not in it, and a script that looks one up would conclude that the state is empty. So this raises an error that says
where the state is. Emptying the state, or removing that of a parameter, resets it, on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lockstep.agreement import collective_device
from lockstep.comm.backend import engine_of
from lockstep.errors import CheckpointError, ModelError
from lockstep.parallel.sharded.exchange import compare
from lockstep.parallel.sharded.inner import ShardPiece
from lockstep.parallel.sharded.shares import flat_of, shaped_like

__all__ = ["PieceStates", "collect_states", "cut_state"]

_PLAIN = (bool, int, float, str, type(None))
_Entry = dict[str, Any]
_States = dict[int, dict[str, Any]]


def collect_states(
    pieces: Iterable[ShardPiece],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    parameters: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    only: int | None = None,
) -> _States | None:
    """The whole state of each parameter; values that are on the CPU stay there. Collective.

    Args:
        pieces: the pieces of this rank.
        state: the state of the inner optimizer.
        parameters: the parameters of all groups, in order.
        group: the ranks that have the other pieces; None if there are none.
        only: rank in the group that gets the result; None for all.

    Returns:
        States by index of the parameter, without empty ones; None on a rank that does not get them.

    Raises:
        CheckpointError: the state holds something other than tensors and plain values; names it.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    entries: list[_Entry] = []
    values: list[torch.Tensor] = []
    for piece in pieces:
        for key, value in state.get(piece.parameter, {}).items():
            entry, flat = _describe(piece, key, value)
            entries.append({"parameter": numbers[id(piece.share.parameter)], "key": key, **entry})
            if flat is not None:
                values.append(flat.view(torch.uint8).to(parameters[0].device))
    device = parameters[0].device
    own = torch.cat(values) if values else torch.empty(0, dtype=torch.uint8, device=device)
    if group is None or group.size() == 1:
        found: _States = {}
        _put(found, entries, own, parameters)
        return found
    return _gather(entries, own, parameters, group, only)


def _describe(piece: ShardPiece, key: str, value: Any) -> tuple[_Entry, torch.Tensor | None]:
    """The description of one value of a piece, and its elements."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, _PLAIN):
            return {"value": value}, None
        raise CheckpointError(
            f"the optimizer's state {key!r} of a parameter is a {type(value).__name__}; only tensors, numbers, strings "
            "and None can be collected from the ranks"
        )
    value = value.detach()
    entry: _Entry = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if value.dim() == 0 or value.shape != piece.parameter.shape:
        return entry | {"on_host": value.device.type == "cpu"}, value.contiguous().view(-1)
    first = piece.share.first + piece.start
    flat = flat_of(value, piece.share.parameter) if piece.is_whole else value.contiguous()
    return entry | {"first": first, "last": first + flat.numel()}, flat


def _gather(
    entries: Sequence[_Entry],
    own: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    only: int | None,
) -> _States | None:
    """Collect the states rank by rank, so that no rank holds all parts twice. Collective."""
    engine, device = engine_of(group), collective_device(group, own.device)
    call = "ZeroRedundancyOptimizer.state_dict() or consolidate_state_dict(), which every rank calls"
    if engine is not None and engine.team.shares_memory:  # a rank in another call gets an error that names this one
        engine.run_steps(call)
    else:
        compare(call, group, device)
    text = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.empty(2, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([text.numel(), own.numel()], dtype=torch.int64, device=device), group=group)
    is_wanted = only is None or only == group.rank()
    found: _States = {}
    for rank, (num_text, num_bytes) in enumerate(torch.stack(sizes).tolist()):
        is_own = rank == group.rank()
        source = dist.get_global_rank(group, rank)
        said = text if is_own else torch.empty(num_text, dtype=torch.uint8, device=device)
        dist.broadcast(said, source, group=group)
        values = own.to(device) if is_own else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if num_bytes:
            dist.broadcast(values, source, group=group)
        if is_wanted:
            _put(found, json.loads(said.cpu().numpy().tobytes()), values, parameters)
    return dict(sorted(found.items())) if is_wanted else None


def _put(found: _States, entries: Sequence[_Entry], values: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
    """Insert the state that one rank has described. Local."""
    position = 0
    for entry in entries:
        parameter = parameters[entry["parameter"]]
        state = found.setdefault(entry["parameter"], {})
        key = entry["key"]
        if "dtype" not in entry:
            state[key] = entry["value"]
            continue
        dtype, shape = getattr(torch, entry["dtype"]), torch.Size(entry["shape"])
        num_bytes = shape.numel() * dtype.itemsize
        value = values[position : position + num_bytes].clone().view(dtype)
        position += num_bytes
        if "first" in entry:
            if key not in state:
                flat = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
                state[key] = shaped_like(flat, parameter)
            flat_of(state[key], parameter)[entry["first"] : entry["last"]] = value.to(parameter.device)
        else:
            state[key] = value.view(shape).to("cpu" if entry["on_host"] else parameter.device)


def cut_state(piece: ShardPiece, state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a parameter's whole state that belongs to a piece. Local."""
    parameter = piece.share.parameter

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if piece.is_whole or value.shape != parameter.shape:
            return value.clone()
        return piece.share.own(value)[piece.start : piece.stop].clone()

    return {key: cut(value) for key, value in state.items()}


class PieceStates(MutableMapping[torch.Tensor, Any]):
    """The type of `optimizer.state`: see [Note: the state that a script sees].

    Args:
        pieces: the pieces of this rank.
        state: the state of the inner optimizer.
        note: called with a description when a script has removed something.
    """

    def __init__(
        self,
        pieces: Iterable[ShardPiece],
        state: MutableMapping[torch.Tensor, Any],
        note: Callable[[str], None],
    ) -> None:
        self._pieces, self._state, self._note = pieces, state, note

    def __getitem__(self, key: torch.Tensor) -> Any:
        """The state of a piece."""
        if key not in self._state:
            _refuse_to_look()
        return self._state[key]

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        """Set the state of a piece that has one."""
        if key not in self._state:
            _refuse_to_look()
        self._state[key] = value

    def __delitem__(self, key: torch.Tensor) -> None:
        """Remove the state of a parameter of the model, or of a piece."""
        for piece in self._pieces_of(key):
            self._state.pop(piece, None)
        self._note("without the state of a parameter")

    def _pieces_of(self, key: object) -> list[torch.Tensor]:
        return [each.parameter for each in self._pieces if key is each.share.parameter or key is each.parameter]

    def __contains__(self, key: object) -> bool:
        """Whether this rank has state for a parameter of the model, or for a piece."""
        return any(piece in self._state for piece in self._pieces_of(key))

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The pieces that have a state."""
        return iter(list(self._state))

    def __len__(self) -> int:
        """The number of pieces that have a state."""
        return len(self._state)

    def pop(self, key: torch.Tensor, *_: Any) -> Any:
        """Remove the state of a parameter. Returns None: this rank has at most a part of it."""
        del self[key]

    def clear(self) -> None:
        """Reset the state."""
        self._state.clear()
        self._note("without state")


def _refuse_to_look() -> NoReturn:
    raise ModelError(
        "optimizer.state[parameter]: the state of ZeroRedundancyOptimizer is sharded over the ranks. "
        "optimizer.state_dict()['state'][number of the parameter] has it whole (collective: on every rank), and "
        "load_state_dict restores it; optimizer.state.pop(parameter, None), .clear() and optimizer.state = {} reset "
        "it, on every rank"
    )
