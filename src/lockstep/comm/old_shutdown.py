"""Makes `destroy_process_group` of torch before 2.11 shut down our groups.

2.6 shuts down NCCL's groups alone; 2.11 calls `shutdown` of every group. Without it ranks that wait for one that has
left the group learn it only when their time is up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.comm.names import is_ours
from lockstep.torch_private.patching import wrap_once

__all__ = ["register"]


def _knowing_ours(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and our groups."""

    def shut_down(pg: Any) -> None:
        if is_ours(pg):
            pg.shutdown()
        else:
            torchs_own(pg)

    return shut_down


def register() -> None:
    """Shut our groups down when they are destroyed. Local; may be called again. Newer torch has nothing to replace."""
    wrap_once("torch.distributed.distributed_c10d._shutdown_backend", _knowing_ours)
