"""Reports whether a run waits for its loader, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.recipes.summary import Summary
from lockstep.train import EpochReport, Report

__all__ = ["LoaderAdvice", "advice", "conclusion"]

_WORTH_SAYING, _WORTH_SAYING_S = 0.1, 1.0  # fraction of the training time; seconds per epoch


class LoaderAdvice:
    """Reports, once, that an epoch waited for images, and what to change. For rank 0 only; a `Trainer` callback.

    Args:
        views: where to report it.
        workers: loader processes per host, `-j`.
        cores: cores that this process may run on.
        ranks: training processes on this host.
    """

    def __init__(self, views: Sequence[Any], workers: int, cores: int, ranks: int) -> None:
        self.views, self.workers, self.cores, self.ranks = views, workers, cores, ranks
        self._has_said_it = False

    def __call__(self, report: Report) -> None:
        """Check a report."""
        if self._has_said_it or not isinstance(report, EpochReport):
            return
        waited_s = report.loader_s - report.first_batch_s
        if waited_s < max(_WORTH_SAYING * report.train_s, _WORTH_SAYING_S):
            return
        self._has_said_it = True
        line = (
            f"epoch {report.epoch} waited for images {waited_s / report.train_s:.0%} of the time "
            f"({waited_s:.1f} of {report.train_s:.1f} s); "
            f"{advice(self.workers, self.cores, self.ranks)}"
        )
        for view in self.views:
            view.say(line)

    def finish(self, summary: Summary) -> None:
        """Report what the run waited for."""
        for view in self.views:
            view.say(conclusion(summary, self.workers, self.cores, self.ranks))


def conclusion(summary: Summary, workers: int, cores: int, ranks: int) -> str:
    """One line: what the ranks spent their time on, and how to reduce the largest part.

    Args:
        summary: summary of the run.
        workers: processes that load images; 0 if the training processes do.
        cores: of the host.
        ranks: training processes on the host.
    """
    total_s = sum(rank.train_s for rank in summary.ranks)
    images = sum(rank.loader_s for rank in summary.ranks) / total_s
    others = sum(rank.communication_s for rank in summary.ranks) / total_s
    parts = {
        "images": (images, advice(workers, cores, ranks)),
        "communication": (others, "with a larger -b, or --accumulate, gradients are averaged less often"),
        "computing": (1 - images - others, "--precision bf16, --channels-last, --compile or more devices reduce it"),
    }
    largest = max(parts, key=lambda name: parts[name][0])
    return (
        f"the ranks waited for images {images:.0%} of the time, communicated {others:.0%} of it and computed the rest; "
        f"most was {largest}: {parts[largest][1]}"
    )


def advice(workers: int, cores: int, ranks: int) -> str:
    """Advice on how to load images faster on a host.

    Args:
        workers: processes that load images now; 0 if the training processes do.
        cores: of the host.
        ranks: training processes on the host.
    """
    here = f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {cores} {'core' if cores == 1 else 'cores'}"
    if workers == 0:
        return f"-j {max(ranks, cores - ranks)} loads them in parallel with the steps ({here})"
    spare = cores - ranks
    if spare > workers:
        return f"more workers load faster: -j {spare} instead of -j {workers} ({here})"
    return (
        f"-j {workers} and {here} leave no core for more workers; store smaller images (a shorter edge of "
        "256 pixels is enough for --size 224), or use a host with more cores"
    )
