"""The limit of a group's calls, for programs that change it by torch's private function.

`torch.distributed.distributed_c10d._set_pg_timeout`, which Megatron-LM and `dist.breakpoint` call, asks for the classes
of gloo and nccl. `register` replaces it by one that sets the limit of our groups, and calls torch's own for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

from lockstep.comm.names import is_ours
from lockstep.torch_private.patching import wrap_once

__all__ = ["register"]


def register(module: ModuleType) -> None:
    """Let `_set_pg_timeout` know our groups. Local; may be called again.

    Args:
        module: `torch.distributed.distributed_c10d`.
    """

    def knowing_ours(torchs_own: Callable[..., None]) -> Callable[..., None]:
        def function(timeout: timedelta, group: Any = None) -> None:
            asked = module.GroupMember.WORLD if group is None else group
            if is_ours(asked):
                asked.set_timeout(timeout)
            else:
                torchs_own(timeout, group)

        return function

    wrap_once("torch.distributed.distributed_c10d._set_pg_timeout", knowing_ours)
