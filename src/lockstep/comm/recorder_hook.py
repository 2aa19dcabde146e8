"""Keeps torch's own flight recorder (from 2.15 on) off our groups, whose names it cannot read.

Since 2.15 torch hooks its recorder to every group whose backends keep no record themselves. The hook asks the group
for a name that only groups with a C++ backend inside have, and ours have none: `init_process_group` raised
"ProcessGroup name not set". Nor could the hook record anything, because it is called by torch's dispatcher, which our
verbs do not pass. They have a record of their own (`flight_recorder.py`).

Rejected: to add our names to `_FR_SELF_RECORDING_BACKENDS`. torch asks for the backends of all devices, and so attaches
its hook for "cpu:lockstep,cuda:nccl" all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.comm.names import is_ours
from lockstep.torch_private.patching import wrap_once

__all__ = ["register"]


def _sparing(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    """The same, for groups of others."""

    def attach(pg: Any, *values: Any, **options: Any) -> None:
        if not is_ours(pg):
            torchs_own(pg, *values, **options)

    return attach


def register() -> None:
    """Spare our groups torch's flight recorder, which torch has from 2.15 on. Local; may be called again."""
    wrap_once("torch.distributed.distributed_c10d._maybe_attach_flight_recorder", _sparing)
