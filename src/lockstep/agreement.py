"""Decisions that all ranks make together: to stop early, to skip a batch, to leave a loop.

If ranks branch on a local value (a loss, a clock, a signal), one of them may leave a loop while the others wait for it
in their next collective. With these functions all ranks take the same branch::

    if lockstep.any(loss.isnan()):            # one rank is enough: all skip this batch
        continue
    if lockstep.all(error < tolerance):       # all ranks are done
        break

Below them: how packages exchange numbers, texts, and small tensors over the ranks of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.flight_recorder import fingerprint
from lockstep.errors import InputTypeError, NotInitialized
from lockstep.torch_private.groups import device_types_of

__all__ = [
    "all",
    "all_reduce_number",
    "all_reduce_options",
    "any",
    "broadcast_tensors",
    "collective_device",
    "first_that_differ",
    "gather",
    "has_group",
    "note_world",
    "texts_that_differ",
]

_world_size = 1  # of the world that this process joined last
_GROUP_BYTES = 32 << 20  # total size of small tensors that are broadcast in one call


def any(flag: bool | Tensor, process_group: dist.ProcessGroup | None = None) -> bool:
    """Whether `flag` is true on at least one rank; the same answer on every rank.

    Collective: one all_reduce of one number; on a GPU it waits for the computation of `flag`. Without a process group
    it is `bool(flag)`.

    Args:
        flag: a bool, or a tensor of one element, such as `loss.isnan()` or `loss > limit`.
        process_group: the ranks that decide; by default the default group.

    Raises:
        InputTypeError: `flag` is neither.
        NotInitialized: the world of several ranks was left.

        >>> any(torch.tensor(0.25) > 1)
        False
    """
    return _agree("any", _read("any", flag), dist.ReduceOp.MAX, process_group)


def all(flag: bool | Tensor, process_group: dist.ProcessGroup | None = None) -> bool:
    """Whether `flag` is true on every rank; the same answer on every rank.

    Collective, as `any`.

    Args:
        flag: as in `any`.
        process_group: as in `any`.

    Raises:
        InputTypeError, NotInitialized: as in `any`.

        >>> all(torch.tensor(0.25) < 1)
        True
    """
    return _agree("all", _read("all", flag), dist.ReduceOp.MIN, process_group)


def _read(name: str, flag: bool | Tensor) -> bool:
    """This rank's flag as a bool. Numbers are refused: whether 0.3 is true is for the script to decide."""
    if isinstance(flag, Tensor) and flag.numel() == 1:
        return bool(flag.item())
    if isinstance(flag, bool) or type(flag).__name__ in ("bool", "bool_"):  # NumPy's bool
        return bool(flag)
    given = f"a tensor of shape {list(flag.shape)}" if isinstance(flag, Tensor) else f"{flag!r}"
    raise InputTypeError(
        f"lockstep.{name}: flag is {given}; give a bool or a tensor of one element: "
        f"lockstep.{name}(loss > limit), lockstep.{name}(tensor.isnan().any())"
    )


def _agree(name: str, flag: bool, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> bool:
    if not isinstance(group, dist.ProcessGroup | None):
        raise InputTypeError(f"lockstep.{name}: process_group is {group!r}; combine flags: lockstep.{name}(a or b)")
    if not has_group(f"lockstep.{name}"):
        return flag
    answer = torch.full((), int(flag), dtype=torch.int32, device=collective_device(group))
    dist.all_reduce(answer, op, group=group)
    return bool(answer.item())


def note_world(world_size: int) -> None:
    """Note that this process joins a world of this many ranks. Local."""
    global _world_size
    _world_size = world_size


def has_group(name: str) -> bool:
    """Whether the default group is open. Local.

    Args:
        name: name of the calling function, which computes for this rank alone without a group.

    Raises:
        NotInitialized: it was closed, but there were several ranks: each would get its own answer.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    if _world_size > 1:
        raise NotInitialized(
            f"{name} was called after the world of {_world_size} ranks was left, so each would get its own result. "
            "Call it inside `with lockstep.init()`, before shutdown() and destroy_process_group()"
        )
    return False


def collective_device(group: dist.ProcessGroup | None = None, accelerator: torch.device | None = None) -> torch.device:
    """Device for small tensors in a group's collectives: the CPU if the group accepts it, else an accelerator. Local.

    The kind of device is the same on every rank, because the group determines it.

    Args:
        group: by default the default group.
        accelerator: the one that this rank uses; by default, and if the group does not accept tensors on that kind of
            device, the current device of a kind that it accepts.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None, "no process group is open"
    try:
        kinds = {entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")}  # "cpu:gloo,cuda:nccl"
    except (AssertionError, TypeError, ValueError):  # a group that torch.distributed did not make
        kinds = set(device_types_of(group))
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(min(kinds)) if accelerator is None or accelerator.type not in kinds else accelerator


def all_reduce_options(op: Any) -> Any:
    """Options for a group's own `allreduce`, for a call that is waited for later. Local."""
    options: Any = dist.AllreduceOptions()
    options.reduceOp = op
    if hasattr(options, "asyncOp"):  # since torch 2.7; before, all calls were asynchronous
        options.asyncOp = True
    return options


def gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks, stacked, on the host. Collective."""
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group=group)
    return torch.stack(rows).cpu()


def all_reduce_number(number: int, op: Any, group: dist.ProcessGroup, device: torch.device) -> int:
    """The sum, or maximum, of a number over ranks; through a tensor on that device. Collective."""
    combined = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(combined, op, group=group)
    return int(combined.item())


def texts_that_differ(text: str, group: dist.ProcessGroup, device: torch.device) -> list[tuple[int, str]]:
    """Rank and text of the first rank, and of the first with another text; empty if all agree. Collective."""
    number = fingerprint(text)
    pair = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
    return first_that_differ(text, group, device) if int(pair.sum()) else []


def first_that_differ(text: str, group: dist.ProcessGroup, device: torch.device) -> list[tuple[int, str]]:
    """Rank and text of the first rank, and of the first with another text, or of itself again. Collective."""
    own = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
    lengths = gather(torch.tensor(len(own), device=device), group)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device="cpu")
    padded[: len(own)] = own
    texts = [bytes(row.numpy()).rstrip(b"\0").decode() for row in gather(padded.to(device), group)]
    other = next((rank for rank, each in enumerate(texts) if each != texts[0]), 0)
    return [(dist.get_global_rank(group, rank), texts[rank]) for rank in (0, other)]


def broadcast_tensors(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int | None = None) -> None:
    """Overwrite `tensors` with those of one rank. Collective.

    Args:
        tensors: tensors with the same shapes and dtypes on all ranks.
        group: the ranks that take part.
        source: rank in the group to copy from; by default the first.

    Writes through `.data`, so that a tensor which autograd has saved may be overwritten: the running
    statistics of batch normalisation, which its backward pass does not use.
    """
    if group.size() == 1:
        return
    source_in_group = source or 0
    global_source = dist.get_process_group_ranks(group)[source_in_group]
    together: dict[tuple[torch.dtype, torch.device, int], list[torch.Tensor]] = {}
    num_bytes = 0
    for tensor in tensors:
        if tensor.numel() > 0:
            together.setdefault((tensor.dtype, tensor.device, num_bytes // _GROUP_BYTES), []).append(tensor.data)
            num_bytes += tensor.nbytes
    for members in together.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        dist.broadcast(flat, global_source, group=group)
        if group.rank() != source_in_group:
            pieces = torch.split(flat, [tensor.numel() for tensor in members])
            for tensor, piece in zip(members, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
