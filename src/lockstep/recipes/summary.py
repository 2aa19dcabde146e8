"""What a run came to: its last evaluation, and where each rank's time went."""

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
    """Where one rank's training time went.

    Attributes:
        samples: training samples it was given.
        train_s: seconds in training steps.
        communication_s: of these, seconds in collectives, waiting for other ranks included.
        loader_s: of these, seconds in which it waited for its loader.
    """

    samples: int
    train_s: float
    communication_s: float
    loader_s: float = 0.0


@dataclass(frozen=True)
class Summary:
    """What a finished run came to; the same on every rank.

    Attributes:
        correct: held-out samples classified correctly.
        total: held-out samples, each counted once.
        held_out_loss: mean over them.
        steps: optimizer steps of this run, without those before a resume.
        samples: training samples of this run over all ranks.
        ranks: one entry per rank.
        top5: share of the held-out samples whose class was among five guesses; None where nobody counted.
        expected: held-out samples there are, those included that could not be read; None where all can.
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
        """Share of the held-out samples that were classified correctly, 0 … 1; 0 where none could be read."""
        return self.correct / self.total if self.total else 0.0

    @property
    def train_s(self) -> float:
        """Seconds in training steps. The ranks step together, so the longest is everybody's."""
        return max(rank.train_s for rank in self.ranks)

    @property
    def samples_per_s(self) -> float:
        """Training samples per second, over all ranks."""
        return self.samples / self.train_s

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "accuracy": self.accuracy, "train_s": self.train_s, "samples_per_s": self.samples_per_s}


class RankTimes:
    """Adds up this rank's times over the epochs of a run; a `Trainer` callback for every rank."""

    def __init__(self) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64)  # local samples, train_s, communication_s, loader_s
        self._samples = 0  # of all ranks
        self._steps = 0
        self._last: EpochReport | None = None

    def __call__(self, report: Report) -> None:
        """Enter one report."""
        if isinstance(report, EpochReport):
            self._samples += report.samples
            times = [report.local_samples, report.train_s, report.communication_s, report.loader_s]
            self._sums += torch.tensor(times, dtype=torch.float64)
            self._last = report
        else:
            self._steps += 1

    def summary(self) -> Summary:
        """The run so far, with the times of every rank. Collective.

        The last evaluation must hold "correct", "images" and "loss".
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
