"""The learning rate of every optimizer step, as a function of its number.

For steps with k times as many images, the learning rate is multiplied by k (the linear scaling
rule of Goyal et al., "Accurate, Large Minibatch SGD", 2017); large steps need some epochs of warm-up. As a function
of the step alone, the rate is right after a resume, even with another `--epochs` or `--lr`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lockstep.recipes.imagenet.options import ImagenetConfig

__all__ = ["RateSchedule", "describe_rate", "full_rate", "rate_of_step"]

_REFERENCE_IMAGES = 256


def full_rate(config: ImagenetConfig) -> float:
    """The rate after warm-up, before any drop."""
    return config.lr * config.step_images / _REFERENCE_IMAGES if config.scale_lr else config.lr


def rate_of_step(config: ImagenetConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of one optimizer step.

    Args:
        config: the configuration.
        step: number of the step, from 0.
        steps_per_epoch: optimizer steps in an epoch.

    >>> config = ImagenetConfig(lr=0.1, epochs=90, warmup=5)
    >>> [round(rate_of_step(config, epoch * 10, 10), 6) for epoch in (0, 4, 5, 29, 30, 60)]
    [0.002, 0.082, 0.1, 0.1, 0.01, 0.001]
    """
    rate, warmup_steps = full_rate(config), config.warmup * steps_per_epoch
    if step < warmup_steps:
        return rate * (step + 1) / warmup_steps
    if config.schedule == "steps":
        drops = step // steps_per_epoch // config.step_epochs
        return float(rate * config.gamma**drops)
    if config.schedule == "cosine":
        done = (step - warmup_steps) / max(config.epochs * steps_per_epoch - warmup_steps, 1)
        return rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return rate


def describe_rate(config: ImagenetConfig) -> str:
    """A line that describes the schedule."""
    words = f"learning rate {full_rate(config):g}"
    if config.scale_lr and config.step_images != _REFERENCE_IMAGES:
        words += f" = {config.lr:g} x {config.step_images} images per step / {_REFERENCE_IMAGES}"
    else:
        words += f" for {config.step_images} images per step" + ("" if config.scale_lr else ", not scaled")
    if config.warmup:
        words += f", after a warm-up of {config.warmup} epoch{'s' if config.warmup > 1 else ''}"
    drops = f"x {config.gamma:g} every {config.step_epochs} epochs"
    return (
        words
        + {"steps": f"; {drops}", "cosine": f"; cosine to 0 at epoch {config.epochs}", "constant": ""}[config.schedule]
    )


class RateSchedule:
    """Sets the rate of an optimizer, step by step; a `lockstep.train.Scheduler`.

    Args:
        optimizer: the optimizer whose rate is set.
        config: the configuration.
        steps_per_epoch: optimizer steps in an epoch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: ImagenetConfig, steps_per_epoch: int) -> None:
        self.optimizer, self.config, self.steps_per_epoch = optimizer, config, steps_per_epoch
        self._set(0)

    def step(self) -> None:
        """Set the rate of the next step."""
        self._set(self._step + 1)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps done."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Resume after that number of steps, with this run's schedule."""
        self._set(state_dict["step"])

    def _set(self, step: int) -> None:
        self._step = step
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of_step(self.config, step, self.steps_per_epoch)
