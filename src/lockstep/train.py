"""A training loop to read in five minutes, and to use where its shape fits.

`Trainer` runs epochs of optimizer steps over a global-batch loader, with accumulation, clipping,
evaluation, reports and checkpoints. It adds nothing that a loop of one's own could not do: every
line stands for what a user would write, and the recipes of this package are built on it.

What is worth copying into a loop of one's own:

- Losses are reduced late. A step keeps its local loss on the device; every `log_every` steps one
  collective turns the whole vector of them into means over the global batches. Logging adds no
  collective and no device synchronisation to a step.
- Accumulation is exact. Micro-batches are weighted by their samples, so a window that ends with a
  smaller batch still has the gradient of the mean over all of its samples.
- Evaluation calls the bare module: ranks may hold different numbers of batches there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.batch import BatchShare
from lockstep.data import DataLoader
from lockstep.errors import CheckpointError, InputError, InputTypeError
from lockstep.rank_zero import collective_device
from lockstep.world import current_world

__all__ = ["EpochReport", "Parallel", "Report", "StepReport", "Trainer"]


@dataclass(frozen=True)
class StepReport:
    """One optimizer step; the same on every rank, but for the clock.

    Attributes:
        step: optimizer steps since the beginning of training; the first is 1.
        epoch: the first is 1.
        loss: mean over the samples of the global batch (of all micro-batches of the step).
        samples: samples of the step, over all ranks.
        samples_per_s: global samples per second since the report before, on this rank's clock.
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
    """One epoch; the same on every rank, but for the clock and `local_samples`.

    Attributes:
        epoch: the first is 1.
        step: optimizer steps since the beginning of training.
        loss: mean over the training samples of the epoch, each as its step saw it.
        samples: training samples of the epoch, over all ranks.
        train_s: seconds in training steps, on this rank's clock.
        local_samples: of `samples`, those that this rank was given.
        communication_s: of `train_s`, seconds this rank was in collectives or waited for others in them.
        evaluation: what `evaluate` returned; empty without one.
    """

    epoch: int
    step: int
    loss: float
    samples: int
    train_s: float
    local_samples: int
    communication_s: float
    evaluation: Mapping[str, float] = field(default_factory=dict)


Report = StepReport | EpochReport
_ReportT = TypeVar("_ReportT", StepReport, EpochReport)


class Parallel(Protocol):
    """What the loop needs of an engine: `lockstep.DistributedDataParallel`, or torch's."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def train(self, mode: bool = True) -> nn.Module: ...

    def no_sync(self) -> AbstractContextManager[None]: ...


class _Ledger:
    """What the steps since the last report saw, kept on the device until it is asked for.

    A loss is kept as a sum over samples, in float64: the sums of all ranks add up to the sum over
    the global batch, whatever number of ranks it was split over.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # 0-dim float64, over this rank's samples; one per closed step
        self._steps: list[tuple[int, float]] = []  # samples over all ranks, learning rate; one per closed step
        self._window: list[tuple[Tensor, int]] = []  # the same two of each micro-batch in the step under way
        self._since = time.perf_counter()
        self.local_samples = 0  # this rank's, of all micro-batches entered so far

    @property
    def window_samples(self) -> list[int]:
        """Samples over all ranks of each micro-batch in the step under way."""
        return [samples for _, samples in self._window]

    def add(self, loss: Tensor, share: BatchShare) -> None:
        """Enter a micro-batch. Local."""
        loss = loss.detach().double()
        # A filler may have any loss, nan included: it is left out, not multiplied by zero.
        total = loss * share.local_samples if share.local_samples else loss.new_zeros(())
        self._window.append((total, share.global_samples))
        self.local_samples += share.local_samples

    def close_step(self, lr: float) -> None:
        """The micro-batches entered so far make one step. Local."""
        self._sums.append(torch.stack([total for total, _ in self._window]).sum())
        self._steps.append((sum(self.window_samples), lr))
        self._window.clear()

    def reports(self, step: int, epoch: int) -> list[StepReport]:
        """The steps closed since the last call; the last of them is number `step`. Collective."""
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


class Trainer:
    """Epochs of optimizer steps, reported and checkpointed.

    Every rank makes one with the same arguments and calls the same methods: all of them are
    collective unless they say otherwise.

    Args:
        model: the wrapped model.
        optimizer: over the model's parameters.
        loader: yields this rank's part of every global batch.
        loss_fn: `loss_fn(model, batch)` is the mean loss over the samples of `batch`: a 0-dim tensor.
        evaluate: called with the bare module, in evaluation mode and without gradients, after every
            epoch; its numbers go into the `EpochReport`.
        scheduler: stepped once per optimizer step, whatever the number of ranks.
        accumulate: global batches per optimizer step.
        clip_norm: clip the norm of the reduced gradient to this.
        log_every: optimizer steps per `StepReport` round.
        checkpoints: folder to write a checkpoint to after every epoch; None writes none.
        keep: how many checkpoints to leave there.
        callbacks: called with every report, on every rank, in order.
        extra: stored with every checkpoint, to be found again under "extra"; plain values only.

    Raises:
        InputTypeError: `loader` is no `lockstep.DataLoader`.
        InputError: `accumulate` or `log_every` below 1, `clip_norm` not above 0.

    Attributes:
        step: optimizer steps done so far.
        epoch: epochs done so far.
    """

    def __init__(
        self,
        model: Parallel,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        loss_fn: Callable[[Parallel, Any], Tensor],
        *,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        log_every: int = 10,
        checkpoints: str | os.PathLike[str] | None = None,
        keep: int = 3,
        callbacks: Sequence[Callable[[Report], None]] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise InputTypeError(
                f"Trainer: loader is a {type(loader).__module__}.{type(loader).__name__}; pass a lockstep.DataLoader, "
                "which takes the global batch size and knows what each rank holds of a batch"
            )
        for name, value in (("accumulate", accumulate), ("log_every", log_every)):
            if value < 1:
                raise InputError(f"Trainer: {name} is {value}; expected at least 1")
        if clip_norm is not None and not clip_norm > 0:
            raise InputError(f"Trainer: clip_norm is {clip_norm}; expected more than 0, or None for no clipping")
        self.model, self.optimizer, self.loader, self.loss_fn = model, optimizer, loader, loss_fn
        self.evaluate, self.scheduler = evaluate, scheduler
        self.accumulate, self.clip_norm, self.log_every = accumulate, clip_norm, log_every
        self.checkpoints = None if checkpoints is None else Path(checkpoints)
        self.keep = keep
        self.callbacks = tuple(callbacks)
        self.extra = dict(extra or {})
        self.step = 0
        self.epoch = 0

    def fit(self, epochs: int) -> None:
        """Train until `epochs` epochs are done, counting those done before a resume."""
        while self.epoch < epochs:
            trained = self._train_epoch()
            self.epoch += 1
            report = replace(trained, evaluation=self._evaluate())
            self._report([report])
            self.save(dict(report.evaluation))

    def save(self, metrics: Mapping[str, float] | None = None) -> Path | None:
        """Write a checkpoint of the present state, if there is a folder for it.

        Args:
            metrics: stored beside the state, to tell how good it is.

        Returns:
            Its path.
        """
        if self.checkpoints is None:
            return None
        state = {**self.state_dict(), "rng": checkpoint.gather_rng(), "metrics": dict(metrics or {})}
        return checkpoint.save(self.checkpoints, state, step=self.step, keep=self.keep)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, but for random-number generators. Local."""
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "loader": self.loader.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "extra": self.extra,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, at any number of ranks. Local; every rank loads the same.

        Raises:
            CheckpointError: it lacks a part, or belongs to another model or optimizer.
        """
        try:
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler:
                self.scheduler.load_state_dict(state["scheduler"])
            self.loader.load_state_dict(state["loader"])
            self.step, self.epoch = state["step"], state["epoch"]
            if "rng" in state:
                checkpoint.restore_rng(state["rng"])
        except KeyError as error:
            raise CheckpointError(f"the checkpoint has no {error}; was it written by Trainer.save?") from None
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint does not fit this run: {error}") from error

    def _train_epoch(self) -> EpochReport:
        """One epoch of steps, reported as they go."""
        self.model.train()
        steps: list[StepReport] = []
        ledger = _Ledger()
        started, communication_s = time.perf_counter(), _communication_s()
        batches = iter(self.loader)
        for number, data in enumerate(batches, start=1):
            closes_step = number % self.accumulate == 0 or number == len(batches)
            with nullcontext() if closes_step else self.model.no_sync():
                assert batches.share is not None
                self._backward(data, batches.share, ledger)
            if closes_step:
                self._update(ledger)
                if self.step % self.log_every == 0:
                    steps += self._report(ledger.reports(self.step, self.epoch + 1))
        steps += self._report(ledger.reports(self.step, self.epoch + 1))
        samples = sum(report.samples for report in steps)
        return EpochReport(
            epoch=self.epoch + 1,
            step=self.step,
            loss=sum(report.loss * report.samples for report in steps) / samples if samples else float("nan"),
            samples=samples,
            train_s=time.perf_counter() - started,
            local_samples=ledger.local_samples,
            communication_s=_communication_s() - communication_s,
        )

    def _backward(self, data: Any, share: BatchShare, ledger: _Ledger) -> None:
        """Add one micro-batch to the gradient."""
        window = ledger.window_samples
        if not window:
            self.optimizer.zero_grad()
        loss = self.loss_fn(self.model, data)
        ledger.add(loss, share)
        # As a part of a full window of micro-batches as large as its first; exactly 1 without accumulation.
        nominal = self.accumulate * (window[0] if window else share.global_samples)
        (loss * (share.global_samples / nominal)).backward()  # type: ignore[no-untyped-call]

    def _update(self, ledger: _Ledger) -> None:
        """Take the optimizer step on the gradient of the window."""
        window = ledger.window_samples
        parameters = [parameter for parameter in self.model.module.parameters() if parameter.grad is not None]
        filled = sum(window) / (self.accumulate * window[0])
        if filled != 1:  # the last window of an epoch: fewer micro-batches, or a smaller one
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.div_(filled)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        ledger.close_step(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.step += 1

    def _evaluate(self) -> dict[str, float]:
        if self.evaluate is None:
            return {}
        module = self.model.module
        module.eval()
        with torch.no_grad():
            return dict(self.evaluate(module))

    def _report(self, reports: list[_ReportT]) -> list[_ReportT]:
        for report in reports:
            for callback in self.callbacks:
                callback(report)
        return reports


def _communication_s() -> float:
    """Seconds this rank has spent in collectives so far; 0 where nobody counts them (no open world)."""
    world = current_world()
    return world.communication_seconds() if world else 0.0
