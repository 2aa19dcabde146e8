"""Creates the groups for other devices when a user asks for "cpu:lockstep,cuda:nccl".

[Note: mixed groups] torch normally keeps one backend for each device type inside one of its own groups, but a group
written in Python replaces the whole group: GPU tensors would be sent to ours, though the user has named NCCL for them.
So torch's function that creates groups is called again for each of the other device types, and our group
(`mixed_group.py`) passes their tensors on to the groups that it returns. Such a group is named after ours, plus the
device. `destroy_process_group()` destroys it along with all groups; destroying only our group destroys it as well.

[Note: batches of messages] `dist.batch_isend_irecv` makes NCCL start all its operations together; otherwise two ranks
that both send before they receive may wait for each other. Newer releases of torch do this only for groups of their own
class. So operations of a mixed group become operations of the underlying group before torch sees them.
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
    """Backend of each device type of the group being created whose backend has another name than `name`.

    >>> kinds_beside("lockstep")
    {}
    """
    return {device: kind for device, kind in getattr(_local, "kinds", {}).items() if kind != name}


def _kinds(backend: object) -> dict[str, str]:
    """The backend that "cpu:lockstep,cuda:nccl" names for each device type; empty for one name for all."""
    parts = [part.partition(":") for part in str(backend).lower().split(",")]
    return {device: kind for device, _, kind in parts} if all(colon for _, colon, _ in parts) else {}


def _is_there(device: str) -> bool:
    """Whether tensors of that device type can exist: NCCL refuses to start without GPUs."""
    return device != "cuda" or bool(sys.modules["torch"].cuda.is_available())


def _making_all(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    """`torchs_own`, which also creates the underlying groups if ours takes only some device types."""
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
    """Split the operations of a mixed group by the group that moves their tensors; return others unchanged.

    Args:
        operations: the argument of `batch_isend_irecv`, not yet checked by torch.
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
    """Make torch create mixed groups. Local; may be called again.

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
