"""Evaluations that every rank has counted by itself.

[Note: uncounted evaluations] A loader gives each rank its share of the samples. If the script has walked one with
`evaluation=True`, or under no_grad, to its end, and this process has communicated nothing until it walks the loader
again or leaves the world, then whatever it counted is of one rank's samples. Rank 0 says so, once for each loader.
That is a fact; whether it is a mistake is not: where each rank writes down predictions of its own, nothing is to be
added up. A loader that is made in the head of the loop is gone before that, so what it ended with is kept here.
"""

from __future__ import annotations

import torch.distributed as dist

from lockstep.drift.communication import communication
from lockstep.log import get_logger, warn_once

__all__ = ["EvaluationWatch", "look_at_evaluations"]

_logger = get_logger(__name__)
_pending: set[EvaluationWatch] = set()  # that ended, and whose counts may not be added up yet


class EvaluationWatch:
    """Whether anything was communicated after the last evaluation by one loader. Local."""

    def __init__(self) -> None:
        self._text = ""
        self._communication: object = None

    def end(self, num_local: int, num_total: int, world_size: int) -> None:
        """The loader was walked to its end.

        Args:
            num_local: samples that this rank has got.
            num_total: samples that all ranks have got together.
            world_size: ranks that share the samples.
        """
        group = dist.group.WORLD
        if group is None or group.size() != world_size or world_size == 1 or group.rank() != 0:
            return
        self._text = (
            f"rank 0 evaluated {num_local} of {num_total} samples, and nothing was communicated afterwards: what the "
            f"script counted in this evaluation is of one rank of {world_size}. Count with lockstep.metrics, or add up "
            "the ranks, such as accuracy = lockstep.mean(torch.tensor(float(right)), n). Where each rank keeps results "
            "of its own there is nothing to do"
        )
        self._communication = communication()
        _pending.difference_update([each for each in _pending if each._communication != self._communication])
        _pending.add(self)

    def look(self) -> None:
        """The loader is walked again, or the world is left: warn if nothing was communicated since `end`."""
        if self._text and self._communication == communication():
            warn_once(_logger, self._text)
        self._text = ""
        _pending.discard(self)


def look_at_evaluations() -> None:
    """A world is left. Local; before anything is communicated to that end."""
    for each in list(_pending):
        each.look()
