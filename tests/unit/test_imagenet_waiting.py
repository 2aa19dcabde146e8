"""What a run waits for, and what to change: a slow dataset, a slow step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.recipes.imagenet import waiting
from lockstep.recipes.imagenet.waiting import LoaderAdvice, advice, conclusion
from lockstep.recipes.summary import RankTime, Summary
from lockstep.train import EpochReport, Report, Trainer


class Slow(Dataset[torch.Tensor]):
    """Each sample takes some time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(1)


class View:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def train(sample_s: float, step_s: float, workers: int = 0) -> tuple[EpochReport, list[str]]:
    """Two epochs of three steps; the second one, and what was said."""
    view, reports = View(), list[Report]()

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(step_s)
        return model(batch).mean()

    with lockstep.init(device="cpu"):
        model = lockstep.DistributedDataParallel(nn.Linear(1, 1))
        loader = lockstep.DataLoader(Slow(sample_s), 4, num_workers=workers, persistent_workers=workers > 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        callbacks = (reports.append, LoaderAdvice([view], workers, cores=8, ranks=1))
        Trainer(model, optimizer, loader, loss, callbacks=callbacks).fit(2)
    last = reports[-1]
    assert isinstance(last, EpochReport)
    return last, view.lines


def test_a_slow_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_WORTH_SAYING_S", 0.1)
    report, said = train(0.02, 0.0)
    assert 0 < report.first_batch_s < report.loader_s <= report.train_s
    assert report.loader_s >= 12 * 0.02
    (line,) = said  # once, although both epochs have waited
    assert line.startswith("epoch 1 waited for images ")
    assert line.endswith("-j 7 loads them in parallel with the steps (1 rank on 8 cores)")


def test_a_slow_step() -> None:
    report, said = train(0.0, 0.4)
    assert report.train_s >= 3 * 0.4
    assert report.loader_s < report.train_s - 3 * 0.4 + 0.05
    assert said == [] or report.loader_s > 1.0  # as on a machine too busy for the loader


def test_the_first_batch_is_no_reason_for_more_workers() -> None:
    view = View()
    says = LoaderAdvice([view], 2, 8, 1)
    report = EpochReport(1, 10, 0.5, 100, train_s=10.0, local_samples=100, communication_s=0.0)
    says(replace(report, train_s=1.0, loader_s=0.9))  # too short to matter
    for loader_s, first_s, lines in ((9.0, 8.5, 0), (0.9, 0.0, 0), (9.0, 1.0, 1)):
        says(replace(report, loader_s=loader_s, first_batch_s=first_s))
        assert len(view.lines) == lines
    assert view.lines[0].startswith("epoch 1 waited for images 80% of the time (8.0 of 10.0 s)")


@pytest.mark.parametrize(
    ("workers", "cores", "ranks", "said"),
    [
        (0, 16, 4, "-j 12 loads them in parallel with the steps (4 ranks on 16 cores)"),
        (0, 1, 1, "-j 1 loads them in parallel with the steps (1 rank on 1 core)"),
        (4, 16, 4, "more workers load faster: -j 12 instead of -j 4 (4 ranks on 16 cores)"),
        (2, 2, 2, "-j 2 and 2 ranks on 2 cores leave no core for more workers; store smaller images"),
    ],
)
def test_what_to_change(workers: int, cores: int, ranks: int, said: str) -> None:
    assert advice(workers, cores, ranks).startswith(said)


@pytest.mark.parametrize(
    ("loader_s", "communication_s", "said"),
    [
        (6.0, 1.0, "waited for images 60% of the time, communicated 10% of it and computed the rest; most"),
        (6.0, 1.0, "most was images: -j 2 loads them"),
        (1.0, 5.0, "most was communication: with a larger -b, or --accumulate"),
        (1.0, 1.0, "most was computing: --precision bf16"),
    ],
)
def test_what_a_run_waited_for(loader_s: float, communication_s: float, said: str) -> None:
    ranks = [RankTime(100, 10.0, communication_s, loader_s)] * 2
    summary = Summary(correct=1, total=2, held_out_loss=0.5, steps=3, samples=200, ranks=ranks)
    assert said in conclusion(summary, 0, 4, 2)
