"""What a run waits for, the loader or the steps, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.recipes.summary import Summary
from lockstep.train import EpochReport, Report

__all__ = ["LoaderAdvice", "advice", "conclusion"]

_WORTH_SAYING, _WORTH_SAYING_S = 0.1, 1.0  # of the time of training; seconds of an epoch


class LoaderAdvice:
    """Says, once, that an epoch has waited for images, and what to change. For rank 0 alone; a `Trainer` callback.

    Args:
        views: to say it to.
        workers: `-j`, the processes of a host that load images.
        cores: that this process may run on.
        ranks: training processes of this host.
    """

    def __init__(self, views: Sequence[Any], workers: int, cores: int, ranks: int) -> None:
        self.views, self.workers, self.cores, self.ranks = views, workers, cores, ranks
        self._has_said_it = False

    def __call__(self, report: Report) -> None:
        """Look at one report."""
        if self._has_said_it or not isinstance(report, EpochReport):
            return
        waited_s = report.loader_s - report.first_batch_s
        if waited_s < max(_WORTH_SAYING * report.train_s, _WORTH_SAYING_S):
            return
        self._has_said_it = True
        line = (
            f"epoch {report.epoch} waited for images {waited_s / report.train_s:.0%} of the time "
            f"({waited_s:.1f} of {report.train_s:.1f} s), the steps took the rest: "
            f"{advice(self.workers, self.cores, self.ranks)}"
        )
        for view in self.views:
            view.say(line)

    def finish(self, summary: Summary) -> None:
        """Say what the run waited for."""
        for view in self.views:
            view.say(conclusion(summary, self.workers, self.cores, self.ranks))


def conclusion(summary: Summary, workers: int, cores: int, ranks: int) -> str:
    """One line: what the ranks spent their time on, and what makes the largest part of it less.

    Args:
        summary: of the run.
        workers: processes that load images; 0 where the training processes do.
        cores: of the host.
        ranks: training processes of the host.
    """
    total_s = sum(rank.train_s for rank in summary.ranks)
    images = sum(rank.loader_s for rank in summary.ranks) / total_s
    others = sum(rank.communication_s for rank in summary.ranks) / total_s
    parts = {
        "images": (images, advice(workers, cores, ranks)),
        "communication": (others, "with a larger -b, or --accumulate, ranks average gradients less often"),
        "computing": (1 - images - others, "--precision bf16, --channels-last, --compile or more devices shorten it"),
    }
    largest = max(parts, key=lambda name: parts[name][0])
    return (
        f"the ranks waited for images {images:.0%} of the time, communicated {others:.0%} of it, computed the rest; "
        f"most went into {largest}: {parts[largest][1]}"
    )


def advice(workers: int, cores: int, ranks: int) -> str:
    """What makes a loader faster on a host.

    Args:
        workers: processes that load images now; 0 where the training processes do.
        cores: of the host.
        ranks: training processes.
    """
    here = f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {cores} {'core' if cores == 1 else 'cores'}"
    if workers == 0:
        return f"-j {max(ranks, cores - ranks)} loads them beside the steps ({here})"
    spare = cores - ranks
    if spare > workers:
        return f"more workers load faster, -j {spare} in the place of -j {workers} ({here})"
    return (
        f"-j {workers} and {here} leave no core for more workers; store the images smaller (a shorter edge of "
        "256 pixels is enough for --size 224), or use a host with more cores"
    )
