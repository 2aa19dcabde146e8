"""Decisions that all ranks make together: to stop early, to skip a batch, to leave a loop.

If ranks branch on a local value (a loss, a clock, a signal), one of them may leave a loop while the others wait for it
in their next collective. With these functions all ranks take the same branch::

    if lockstep.any(loss.isnan()):            # one rank is enough: all skip this batch
        continue
    if lockstep.all(error < tolerance):       # all ranks are done
        break
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import InputTypeError
from lockstep.torch_private.groups import device_types_of

__all__ = ["all", "any", "collective_device"]


def any(flag: bool | Tensor, process_group: dist.ProcessGroup | None = None) -> bool:
    """Whether `flag` is true on at least one rank; the same answer on every rank.

    Collective: one all_reduce of one number; on a GPU it waits for the computation of `flag`. Without a process group
    it is `bool(flag)`.

    Args:
        flag: a bool, or a tensor of one element, such as `loss.isnan()` or `loss > limit`.
        process_group: the ranks that decide; by default the default group.

    Raises:
        InputTypeError: `flag` is neither.

        >>> any(torch.tensor(0.25) > 1)
        False
    """
    return _agree(_read("any", flag), dist.ReduceOp.MAX, process_group)


def all(flag: bool | Tensor, process_group: dist.ProcessGroup | None = None) -> bool:
    """Whether `flag` is true on every rank; the same answer on every rank.

    Collective, as `any`.

    Args:
        flag: as in `any`.
        process_group: as in `any`.

    Raises:
        InputTypeError: as in `any`.

        >>> all(torch.tensor(0.25) < 1)
        True
    """
    return _agree(_read("all", flag), dist.ReduceOp.MIN, process_group)


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


def _agree(flag: bool, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    answer = torch.full((), int(flag), dtype=torch.int32, device=collective_device(group))
    dist.all_reduce(answer, op, group=group)
    return bool(answer.item())


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
