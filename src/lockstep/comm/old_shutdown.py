"""Has `destroy_process_group` of older torch shut our groups down.

2.6 shuts down NCCL's groups alone; 2.11 calls `shutdown` of every group. Without it ranks that wait for one that has
left the group learn it only when their time is up.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

__all__ = ["register"]

_NAME = "_shutdown_backend"


def register(module: ModuleType) -> None:
    """Shut our groups down when they are destroyed. Local; may be called again. Newer torch has nothing to replace.

    Args:
        module: `torch.distributed.distributed_c10d`.
    """
    torchs_own = getattr(module, _NAME, None)
    if torchs_own is None or getattr(torchs_own, "knows_lockstep", False):
        return

    @functools.wraps(torchs_own)
    def shut_down(pg: Any) -> None:
        # By what it has, not by its class: a process may have imported this package twice.
        if hasattr(pg, "engine"):
            pg.shutdown()
        else:
            torchs_own(pg)

    shut_down.knows_lockstep = True  # type: ignore[attr-defined]
    setattr(module, _NAME, shut_down)
