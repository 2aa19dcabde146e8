"""Makes the groups for other devices when a user asks for "cpu:lockstep,cuda:nccl".

[Note: mixed groups] torch keeps one backend for each kind of device inside of a group of its own, but lets a group
written in Python replace the whole: tensors of GPUs would come to ours, though the user has named NCCL for them. So
torch's function that makes groups is called again for each of the other kinds, and our group (`mixed_group.py`) hands
the tensors of those kinds on to the groups that it returns. The name of such a group is ours plus the device.
`destroy_process_group()` destroys it with all groups; destroying our group alone destroys it, too.

[Note: batches of messages] `dist.batch_isend_irecv` has NCCL begin all its operations in one, without which two ranks
that both send before they receive may wait for each other. Newer releases of torch ask only groups of their own class
for that. So operations of a mixed group become operations of the group behind it before torch sees them.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lockstep.torch_private.patching import wrap, wrap_once

__all__ = ["kinds_beside", "register"]

_NAME = "_new_process_group_helper"
_local = threading.local()


def kinds_beside(name: str) -> dict[str, str]:
    """For the group that torch is making: kind of device -> backend, for the kinds with a backend of another name.

    >>> kinds_beside("lockstep")
    {}
    """
    return {device: kind for device, kind in getattr(_local, "kinds", {}).items() if kind != name}


def _kinds(backend: object) -> dict[str, str]:
    """The backend that "cpu:lockstep,cuda:nccl" names for each kind of device; empty for one name for all."""
    parts = [part.partition(":") for part in str(backend).lower().split(",")]
    return {device: kind for device, _, kind in parts} if all(colon for _, colon, _ in parts) else {}


def _is_there(device: str) -> bool:
    """Whether there can be tensors of that kind: NCCL refuses to begin without GPUs."""
    return device != "cuda" or bool(sys.modules["torch"].cuda.is_available())


def _making_all(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    """`torchs_own`, which also makes the groups behind a group of ours that takes some kinds of devices only."""
    signature = inspect.signature(torchs_own)

    def make(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        before, _local.kinds = getattr(_local, "kinds", {}), _kinds(given["backend"])
        try:
            result = torchs_own(*args, **kwargs)
        finally:
            _local.kinds = before
        group = result[0]
        for device, kind in getattr(group, "kinds_behind", {}).items():
            if _is_there(device):
                name = f"{given['group_name']}/{device}"
                behind = {**given, "backend": kind, "group_name": name, "pg_tag": None}
                group.put_behind(device, torchs_own(**behind)[0])
        return result

    make.knows_lockstep = True  # type: ignore[attr-defined]
    return make


def _parts(operations: Any, kind: Callable[..., Any]) -> list[Any]:
    """Operations of a mixed group, those of each group that moves some of them apart; any others as they are.

    Args:
        operations: what `batch_isend_irecv` was given, of which torch has checked nothing yet.
        kind: torch's `P2POp`.
    """
    group: Any = getattr(operations[0], "group", None) if isinstance(operations, list) and operations else None
    if not hasattr(group, "kinds_behind") or any(getattr(each, "group", None) is not group for each in operations):
        return [operations]
    parts: dict[int, list[Any]] = {}
    for each in operations:
        behind = group.behind(each.tensor.device)
        own = parts.setdefault(id(behind), [])
        if behind is None:
            own.append(each)
        else:
            own.append(kind(each.op, each.tensor, group=behind, tag=each.tag, group_peer=each.group_peer))
    return list(parts.values())


def _batching_behind(torchs_own: Callable[..., Any], kind: Callable[..., Any]) -> Callable[..., Any]:
    """See [Note: batches of messages]."""

    def batch_isend_irecv(p2p_op_list: Any) -> list[Any]:
        return [work for part in _parts(p2p_op_list, kind) for work in torchs_own(part)]

    return batch_isend_irecv


def register(module: ModuleType) -> None:
    """Make mixed groups whole. Local; may be called again.

    Args:
        module: `torch.distributed.distributed_c10d`.
    """
    torchs_own = getattr(module, _NAME, None)
    if torchs_own is None or not hasattr(torchs_own, "knows_lockstep"):
        wrap(f"torch.distributed.distributed_c10d.{_NAME}", _making_all)
    wrap_once(
        "torch.distributed.distributed_c10d.batch_isend_irecv",
        lambda torchs_own: _batching_behind(torchs_own, module.P2POp),
        alias="torch.distributed",
    )
