"""`monitored_barrier`: a barrier whose error names every missing rank, in gloo's wording and in ours."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.errors import CollectiveError, CollectiveTimeout, RankLost

if TYPE_CHECKING:
    from lockstep.comm.engine import Engine

__all__ = ["monitored_barrier"]


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
    """gloo's wording, which scripts and torch's tests look for: rank 0 names the missing ranks, the others name rank 0.

    Ranks are global, as in all our errors.
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
