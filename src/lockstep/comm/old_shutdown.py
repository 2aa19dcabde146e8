"""Has `destroy_process_group` of older torch shut our groups down.

2.6 shuts down NCCL's groups alone; 2.11 calls `shutdown` of every group. Without it ranks that wait for one that has
left the group learn it only when their time is up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.torch_private.patching import wrap_once

__all__ = ["register"]


def _knowing_ours(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and our groups."""

    def shut_down(pg: Any) -> None:
        # By what it has, not by its class: a process may have imported this package twice.
        if hasattr(pg, "engine"):
            pg.shutdown()
        else:
            torchs_own(pg)

    return shut_down


def register() -> None:
    """Shut our groups down when they are destroyed. Local; may be called again. Newer torch has nothing to replace."""
    wrap_once("torch.distributed.distributed_c10d._shutdown_backend", _knowing_ours)
