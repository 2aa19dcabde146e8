"""Installs the checks for training mistakes that no collective notices; each check is a module of its own.

The parts: nesting.py (wrapped twice), undivided.py (data that nobody splits), strays.py (gradients that came past the
engine), parameter_changes.py (parameters that the engine does not know), closures.py (losses by which an optimizer
decides), and `drift` below this package (no engine at all, or parameters beside one).
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep import seeding
from lockstep.drift.engines import note_engine
from lockstep.drift.watch import watch_beside_engine
from lockstep.parallel import closures, early_draws, parameter_changes, strays
from lockstep.parallel.undivided import warn_of_undivided_data

__all__ = ["EarlyPasses", "watch_engine"]


def watch_engine(engine: Any) -> None:
    """An engine was made; the last line of its constructor. Local."""
    note_engine(engine)
    seeding.begin_rank_streams_of_engine()
    if engine.process_group.size() > 1:
        early_draws.install()
        parameter_changes.install()  # Before strays: what it finds looks like one.
        strays.install()
        closures.install()
        watch_beside_engine(engine.process_group.size())


class EarlyPasses:
    """What is looked at in an engine's first two training passes, and never again."""

    def __init__(self) -> None:
        self._num_seen = 0

    @property
    def have_begun(self) -> bool:
        """Whether there was one."""
        return self._num_seen > 0

    def check(self, engine: Any) -> bool:
        """Look at one forward pass. Local.

        Returns:
            Whether to be called in the next one too.
        """
        if not (engine.training and torch.is_grad_enabled()):
            return True
        self._num_seen += 1
        if self._num_seen == 1:
            return True
        warn_of_undivided_data(engine.process_group)
        return False
