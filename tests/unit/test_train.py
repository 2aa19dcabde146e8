"""The training loop in one process: steps, windows, reports, checkpoints. On more ranks: test_train_parity.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep
from lockstep import checkpoint, train
from lockstep.errors import CheckpointError, InputError, InputTypeError
from lockstep.train import EpochReport, Report, StepReport, Trainer

NUM_SAMPLES, NUM_FEATURES = 10, 3


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with lockstep.init(device="cpu"):
        yield


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(NUM_SAMPLES, 1, generator=generator, dtype=torch.float64))


def mean_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return mse_loss(model(inputs), targets)


def make_trainer(batch_size: int = 4, *, features: int = NUM_FEATURES, lr: float = 0.1, **options: Any) -> Trainer:
    torch.manual_seed(1)
    model = lockstep.DistributedDataParallel(nn.Linear(features, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    drop_last = options.pop("drop_last", False)
    loader = lockstep.DataLoader(dataset(), batch_size=batch_size, shuffle=True, seed=5, drop_last=drop_last)
    if "schedule" in options:
        options["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, **options.pop("schedule"))
    return Trainer(model, optimizer, loader, mean_loss, **options)


class Collector:
    """Keeps every report; a callback."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.epochs: list[EpochReport] = []

    def __call__(self, report: Report) -> None:
        if isinstance(report, EpochReport):
            self.epochs.append(report)
        else:
            self.steps.append(report)

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.steps]


def train_collecting(epochs: int, *arguments: Any, **options: Any) -> Collector:
    collector = Collector()
    make_trainer(*arguments, callbacks=[collector], **options).fit(epochs)
    return collector


def reference_losses(
    epochs: int, window_size: int, clip_norm: float | None = None, drop_last: bool = False
) -> list[float]:
    """Losses of plain PyTorch steps, each on `window_size` consecutive samples of the loader's order."""
    torch.manual_seed(1)
    model = nn.Linear(NUM_FEATURES, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole = lockstep.DataLoader(dataset(), batch_size=NUM_SAMPLES, shuffle=True, seed=5)
    losses = []
    for _ in range(epochs):
        ((inputs, targets),) = whole
        for part in range(0, NUM_SAMPLES, window_size):
            if drop_last and part + window_size > NUM_SAMPLES:
                break
            optimizer.zero_grad()
            loss = mse_loss(model(inputs[part : part + window_size]), targets[part : part + window_size])
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_reports_say_what_a_plain_loop_computes() -> None:
    seen = train_collecting(2, batch_size=4)
    assert [(one.step, one.epoch, one.samples) for one in seen.steps] == [
        (1, 1, 4), (2, 1, 4), (3, 1, 2), (4, 2, 4), (5, 2, 4), (6, 2, 2),
    ]  # fmt: skip
    assert seen.losses == pytest.approx(reference_losses(2, 4), rel=1e-12)
    assert [(one.epoch, one.step, one.samples, one.local_samples) for one in seen.epochs] == [
        (1, 3, 10, 10),
        (2, 6, 10, 10),
    ]
    first = seen.steps[:3]
    assert seen.epochs[0].loss == pytest.approx(sum(one.loss * one.samples for one in first) / 10, rel=1e-15)
    assert all(one.samples_per_s > 0 for one in seen.steps)
    assert all(0 <= one.communication_s <= one.train_s for one in seen.epochs)


@pytest.mark.parametrize(("log_every", "reductions"), [(1, 6), (2, 4), (100, 2)])
def test_losses_are_reduced_late(monkeypatch: pytest.MonkeyPatch, log_every: int, reductions: int) -> None:
    sizes: list[int] = []
    reduce = train.dist.all_reduce

    def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, *arguments, **options)

    monkeypatch.setattr(train.dist, "all_reduce", counting)
    seen = train_collecting(2, batch_size=4, log_every=log_every)
    assert len(sizes) == reductions
    assert sum(sizes) == len(seen.steps) == 6
    assert seen.losses == train_collecting(2, batch_size=4).losses


@pytest.mark.parametrize(("batch_size", "accumulate"), [(2, 2), (1, 4), (3, 2), (4, 2), (3, 5), (10, 3)])
def test_an_accumulated_step_is_one_step_on_the_whole_window(batch_size: int, accumulate: int) -> None:
    seen = train_collecting(3, batch_size, accumulate=accumulate)
    assert seen.losses == pytest.approx(reference_losses(3, batch_size * accumulate), rel=1e-12)
    assert sum(one.samples for one in seen.steps) == 3 * NUM_SAMPLES


def test_clipping_sees_the_gradient_of_the_whole_window() -> None:
    seen = train_collecting(3, 3, accumulate=2, clip_norm=0.3)
    assert seen.losses == pytest.approx(reference_losses(3, 6, clip_norm=0.3), rel=1e-12)
    assert seen.losses != pytest.approx(reference_losses(3, 6), rel=1e-3)


def test_drop_last_ends_the_epoch_with_a_full_window() -> None:
    seen = train_collecting(2, 3, accumulate=3, drop_last=True)
    assert [one.samples for one in seen.steps] == [9, 9]
    assert seen.losses == pytest.approx(reference_losses(2, 9, drop_last=True), rel=1e-12)


def test_the_schedule_counts_optimizer_steps() -> None:
    seen = train_collecting(2, 3, accumulate=2, schedule={"step_size": 2, "gamma": 0.5})
    assert [one.lr for one in seen.steps] == [0.1, 0.1, 0.05, 0.05]


def test_evaluation_gets_the_bare_module_without_gradients_in_evaluation_mode() -> None:
    modules: list[nn.Module] = []

    def evaluate(module: nn.Module) -> dict[str, float]:
        assert not module.training
        assert not torch.is_grad_enabled()
        modules.append(module)
        return {"score": len(modules)}

    collector = Collector()
    trainer = make_trainer(evaluate=evaluate, callbacks=[collector])
    trainer.fit(2)
    assert modules == [trainer.model.module] * 2
    assert [one.evaluation for one in collector.epochs] == [{"score": 1}, {"score": 2}]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("saved_after", [1, 2, 3, 4])
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, saved_after: int, accumulate: int) -> None:
    """Also in the middle of an epoch (batches of 2: five an epoch), with momentum and a schedule."""
    options: dict[str, Any] = {
        "batch_size": 2, "accumulate": accumulate, "log_every": 1, "schedule": {"step_size": 3, "gamma": 0.5},
    }  # fmt: skip

    def save(report: Report) -> None:
        if isinstance(report, StepReport) and report.step == saved_after:
            first.checkpoints = tmp_path
            first.save({"loss": report.loss})
            first.checkpoints = None

    whole = Collector()
    first = make_trainer(callbacks=[whole, save], **options)
    first.fit(3)

    rest = Collector()
    second = make_trainer(callbacks=[rest], **options)
    state = checkpoint.load(tmp_path)
    assert state["metrics"] == {"loss": whole.losses[saved_after - 1]}
    second.load_state_dict(state)
    second.fit(3)
    assert [one.step for one in rest.steps] == [one.step for one in whole.steps[saved_after:]]
    assert rest.losses == whole.losses[saved_after:]
    assert [one.lr for one in rest.steps] == [one.lr for one in whole.steps[saved_after:]]


def test_a_checkpoint_per_epoch_with_its_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer(evaluate=lambda _: {"score": 0.5}, checkpoints=tmp_path, keep=2, extra={"note": "mine"})
    trainer.fit(3)
    assert [path.name[:13] for path in checkpoint.available(tmp_path)] == ["step-00000009", "step-00000006"]
    state = checkpoint.load(tmp_path)
    assert (state["epoch"], state["metrics"], state["extra"]) == (3, {"score": 0.5}, {"note": "mine"})


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    make_trainer(checkpoints=tmp_path).fit(1)
    state = checkpoint.load(tmp_path)
    other = make_trainer()
    other.model = lockstep.DistributedDataParallel(nn.Linear(NUM_FEATURES + 1, 1).double())
    with pytest.raises(CheckpointError, match=r"(?s)does not fit this run: .*size mismatch for weight"):
        other.load_state_dict(state)
    del state["loader"]
    with pytest.raises(CheckpointError, match=r"has no 'loader'; was it written by Trainer\.save"):
        make_trainer().load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate": 0}, "accumulate is 0"),
        ({"log_every": 0}, "log_every is 0"),
        ({"clip_norm": 0.0}, r"clip_norm is 0\.0"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_trainer(**options)


def test_another_loader_is_refused_with_what_to_pass() -> None:
    trainer = make_trainer()
    with pytest.raises(InputTypeError, match=r"loader is a torch.*DataLoader; pass a lockstep\.DataLoader"):
        Trainer(trainer.model, trainer.optimizer, torch.utils.data.DataLoader(dataset()), mean_loss)  # type: ignore[arg-type]
