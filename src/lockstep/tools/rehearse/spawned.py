"""Runs in a process that a rehearsed script spawned, before multiprocessing's own code. See `spawning.py`."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import process
from typing import Any

from lockstep.tools.rehearse import rank
from lockstep.tools.rehearse.patching import wrap

__all__ = ["join_rehearsal"]


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: process.BaseProcess) -> None:
        from lockstep.tools.rehearse.watch.recorder import recorder

        try:
            with recorder.watching_the_end():
                original(self)
        finally:
            recorder.write()  # multiprocessing's processes skip atexit.

    return run


def join_rehearsal(family: str, starter: int, rank_of_starter: int | None) -> None:
    """Make this spawned process part of the rehearsal, before it does anything else.

    Args:
        family: the family of processes that it belongs to; see [Note: families] in `spawning.py`.
        starter: pid of the process that spawned it.
        rank_of_starter: the rank of that process.
    """
    rank.install()
    from lockstep.tools.rehearse.watch.recorder import recorder

    recorder.family, recorder.starter, recorder.rank = family, starter, rank_of_starter
    wrap(process.BaseProcess, "run", _run)
