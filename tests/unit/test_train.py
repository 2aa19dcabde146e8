"""The training loop in one process: steps, windows, reports, checkpoints. On more ranks: test_train_parity.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep
from lockstep import checkpoint, train
from lockstep.batch.share import BatchShare
from lockstep.errors import CheckpointError, CheckpointNotWritten, InputError, InputTypeError
from lockstep.train import EarlyStopping, EpochReport, Report, StepReport, Trainer, Update

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
        if tensor.is_floating_point():  # what ranks compare is none
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


def test_clipping_goes_by_what_is_stepped() -> None:
    """A part of the model, as where a head is trained: gradients of the rest are in no norm, and do not pile up."""

    def losses(clip_norm: float, freeze: bool) -> list[float]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.Linear(4, 1)).double()
        net[0].requires_grad_(not freeze)
        model, seen = lockstep.DistributedDataParallel(net), Collector()
        optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
        loader = lockstep.DataLoader(dataset(), batch_size=4, seed=5)
        Trainer(model, optimizer, loader, mean_loss, clip_norm=clip_norm, callbacks=[seen]).fit(2)
        return seen.losses

    assert losses(0.3, freeze=False) == losses(0.3, freeze=True) != losses(10, freeze=True)


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
    assert second.fit(3)
    assert [one.loss for one in rest.epochs] == pytest.approx([one.loss for one in whole.epochs[-len(rest.epochs) :]])
    assert sum(one.samples for one in rest.epochs) == sum(one.samples for one in rest.steps)
    assert [one.step for one in rest.steps] == [one.step for one in whole.steps[saved_after:]]
    assert rest.losses == whole.losses[saved_after:]
    assert [one.lr for one in rest.steps] == [one.lr for one in whole.steps[saved_after:]]


class Interruption(Exception):
    """A user's own."""


def interrupted(after_batches: int) -> tuple[Trainer, Collector]:
    """A trainer (five batches of 2 an epoch, two of them a step) whose first epoch ended behind so many batches."""
    collector = Collector()
    trainer = make_trainer(batch_size=2, accumulate=2, log_every=1, callbacks=[collector])
    num_batches = 0

    def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal num_batches
        if num_batches == after_batches:
            raise Interruption
        num_batches += 1
        return mean_loss(model, batch)

    trainer.loss_fn = loss_fn
    with pytest.raises(Interruption):
        trainer.fit(1)
    trainer.loss_fn = mean_loss
    collector.steps.clear()
    return trainer, collector


def test_fit_again_after_an_error_begins_its_windows_anew() -> None:
    """In the middle of a window as between two: nothing of the epoch that was left is in a later step."""
    between, seen_between = interrupted(after_batches=2)
    inside, seen_inside = interrupted(after_batches=3)
    for trainer, seen in ((between, seen_between), (inside, seen_inside)):
        trainer.fit(1)
        assert [one.samples for one in seen.steps] == [4, 4, 2]
    assert seen_inside.losses == seen_between.losses
    assert torch.equal(inside.model.module.weight, between.model.module.weight)


def test_a_checkpoint_per_epoch_with_its_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer(evaluate=lambda _: {"score": 0.5}, checkpoints=tmp_path, keep=2, extra={"note": "mine"})
    trainer.fit(3)
    assert [path.name[:13] for path in checkpoint.available(tmp_path)] == ["step-00000009", "step-00000006"]
    state = checkpoint.load(tmp_path)
    assert (state["epoch"], state["metrics"], state["extra"]) == (3, {"score": 0.5}, {"note": "mine"})


def test_checkpoints_within_an_epoch(tmp_path: Path) -> None:
    """Five steps an epoch: after step 2, 4 and 8, and 5 and 10 where the epochs end. The losses so far are in them."""
    collector = Collector()
    trainer = make_trainer(2, checkpoints=tmp_path, save_every=2, keep=9, callbacks=[collector])
    assert trainer.fit(2)
    found = {int(path.name.split("-")[1]): checkpoint.load(path) for path in checkpoint.available(tmp_path)}
    assert list(found) == [10, 8, 6, 5, 4, 2]
    assert (found[4]["epoch"], found[4]["so_far"]["samples"]) == (0, 8)
    assert found[4]["so_far"]["loss_sum"] == pytest.approx(2 * sum(collector.losses[:4]))
    assert (found[5]["epoch"], found[5]["so_far"]["samples"]) == (1, 0)


@pytest.mark.parametrize(
    ("max_steps", "epochs", "evaluations"), [(2, 0, 0), (3, 1, 1), (4, 1, 1), (6, 2, 2), (9, 2, 2)]
)
def test_ending_after_some_steps(tmp_path: Path, max_steps: int, epochs: int, evaluations: int) -> None:
    """Three steps an epoch, two epochs. An epoch that ends there, too, is evaluated; the next one is not begun."""
    collector = Collector()
    trainer = make_trainer(4, checkpoints=tmp_path, callbacks=[collector], evaluate=lambda _: {"score": 1.0})
    assert trainer.fit(2, max_steps) == (max_steps >= 6)
    assert [one.evaluation for one in collector.epochs] == [{"score": 1.0}] * evaluations
    state = checkpoint.load(tmp_path)
    assert (state["step"], state["epoch"]) == (min(max_steps, 6), epochs)
    rest = make_trainer(4, callbacks=[collector])
    rest.load_state_dict(state)
    assert rest.fit(2)
    assert collector.losses == train_collecting(2).losses


@pytest.mark.parametrize("between", ["nothing", "a pass over the data", "a resume"])
def test_fit_again_after_some_steps_goes_on_within_the_epoch(between: str) -> None:
    """Five steps an epoch. The rest of an epoch is trained, and reported, as after a resume; so is what comes after."""
    options: dict[str, Any] = {"log_every": 1, "schedule": {"step_size": 3, "gamma": 0.5}}
    whole, parts = train_collecting(3, 2, **options), Collector()
    trainer = make_trainer(2, callbacks=[parts], **options)
    for max_steps in (2, 2, 4, 8):  # the second time there is nothing to do
        assert not trainer.fit(3, max_steps)
        if between != "nothing":
            list(trainer.loader)
        if between == "a resume":
            trainer.load_state_dict(trainer.state_dict())
    assert trainer.fit(3)
    assert parts.losses == whole.losses
    assert [one.lr for one in parts.steps] == [one.lr for one in whole.steps]
    assert [(one.epoch, one.step) for one in parts.epochs] == [(1, 5), (2, 10), (3, 15)]
    assert [one.loss for one in parts.epochs] == pytest.approx([one.loss for one in whole.epochs])
    assert [one.samples for one in parts.epochs] == [2, 4, 10]


class Noting(Update):
    """Writes down what the loop asks for."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.calls: list[str] = []

    def backward(self, loss: Tensor, share: BatchShare, closes_step: bool) -> None:
        self.calls.append(f"backward of {share.global_samples}" + (", the last" if closes_step else ""))
        super().backward(loss, share, closes_step)

    def finish(self) -> None:
        self.calls.append("finish")

    def step(self) -> None:
        self.calls.append("step")
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.calls)}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


def test_what_comes_between_loss_and_optimizer(tmp_path: Path) -> None:
    trainer = make_trainer(4, accumulate=2, checkpoints=tmp_path)
    trainer.update = update = Noting(trainer.optimizer)
    trainer.fit(1)
    assert update.calls == [
        "backward of 4", "backward of 4, the last", "finish", "step", "backward of 2, the last", "finish", "step",
    ]  # fmt: skip
    other = make_trainer(4, accumulate=2)
    other.update = Noting(other.optimizer)
    other.load_state_dict(checkpoint.load(tmp_path))
    assert other.update.state_dict() == update.state_dict()


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
    ("saved", "here", "said"),
    [
        ({}, {"schedule": {"step_size": 3}}, "has no scheduler, but this run has a StepLR"),
        ({"schedule": {"step_size": 3}}, {}, "has a scheduler, but this run has none"),
    ],
)
def test_a_checkpoint_with_and_without_a_scheduler_is_refused(
    saved: dict[str, Any], here: dict[str, Any], said: str
) -> None:
    """Before anything is loaded."""
    first, other = make_trainer(**saved), make_trainer(**here)
    first.fit(1)
    state = first.state_dict()
    before = other.model.module.weight.clone()
    with pytest.raises(CheckpointError, match=said):
        other.load_state_dict(state)
    assert torch.equal(other.model.module.weight, before)
    # What the message advises.
    other.load_state_dict({**state, "scheduler": other.scheduler.state_dict() if other.scheduler else None})
    assert other.fit(2)


def test_numbers_of_numpy_in_evaluation_and_learning_rate_are_saved(tmp_path: Path) -> None:
    trainer = make_trainer(checkpoints=tmp_path, evaluate=lambda _: {"loss": np.mean([0.25, 0.5])})
    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.5 * (1 + np.cos(step)))
    trainer.fit(1)
    state = checkpoint.load(tmp_path)
    assert state["metrics"] == {"loss": 0.375}
    assert state["scheduler"]["_last_lr"] == trainer.scheduler.get_last_lr()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": 64 / 24}, r"accumulate is 2\.6.*an integer"),
        ({"keep": 0}, "keep is 0"),
        ({"log_every": 0}, "log_every is 0"),
        ({"save_every": 0}, "save_every is 0"),
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
    with pytest.raises(InputTypeError, match=r"pass DistributedDataParallel\(model\)"):
        Trainer(trainer.model.module, trainer.optimizer, trainer.loader, mean_loss)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match=r"the class EarlyStopping; pass an object"):  # it is true, and would stop
        make_trainer(stop=EarlyStopping)


def test_a_folder_for_checkpoints_is_tried_before_the_first_epoch(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = make_trainer(checkpoints=tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointNotWritten, match="Not a directory"):
        trainer.fit(1)
    assert trainer.step == 0
