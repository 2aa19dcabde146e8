"""The results of a run: its last evaluation, and each rank's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.agreement import collective_device
from lockstep.train import EpochReport, Report

__all__ = ["RankTime", "RankTimes", "Summary"]


@dataclass(frozen=True)
class RankTime:
    """How a rank spent its training time.

    Attributes:
        samples: number of its training samples.
        train_s: seconds in training steps.
        communication_s: seconds of these in collectives, including waiting for other ranks.
        loader_s: seconds of these spent waiting for the loader.
    """

    samples: int
    train_s: float
    communication_s: float
    loader_s: float = 0.0


@dataclass(frozen=True)
class Summary:
    """The results of a finished run; the same on every rank.

    Attributes:
        correct: held-out samples classified correctly.
        total: held-out samples, each counted once.
        held_out_loss: mean loss over them.
        steps: optimizer steps of this run, excluding those before a resume.
        samples: training samples of this run over all ranks.
        ranks: one entry per rank.
        top5: top-5 accuracy on the held-out samples, 0 … 1; None if not measured.
        expected: number of held-out samples, including unreadable ones; None if all are readable.
    """

    correct: int
    total: int
    held_out_loss: float
    steps: int
    samples: int
    ranks: Sequence[RankTime]
    top5: float | None = None
    expected: int | None = None

    @property
    def accuracy(self) -> float:
        """Accuracy on the held-out samples, 0 … 1; 0 if none could be read."""
        return self.correct / self.total if self.total else 0.0

    @property
    def train_s(self) -> float:
        """Seconds in training steps: those of the slowest rank, for which all others wait."""
        return max(rank.train_s for rank in self.ranks)

    @property
    def samples_per_s(self) -> float:
        """Training samples per second, over all ranks."""
        return self.samples / self.train_s

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "accuracy": self.accuracy, "train_s": self.train_s, "samples_per_s": self.samples_per_s}


class RankTimes:
    """Sums this rank's times over the epochs of a run; a `Trainer` callback for every rank."""

    def __init__(self) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64)  # local samples, train_s, communication_s, loader_s
        self._samples = 0  # of all ranks
        self._steps = 0
        self._last: EpochReport | None = None

    def __call__(self, report: Report) -> None:
        """Add a report."""
        if isinstance(report, EpochReport):
            self._samples += report.samples
            times = [report.local_samples, report.train_s, report.communication_s, report.loader_s]
            self._sums += torch.tensor(times, dtype=torch.float64)
            self._last = report
        else:
            self._steps += 1

    def summary(self) -> Summary:
        """The run so far, with the times of every rank. Collective.

        The last evaluation must have "correct", "images" and "loss".
        """
        assert self._last is not None, "no epoch was trained"
        mine = self._sums.to(collective_device())
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        times = [RankTime(int(samples), *seconds) for samples, *seconds in (each.tolist() for each in gathered)]
        held_out = self._last.evaluation
        return Summary(
            correct=int(held_out["correct"]),
            total=int(held_out["images"]),
            held_out_loss=held_out["loss"],
            steps=self._steps,
            samples=self._samples,
            ranks=times,
            top5=held_out.get("top5"),
            expected=int(held_out["expected"]) if "expected" in held_out else None,
        )
