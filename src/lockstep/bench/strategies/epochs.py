"""An epoch of training, with the time of each part of a step.

    data        until the batch is on the device
    forward     the model and the loss
    backward    gradients, and whatever a way does with them during the backward pass
    optimizer   whatever it does afterwards, the step, and zero_grad

On the CPU the parts end when their calls return. On a GPU they are timed by events on its stream, read at the end
of the epoch, so that measuring does not synchronize.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

import lockstep
from lockstep.bench.strategies.setups import TrainingSetup
from lockstep.bench.strategies.task import WHOLE, Limit, Task
from lockstep.bench.strategies.ways import PARTS

__all__ = ["train_epoch"]


class _Clock:
    """Records times, by the host's clock or on a GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments: list[Any] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between consecutive marks."""
        pairs = zip(self._moments, self._moments[1:], strict=False)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]


def train_epoch(
    setup: TrainingSetup,
    loader: lockstep.DataLoader[Any],
    task: Task,
    device: torch.device,
    epoch: int,
    limit: Limit = WHOLE,
) -> dict[str, Any]:
    """Train an epoch. Collective: every rank of the setup calls it.

    Args:
        setup: the way, set up.
        loader: loader of this rank's parts of batches.
        task: model and data.
        device: device of the model.
        epoch: number of the epoch, which determines the order of samples; 0 starts with the initial weights.
        limit: may end it earlier.

    Returns:
        "epoch_s", seconds of all steps; "parts_s", those of each of `ways.PARTS`; "steps"; "is_cut", whether
        `limit` ended it; "loss_sum" and "samples", of this rank's samples.
    """
    if epoch == 0:
        setup.begin_again()
    loader.set_epoch(epoch)
    clock = _Clock(device)
    gc.collect()
    gc.disable()
    try:
        _line_up()
        total, samples = _train(setup, loader, task, device, clock, limit)
        seconds = clock.seconds()
    finally:
        gc.enable()
    steps = len(seconds) // len(PARTS)
    return {
        "epoch_s": sum(seconds),
        "parts_s": _by_part(seconds),
        "steps": steps,
        "is_cut": steps < len(loader),
        "loss_sum": float(total.item()),
        "samples": samples,
    }


def _train(
    setup: TrainingSetup,
    loader: lockstep.DataLoader[Any],
    task: Task,
    device: torch.device,
    clock: _Clock,
    limit: Limit,
) -> tuple[Tensor, int]:
    """Run the steps of an epoch; returns the float64 sum of this rank's losses, and their number of samples."""
    total, samples = torch.zeros((), dtype=torch.float64, device=device), 0
    batches, began_s = iter(loader), time.monotonic()
    clock.mark()
    for number, (images, labels, *_) in enumerate(batches, start=1):
        images, labels = images.to(device), labels.to(device)
        clock.mark()
        loss = cross_entropy(setup.model(task.as_input(images, task.dtype)), labels)
        clock.mark()
        share = batches.share
        assert share is not None
        setup.backward(loss, share)
        clock.mark()
        setup.step()
        setup.zero_grad()
        clock.mark()
        if share.local_samples:  # the loss of a filler does not count
            total += loss.detach().double() * share.local_samples
            samples += share.local_samples
        if limit.is_reached(number, began_s):
            break
    return total, samples


def _by_part(seconds: Sequence[float]) -> list[float]:
    return [sum(seconds[part :: len(PARTS)]) for part in range(len(PARTS))]


def _line_up() -> None:
    """Make all ranks start at the same time."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
