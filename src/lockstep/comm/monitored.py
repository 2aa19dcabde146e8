"""`monitored_barrier`: a barrier whose error names every rank that did not come, in gloo's words and in ours.

torch's function of that name turns away every backend but gloo by its name. `register` replaces it by one that asks our
groups, and calls torch's own for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.comm.names import is_ours
from lockstep.errors import CollectiveError, CollectiveTimeout, RankLost
from lockstep.torch_private.patching import wrap_once

if TYPE_CHECKING:
    from lockstep.comm.engine import Engine

__all__ = ["monitored_barrier", "register"]


def monitored_barrier(engine: Engine, timeout: timedelta | None, wait_all_ranks: bool) -> None:
    """Wait for all ranks of a group; see `EngineProcessGroup.monitored_barrier`. Collective."""
    timeout_s = engine.timeout_s if timeout is None else timeout.total_seconds()
    was_broken = engine.recorder.broken is not None
    try:
        engine.barrier(False, timeout_s)
    except (CollectiveTimeout, RankLost) as error:
        if was_broken:
            raise
        raise type(error)(f"{_gloo_words(engine, error, timeout_s, wait_all_ranks)}: {error}", error.culprits) from None


def _gloo_words(engine: Engine, error: CollectiveError, timeout_s: float, wait_all_ranks: bool) -> str:
    """The words of gloo, which scripts and torch's tests look for: rank 0 names the culprits, the others name rank 0.

    Ranks are global ones, as in all our errors.
    """
    rank = engine.team.rank
    own = engine.recorder.global_rank(rank)
    if rank != 0:
        return (
            f"Rank {own} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank {engine.recorder.global_rank(0)}"
        )
    named = list(error.culprits) if wait_all_ranks else list(error.culprits[:1])
    words = f"Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} failed to pass monitoredBarrier"
    if isinstance(error, RankLost):
        return words
    limit = f"{timeout_s * 1000:.0f} ms"
    return f"Rank {own} timed out in monitoredBarrier after {limit}. {words} in {limit}"


def register(module: ModuleType) -> None:
    """Let `torch.distributed.monitored_barrier` know our groups. Local; may be called again.

    Args:
        module: `torch.distributed.distributed_c10d`. What `torch.distributed` took from it before is replaced too.
    """

    def knowing_ours(torchs_own: Callable[..., None]) -> Callable[..., None]:
        def function(group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
            asked = module.GroupMember.WORLD if group is None else group
            if not is_ours(asked):
                torchs_own(group, timeout, wait_all_ranks)
                return
            limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
            asked.monitored_barrier(limit, wait_all_ranks)

        return function

    wrap_once("torch.distributed.distributed_c10d.monitored_barrier", knowing_ours, alias="torch.distributed")
