"""`EarlyStopping`, and a `Trainer` that it ends, or a signal: the same on all ranks, and after a resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep import checkpoint
from lockstep.errors import InputError
from lockstep.testing import run_ranks
from lockstep.train import EarlyStopping, EpochReport, Trainer


def report(epoch: int, value: float) -> EpochReport:
    return EpochReport(epoch, epoch, 0.0, 1, 0.0, 1, 0.0, evaluation={"held_out": value})


@pytest.mark.parametrize(
    ("mode", "values", "stops_after", "best"),
    [
        ("min", [3, 2, 2.5, 2.1, 1], 4, 2.0),
        ("min", [3, 2, 1.95, 1.5, 1], None, 1.0),
        ("max", [1, 2, 1, 1.9, 5], 4, 2.0),
        ("min", [float("nan"), float("nan")], 2, None),
        ("min", [float("nan"), 1, 2, 2], 4, 1.0),
    ],
)
def test_patience(mode: str, values: list[float], stops_after: int | None, best: float | None) -> None:
    stop = EarlyStopping("held_out", patience=2, min_delta=0.1, mode=mode)
    stopped = None
    for epoch, value in enumerate(values, start=1):
        resumed = EarlyStopping("held_out", patience=2, min_delta=0.1, mode=mode)
        resumed.load_state_dict(stop.state_dict())
        answer = stop(report(epoch, value))
        assert resumed(report(epoch, value)) == answer
        if answer:
            stopped = epoch
            break
    assert (stopped, stop.best) == (stops_after, best)


def test_what_cannot_be() -> None:
    for wrong in ({"patience": 0}, {"min_delta": -1.0}, {"mode": "least"}):
        with pytest.raises(InputError, match="EarlyStopping"):
            EarlyStopping("held_out", **wrong)
    with pytest.raises(InputError, match="metric is 3"):
        EarlyStopping(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="epoch 1 has loss, held_out"):
        EarlyStopping("accuracy")(report(1, 0.5))


def train(folder: str, epochs: int, signal_after: int | None) -> tuple[bool, bool, int, int, int]:
    """Epochs whose evaluation is 5, 4, 3, 4, 4, …; the last rank may get a signal after so many steps."""
    world = lockstep.init()
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(torch.nn.Linear(4, 1))
    data = torch.utils.data.TensorDataset(torch.randn(30, 4))
    steps = 0

    def loss_of(engine: object, batch: list[torch.Tensor]) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == signal_after and world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return engine(batch[0]).pow(2).mean()  # type: ignore[operator]

    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lockstep.DataLoader(data, batch_size=6, shuffle=True),
        loss_of,
        evaluate=lambda _: {"held_out": float({0: 5, 1: 4, 2: 3}.get(trainer.epoch - 1, 4))},
        checkpoints=folder,
        stop=EarlyStopping("held_out", patience=2),
        stop_on_signals=True,
    )
    if checkpoint.available(folder):
        trainer.load_state_dict(checkpoint.load(folder))
    is_over = trainer.fit(epochs)
    return is_over, trainer.is_stopped, trainer.epoch, trainer.step, checkpoint.load(folder)["step"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trainer_stops_and_resumes(world_size: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    told = run_ranks(train, world_size, folder, 9, 7)  # in the second epoch of 5 steps
    assert told == [(False, False, 1, 7, 7)] * world_size
    over = run_ranks(train, world_size, folder, 9, None)
    assert over == [(True, True, 5, 25, 25)] * world_size
    again = run_ranks(train, world_size, folder, 9, None)
    assert again == over, "training that was over is over"
