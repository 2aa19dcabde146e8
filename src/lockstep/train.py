"""A training loop that can be read in five minutes, and used where its shape fits.

`Trainer` runs epochs of optimizer steps over a global-batch loader, with accumulation, clipping, evaluation, reports
and checkpoints. The recipes of this package are built on it.

Worth copying into a hand-written loop:

- Losses are reduced late. A step keeps its local loss on the device; every `log_every` steps one collective turns all
  of them into means over the global batches.
- Accumulation is exact. Micro-batches are weighted by their number of samples, so a window that ends with a smaller
  batch still has the gradient of the mean over all of its samples.
- Evaluation calls the bare module: ranks may hold different numbers of batches there.
- All ranks decide together when training ends: `EarlyStopping` by a value of the epoch report, a signal after the same
  step on all (`World.should_stop`).
- A checkpoint within an epoch is taken between two optimizer steps, and includes the epoch's totals so far: a run that
  resumes from it, at any number of ranks, reports the epoch as if it had not been interrupted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.agreement import any as any_rank
from lockstep.agreement import collective_device
from lockstep.batch.share import BatchShare
from lockstep.data import DataLoader
from lockstep.errors import CheckpointError, InputError, InputTypeError
from lockstep.world import current_world

__all__ = ["EarlyStopping", "EpochReport", "Parallel", "Report", "Scheduler", "StepReport", "Trainer", "Update"]


@dataclass(frozen=True)
class StepReport:
    """One optimizer step; the same on every rank, except for `samples_per_s`.

    Attributes:
        step: optimizer steps since the beginning of training; the first is 1.
        epoch: the first is 1.
        loss: mean over the samples of the step's global batch (all of its micro-batches).
        samples: number of samples in the step, over all ranks.
        samples_per_s: global samples per second since the previous report, by this rank's clock.
        lr: learning rate of the first parameter group in this step.
    """

    step: int
    epoch: int
    loss: float
    samples: int
    samples_per_s: float
    lr: float


@dataclass(frozen=True)
class EpochReport:
    """One epoch; the same on every rank, except for times and `local_samples`.

    Attributes:
        epoch: the first is 1.
        step: optimizer steps since the beginning of training.
        loss: mean training loss over the samples of the epoch, as computed in its steps, also those before a resume.
        samples: training samples in the epoch, over all ranks; if it was resumed half way, those since the resume.
        train_s: seconds in training steps, by this rank's clock.
        local_samples: the part of `samples` that this rank was given.
        communication_s: the part of `train_s` that this rank spent in collectives, including waiting for other ranks.
        loader_s: the part of `train_s` that this rank waited for its loader.
        first_batch_s: the part of `loader_s` before the first batch, which includes the start of workers.
        evaluation: the result of `evaluate`; empty without one.
    """

    epoch: int
    step: int
    loss: float
    samples: int
    train_s: float
    local_samples: int
    communication_s: float
    loader_s: float = 0.0
    first_batch_s: float = 0.0
    evaluation: Mapping[str, float] = field(default_factory=dict)


Report = StepReport | EpochReport


class EarlyStopping:
    """Ends training when a metric has not improved for some epochs; for `Trainer(stop=...)`.

    Its state is saved in checkpoints, so a resumed run continues counting.

    Args:
        metric: a key of the result of `evaluate`; "loss" is the training loss if the result has no such key.
        patience: number of consecutive epochs without improvement after which to stop.
        min_delta: smallest change that counts as an improvement.
        mode: "min" if smaller is better, "max" if larger is.

    Raises:
        InputError: an argument is none of these; when called, a report without `metric`.

    Attributes:
        best: the best value so far; None before the first epoch.
        best_epoch: the epoch of the best value.
    """

    def __init__(self, metric: str = "loss", *, patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        if not (isinstance(metric, str) and patience >= 1 and min_delta >= 0 and mode in ("min", "max")):
            raise InputError(
                f"EarlyStopping: metric is {metric!r}, patience {patience!r}, min_delta {min_delta}, mode {mode!r}; "
                "expected a name, an integer of at least 1, at least 0, and 'min' or 'max'"
            )
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, min_delta, mode
        self.best: float | None = None
        self.best_epoch = 0

    def __call__(self, report: EpochReport) -> bool:
        """Whether to stop after this epoch. Local; `Trainer` makes the ranks agree."""
        values = {"loss": report.loss, **report.evaluation}
        if self.metric not in values:
            raise InputError(
                f"EarlyStopping: metric is {self.metric!r}, and epoch {report.epoch} has {', '.join(values)}: return "
                "it from `evaluate`"
            )
        value = float(values[self.metric])
        gain = value if self.mode == "max" else -value
        best = self.best if self.mode == "max" or self.best is None else -self.best
        if best is None or gain > best + self.min_delta:  # never true for nan
            self.best, self.best_epoch = (value, report.epoch) if value == value else (None, self.best_epoch)
        return report.epoch - self.best_epoch >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """The best value and its epoch."""
        return {"best": self.best, "best_epoch": self.best_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.best_epoch = state["best"], state["best_epoch"]


class Parallel(Protocol):
    """What the loop needs from an engine: `lockstep.DistributedDataParallel`, or torch's."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def train(self, mode: bool = True) -> nn.Module: ...

    def no_sync(self) -> AbstractContextManager[None]: ...


class Scheduler(Protocol):
    """What the loop needs from a learning rate schedule: torch's or your own."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Update:
    """How the loop gets from a loss to changed parameters. Override it if there is more to do in between.

    A loss scaler, or an engine that is an optimizer, needs more than `backward()` and `step()`. The loop calls, in this
    order: `backward` for each micro-batch of a step, `finish`, `step`.

    Args:
        optimizer: holds the model's parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def backward(self, loss: Tensor, share: BatchShare, closes_step: bool) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: 0-dim; the mean over this rank's samples, times the micro-batch's part of a full step's samples.
            share: this rank's share of the micro-batch.
            closes_step: whether this is the last micro-batch of its step.
        """
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Prepare gradients for use: afterwards they are unscaled, and averaged over all ranks."""

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters whose gradients `step` uses: those of the module that the optimizer updates."""
        stepped = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return [each for each in module.parameters() if each.grad is not None and id(each) in stepped]

    def step(self) -> None:
        """Change the parameters."""
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The state that the next step depends on, besides the optimizer's; plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class _Ledger:
    """Losses and samples of the steps since the last report, kept on the device until they are needed.

    A loss is kept as a sum over samples, in float64: the sums of all ranks add up to the sum over the global batch, for
    any number of ranks.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # 0-dim float64, over this rank's samples; one per closed step
        self._steps: list[tuple[int, float]] = []  # samples over all ranks, learning rate; one per closed step
        self._window: list[tuple[Tensor, int]] = []  # sum and samples of each micro-batch in the current step
        self._since = time.perf_counter()
        self.local_samples = 0  # this rank's samples in all micro-batches added so far

    @property
    def window_samples(self) -> list[int]:
        """Samples of each micro-batch in the current step, over all ranks."""
        return [samples for _, samples in self._window]

    def add(self, loss: Tensor, share: BatchShare) -> None:
        """Add a micro-batch. Local."""
        loss = loss.detach().double()
        # A filler may have any loss, nan included: it is left out, not multiplied by zero.
        total = loss * share.local_samples if share.local_samples else loss.new_zeros(())
        self._window.append((total, share.global_samples))
        self.local_samples += share.local_samples

    def close_step(self, lr: float) -> None:
        """Make one step of the micro-batches added since the last one. Local."""
        self._sums.append(torch.stack([total for total, _ in self._window]).sum())
        self._steps.append((sum(self.window_samples), lr))
        self._window.clear()

    def reports(self, step: int, epoch: int) -> list[StepReport]:
        """Report the steps closed since the last call; the last one has number `step`. Collective."""
        if not self._sums:
            return []
        sums = torch.stack(self._sums).to(collective_device())
        dist.all_reduce(sums)
        now = time.perf_counter()
        samples_per_s = sum(samples for samples, _ in self._steps) / max(now - self._since, 1e-9)
        first = step - len(self._steps) + 1
        reports = [
            StepReport(first + index, epoch, total / samples, samples, samples_per_s, lr)
            for index, (total, (samples, lr)) in enumerate(zip(sums.tolist(), self._steps, strict=True))
        ]
        self._sums.clear()
        self._steps.clear()
        self._since = now
        return reports


@dataclass
class _SoFar:
    """Totals of the current epoch so far, over all ranks; saved with checkpoints.

    Attributes:
        loss_sum: sum of the reported losses over samples.
        samples: number of these samples.
    """

    loss_sum: float = 0.0
    samples: int = 0

    @property
    def loss(self) -> float:
        """Mean over the samples; nan if there are none."""
        return self.loss_sum / self.samples if self.samples else float("nan")


class Trainer:
    """Trains for a number of epochs, with reports and checkpoints.

    Every rank creates one with the same arguments and calls the same methods, which are collective unless marked local.

    Args:
        model: the wrapped model.
        optimizer: holds the model's parameters.
        loader: yields this rank's part of every global batch.
        loss_fn: `loss_fn(model, batch)` returns the mean loss over the samples of `batch`, a 0-dim tensor.
        evaluate: called after every epoch with the bare module, in evaluation mode and without gradients; its result
            goes into the `EpochReport`.
        scheduler: stepped once per optimizer step, for any number of ranks.
        update: leads from loss to optimizer step; None for plain `backward()` and `step()`.
        accumulate: global batches per optimizer step.
        clip_norm: clip the norm of the reduced gradient to this.
        log_every: optimizer steps per `StepReport` round.
        checkpoints: folder to write a checkpoint to after every epoch, checked when `fit` begins; None writes none.
        save_every: also write a checkpoint whenever this many optimizer steps are done.
        keep: how many checkpoints to keep there.
        callbacks: called with every report, on every rank, in order.
        extra: stored under "extra" in every checkpoint; plain values only.
        stop: called with the report of each epoch; True on any rank ends training on all. `EarlyStopping`, or your own
            function. If it has `state_dict` and `load_state_dict`, its state is saved in checkpoints.
        stop_on_signals: ask `World.should_stop` after each step, and if True, end there with a checkpoint. After the
            last step of an epoch, the epoch is still evaluated.

    Raises:
        InputTypeError: `loader`, `model` or `stop` is of another type, or the loader's batch sampler has no length.
        InputError: a number of steps or checkpoints is no integer of at least 1, `clip_norm` not above 0; or
            `stop_on_signals` without a world.

    Attributes:
        step: optimizer steps done so far.
        epoch: epochs done so far.
        is_stopped: whether `stop` has ended the training.
    """

    def __init__(
        self,
        model: Parallel,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        loss_fn: Callable[[Parallel, Any], Tensor],
        *,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        scheduler: Scheduler | None = None,
        update: Update | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        log_every: int = 10,
        checkpoints: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        keep: int = 3,
        callbacks: Sequence[Callable[[Report], None]] = (),
        extra: Mapping[str, Any] | None = None,
        stop: Callable[[EpochReport], bool] | None = None,
        stop_on_signals: bool = False,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise InputTypeError(
                f"Trainer: loader is a {type(loader).__module__}.{type(loader).__name__}; pass a lockstep.DataLoader"
            )
        try:
            len(loader)
        except TypeError:
            name = type(loader.batch_sampler).__name__
            raise InputTypeError(f"Trainer: the loader's batch_sampler {name} has no length: give it __len__") from None
        if not isinstance(getattr(model, "module", None), nn.Module):
            raise InputTypeError(f"Trainer: model is a {type(model).__name__}; pass DistributedDataParallel(model)")
        if isinstance(stop, type):
            raise InputTypeError(f"Trainer: stop is the class {stop.__name__}; pass an object: {stop.__name__}()")
        saves = {} if save_every is None else {"save_every": save_every}
        _check_counts(accumulate=accumulate, log_every=log_every, keep=keep, **saves)
        if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
            raise InputError(f"Trainer: clip_norm is {clip_norm!r}; expected more than 0, or None for no clipping")
        self.model, self.optimizer, self.loader, self.loss_fn = model, optimizer, loader, loss_fn
        self.evaluate, self.scheduler, self.update = evaluate, scheduler, update or Update(optimizer)
        self.accumulate, self.clip_norm, self.log_every = accumulate, clip_norm, log_every
        self.save_every, self.keep = save_every, keep
        self.checkpoints = None if checkpoints is None else Path(checkpoints)
        self.callbacks, self.extra = tuple(callbacks), dict(extra or {})
        self.stop, self.is_stopped = stop, False
        self._world = current_world() if stop_on_signals else None
        if stop_on_signals and self._world is None:
            raise InputError("Trainer: stop_on_signals needs a world: call lockstep.init() first")
        self._is_told, self.step, self.epoch = False, 0, 0
        self._so_far = _SoFar()
        # The loader's state from which the epoch of `_so_far` continues; None if the next epoch begins.
        self._rest: dict[str, Any] | None = None

    def fit(self, epochs: int, max_steps: int | None = None) -> bool:
        """Train until `epochs` epochs are done, counting those done before a resume.

        Args:
            epochs: total number of epochs.
            max_steps: end after this many optimizer steps in total, if that comes first, with a checkpoint but without
                evaluation. The next call continues within the epoch, as does a run that loads the checkpoint.

        Returns:
            Whether training is over: all epochs are done, or `stop` has ended it. False after `max_steps`, and after a
            signal; then exit with `sys.exit(lockstep.EXIT_STOPPED)` to signal that work is left.

        Raises:
            CheckpointNotWritten: rank 0 cannot create the checkpoint folder, or write to it.
        """
        if self.checkpoints is not None and self.epoch < epochs and not self.is_stopped:
            checkpoint.check_folder(self.checkpoints)
        while self.epoch < epochs and not self.is_stopped:
            if self._is_told or (max_steps is not None and self.step >= max_steps):  # where an epoch ended, too
                return False
            trained = self._train_epoch(max_steps)
            if trained is None:
                self._rest = self.loader.state_dict()
                self.save()
                return False
            self.epoch += 1
            self._so_far = _SoFar()
            report = replace(trained, evaluation=self._evaluate())
            self._report([report])
            self.is_stopped = self.stop is not None and any_rank(bool(self.stop(report)))
            self.save(dict(report.evaluation))
        return True

    def save(self, metrics: Mapping[str, float] | None = None) -> Path | None:
        """Write a checkpoint of the current state, if `checkpoints` was given.

        Args:
            metrics: stored with the state, to show how good it is.

        Returns:
            The file's path, or None.
        """
        if self.checkpoints is None:
            return None
        state = {**self.state_dict(), "rng": checkpoint.gather_rng(), "metrics": dict(metrics or {})}
        return checkpoint.save(self.checkpoints, state, step=self.step, keep=self.keep)

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on, except generators. Local; collective with a sharded optimizer."""
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "update": self.update.state_dict(),
            "loader": self.loader.state_dict() if self._rest is None else self._rest,
            "step": self.step,
            "epoch": self.epoch,
            "so_far": asdict(self._so_far),
            "stop": {"is_stopped": self.is_stopped, "state": getattr(self.stop, "state_dict", dict)()},
            "extra": self.extra,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, at any number of ranks. Every rank loads the same state; see `state_dict`.

        Raises:
            CheckpointError: a part is missing, or belongs to another model or optimizer; or only one of the runs has a
                scheduler.
        """
        try:
            _check_scheduler(state["scheduler"], self.scheduler)
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            self.update.load_state_dict(state.get("update", {}))
            self.loader.load_state_dict(state["loader"])
            self.step, self.epoch = state["step"], state["epoch"]
            self._so_far, self._rest = _SoFar(**state.get("so_far", {})), self.loader.state_dict()
            stop = state.get("stop", {})
            self.is_stopped = stop.get("is_stopped", False) and self.stop is not None
            take_back = getattr(self.stop, "load_state_dict", None)
            if stop.get("state") and take_back is not None:
                take_back(stop["state"])
            if "rng" in state:
                checkpoint.restore_rng(state["rng"])
        except KeyError as error:
            raise CheckpointError(f"the checkpoint has no {error}; was it written by Trainer.save?") from None
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint does not fit this run: {error}") from error

    def _train_epoch(self, max_steps: int | None) -> EpochReport | None:
        """Run the steps of an epoch, or the rest of them, with reports; returns None if it ended early."""
        self.model.train()
        self._begin_epoch()
        ledger = _Ledger()
        started, communication_s, samples_before = time.perf_counter(), _communication_s(), self._so_far.samples
        batches = iter(self.loader)
        opened_s = time.perf_counter() - started
        for number, data in enumerate(batches, start=1):
            is_last = number == len(batches)
            closes_step = number % self.accumulate == 0 or is_last
            with nullcontext() if closes_step else self.model.no_sync():
                self._backward(data, cast(BatchShare, batches.share), ledger, closes_step)
            if not closes_step:
                continue
            self._update(ledger)
            if self._ends_within_epoch(ledger, max_steps, is_last):
                return None
        self._check_closed(ledger, len(batches))
        self._enter(ledger.reports(self.step, self.epoch + 1))
        return EpochReport(
            epoch=self.epoch + 1,
            step=self.step,
            loss=self._so_far.loss,
            samples=self._so_far.samples - samples_before,
            train_s=time.perf_counter() - started,
            local_samples=ledger.local_samples,
            communication_s=_communication_s() - communication_s,
            loader_s=opened_s + batches.waited_s,
            first_batch_s=opened_s + batches.first_wait_s,
        )

    def _ends_within_epoch(self, ledger: _Ledger, max_steps: int | None, is_last: bool) -> bool:
        """Report and save if due after a step; returns whether training ends here, within the epoch."""
        self._is_told = self._world is not None and self._world.should_stop()
        ends_here = (self._is_told or (max_steps is not None and self.step >= max_steps)) and not is_last
        saves = self.save_every is not None and self.step % self.save_every == 0 and not is_last
        if self.step % self.log_every == 0 or saves or ends_here:
            self._enter(ledger.reports(self.step, self.epoch + 1))
        if saves and not ends_here:
            self.save()
        return ends_here

    def _check_closed(self, ledger: _Ledger, length: int) -> None:
        """Check that all batches of the epoch went into steps: the last batch is recognised by the length."""
        if ledger.window_samples:
            raise InputError(
                f"Trainer: the loader's batch_sampler {type(self.loader.batch_sampler).__name__} has length {length}, "
                "which determines the last step of an epoch, but yields another number of batches: fix its __len__"
            )

    def _begin_epoch(self) -> None:
        """Move the loader to the rest of the epoch of `_so_far`, or to the beginning of the next."""
        if self._rest is None:
            self._so_far = _SoFar()  # an error may have left the totals of another epoch
        else:
            self.loader.load_state_dict(self._rest)  # it may have been iterated since
            self._rest = None

    def _enter(self, steps: Sequence[StepReport]) -> None:
        """Add steps to the epoch's totals, then report them: in this order, as a callback may write a checkpoint."""
        self._so_far.loss_sum += sum(report.loss * report.samples for report in steps)
        self._so_far.samples += sum(report.samples for report in steps)
        self._report(steps)

    def _backward(self, data: Any, share: BatchShare, ledger: _Ledger, closes_step: bool) -> None:
        """Add one micro-batch to the gradient."""
        window = ledger.window_samples
        if not window:
            self.optimizer.zero_grad()
            self.model.module.zero_grad()  # including parameters that it does not step
        loss = self.loss_fn(self.model, data)
        ledger.add(loss, share)
        # Relative to a full window of micro-batches of the first one's size; exactly 1 without accumulation.
        nominal = self.accumulate * (window[0] if window else share.global_samples)
        self.update.backward(loss * (share.global_samples / nominal), share, closes_step)

    def _update(self, ledger: _Ledger) -> None:
        """Take the optimizer step on the gradient of the window."""
        window = ledger.window_samples
        self.update.finish()
        parameters = self.update.parameters(self.model.module)
        filled = sum(window) / (self.accumulate * window[0])
        if filled != 1:  # the last window of an epoch: fewer micro-batches, or a smaller one
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.div_(filled)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        ledger.close_step(self.optimizer.param_groups[0]["lr"])
        self.update.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1

    def _evaluate(self) -> dict[str, float]:
        if self.evaluate is None:
            return {}
        module = self.model.module.eval()
        with torch.no_grad():
            return dict(self.evaluate(module))

    def _report(self, reports: Sequence[Report]) -> None:
        for report in reports:
            for callback in self.callbacks:
                callback(report)


def _check_counts(**counts: object) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(f"Trainer: {name} is {value!r}; expected an integer of at least 1")


def _check_scheduler(saved: Mapping[str, Any] | None, scheduler: Scheduler | None) -> None:
    """Refuse to resume with a scheduler if there was none, or without if there was one: learning rates would change."""
    if saved is None and scheduler is not None:
        raise CheckpointError(
            f"the checkpoint has no scheduler, but this run has a {type(scheduler).__name__}: create the Trainer "
            'without one; or, to start its schedule now, set state["scheduler"] = trainer.scheduler.state_dict() '
            "before loading"
        )
    if saved is not None and scheduler is None:
        raise CheckpointError(
            "the checkpoint has a scheduler, but this run has none: pass the Trainer the one of the checkpoint; or, "
            'to keep the learning rate as it was then, set state["scheduler"] = None before loading'
        )


def _communication_s() -> float:
    """Seconds this rank has spent in collectives so far; 0 without an open world, which counts them."""
    world = current_world()
    return world.communication_seconds() if world else 0.0
