"""Adapts functions of torch that only support its own groups to ours.

- `monitored_barrier` refuses every backend other than gloo by its name.
- `_set_pg_timeout`, which Megatron-LM and `dist.breakpoint` call, checks for the classes of gloo and nccl.
- `_shutdown_backend` of torch before 2.11 only shuts down NCCL groups when they are destroyed. Without the change,
  ranks that wait for one that has left the group notice it only at their timeout.
- `_maybe_attach_flight_recorder`, from 2.15 on, hooks torch's recorder to every group whose backends keep no record
  themselves. The hook asks the group for a name that only groups with a C++ backend have, and ours have none:
  `init_process_group` raised "ProcessGroup name not set". It could not record anything anyway, because it is called by
  torch's dispatcher, which our verbs bypass; they have their own record (`flight_recorder.py`). Rejected: adding our
  names to `_FR_SELF_RECORDING_BACKENDS`: torch checks the backends of all devices, and so still attaches its hook for
  "cpu:lockstep,cuda:nccl".
- `DistributedDataParallel._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)` computes in C++, where
  the future of an all_reduce must hold a C++ list. The future of a group written in Python holds a Python list, which
  causes an internal error in torch. torch has the same hook in Python, so a model on one of our groups gets that one.
  The other built-in hook, ALLREDUCE, accepts either list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lockstep.comm.names import is_ours
from lockstep.torch_private.patching import wrap_once

__all__ = ["register", "register_hooks_of_ddp"]

_C10D = "torch.distributed.distributed_c10d"

# The latest work of a forward pass within torch's `DDP.join()`.
_notices: list[Any] = []


def register() -> None:
    """Make the functions of torch.distributed support our groups. Local; may be called again.

    Names that `torch.distributed` imported from the module are replaced too. Functions missing in a release are
    skipped.
    """
    wrap_once(f"{_C10D}.monitored_barrier", _monitored_barrier, alias="torch.distributed")
    wrap_once(f"{_C10D}._set_pg_timeout", _set_timeout)
    wrap_once(f"{_C10D}._shutdown_backend", _shut_down)
    wrap_once(f"{_C10D}._maybe_attach_flight_recorder", _attach_recorder)


def register_hooks_of_ddp() -> None:
    """Make torch's DDP support our groups with built-in hooks. Local; torch must be completely imported."""
    wrap_once("torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook", _register_hook)
    wrap_once("torch.distributed.algorithms.join.Join.notify_join_context", _keep_notice)


def _keep_notice(torchs_own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keep the Python half of a work, which DDP passes to C++ (`join(divide_by_initial_world_size=False)`)."""

    def notify_join_context(joinable: Any) -> Any:
        work = torchs_own(joinable)
        _notices[:] = [work]
        return work

    return notify_join_context


def _or_default(group: Any) -> Any:
    return sys.modules[_C10D].GroupMember.WORLD if group is None else group


def _monitored_barrier(torchs_own: Callable[..., None]) -> Callable[..., None]:
    def function(group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        asked = _or_default(group)
        if not is_ours(asked):
            torchs_own(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        asked.monitored_barrier(limit, wait_all_ranks)

    return function


def _set_timeout(torchs_own: Callable[..., None]) -> Callable[..., None]:
    def function(timeout: timedelta, group: Any = None) -> None:
        asked = _or_default(group)
        if is_ours(asked):
            asked.set_timeout(timeout)
        else:
            torchs_own(timeout, group)

    return function


def _shut_down(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    def function(pg: Any) -> None:
        if is_ours(pg):
            pg.shutdown()
        else:
            torchs_own(pg)

    return function


def _attach_recorder(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    def function(pg: Any, *values: Any, **options: Any) -> None:
        if not is_ours(pg):
            torchs_own(pg, *values, **options)

    return function


def _register_hook(torchs_own: Callable[..., None]) -> Callable[..., None]:
    def register_hook(model: Any, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        if is_ours(model.process_group) and getattr(comm_hook_type, "name", "") == "FP16_COMPRESS":
            model.register_comm_hook(model.process_group, fp16_compress_hook)
        else:
            torchs_own(model, comm_hook_type)

    return register_hook
