"""torch's built-in FP16 hook on groups of ours, for torch's own DDP.

`model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)` computes in C++, where the future of an
all_reduce must hold a list of C++'s. That of a group written in Python holds one of Python's, which ends in an internal
error of torch. torch has the same hook in Python, too, so a model on a group of ours gets that one. The other built-in
hook, ALLREDUCE, takes either list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.comm.names import is_ours
from lockstep.torch_private.patching import wrap_once

__all__ = ["register"]


def _in_python(torchs_own: Callable[..., None]) -> Callable[..., None]:
    def register_hook(model: Any, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        if is_ours(model.process_group) and getattr(comm_hook_type, "name", "") == "FP16_COMPRESS":
            model.register_comm_hook(model.process_group, fp16_compress_hook)
        else:
            torchs_own(model, comm_hook_type)

    return register_hook


def register() -> None:
    """Let torch's DDP know groups of ours when it gets a built-in hook; torch is there as a whole. Local."""
    wrap_once("torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook", _in_python)
