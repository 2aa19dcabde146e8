"""The program of each rank of the digits recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep import checkpoint
from lockstep.errors import CheckpointError, InputError
from lockstep.metrics import Accuracy, Mean, Sum, synchronize
from lockstep.recipes.digits.options import DigitsConfig, resolve_config
from lockstep.recipes.digits.task import DigitsNet, ShiftedDigits, load_digits
from lockstep.recipes.display import Display
from lockstep.recipes.mistakes import open_world, say_together
from lockstep.recipes.options import check_epochs_left, saved_config
from lockstep.recipes.run_folder import CHECKPOINTS, folder_of_run
from lockstep.recipes.runlog import RunLog, describe_environment
from lockstep.recipes.summary import RankTimes
from lockstep.train import Parallel, Trainer
from lockstep.world import World

__all__ = ["make_trainer", "run"]

_MOMENTUM = 0.9
_EVALUATION_BATCH = 512  # one batch holds all 359 held-out images


def run(options: argparse.Namespace) -> int:
    """Train, show progress, and write a run folder. Collective: every rank calls it.

    Args:
        options: options as parsed.

    Returns:
        0; or 2 if the options cannot be used, after rank 0 has printed the error on stderr.
    """
    opened = open_world("digits", options.backend, None)
    if opened is None:
        return 2
    world, notes = opened
    with world:
        try:
            config, trainer = _prepare(options, world)
            folder = folder_of_run(options, "digits")
        except (InputError, CheckpointError) as mistake:
            say_together("digits", mistake, world.rank)
            return 2
        trainer.checkpoints = folder / CHECKPOINTS
        with ExitStack() as stack:
            views = _views(options, config, world, trainer, folder, notes) if world.rank == 0 else []
            for view in views:
                stack.enter_context(view)
            times = RankTimes()
            trainer.callbacks = (times, *views)
            trainer.fit(config.epochs)
            summary = times.summary()
            for view in views:
                view.finish(summary)
    return 0


def _prepare(options: argparse.Namespace, world: World) -> tuple[DigitsConfig, Trainer]:
    """Set up training, from the start or from a checkpoint.

    Raises:
        InputError: the options contradict the checkpoint to resume from.
        CheckpointError: it cannot be read, or another recipe wrote it.
    """
    if options.resume is None:
        config = resolve_config(options)
        return config, make_trainer(config, world.device)
    state = checkpoint.load(options.resume)
    config = resolve_config(options, saved_config(state, options.resume, "digits"))
    check_epochs_left(state, options.resume, config.epochs)
    trainer = make_trainer(config, world.device)
    trainer.load_state_dict(state)
    for group in trainer.optimizer.param_groups:  # loading its state has restored the old rate
        group["lr"] = config.lr
    return config, trainer


def make_trainer(config: DigitsConfig, device: torch.device) -> Trainer:
    """Create data, model, optimizer and loop. Collective: every rank calls it.

    Args:
        config: the configuration.
        device: the device to train on.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    train_set, held_out_set = load_digits(dtype)
    torch.manual_seed(config.seed)
    model = lockstep.DistributedDataParallel(DigitsNet().to(device, dtype))
    optimizer: torch.optim.Optimizer
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=_MOMENTUM)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    loader: lockstep.DataLoader[Any] = lockstep.DataLoader(
        ShiftedDigits(train_set) if config.augment else train_set,
        batch_size=config.batch_size,
        shuffle=True,
        seed=config.seed,
    )
    held_out = lockstep.DataLoader(held_out_set, batch_size=_EVALUATION_BATCH, evaluation=True)

    def loss_fn(model: Parallel, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = (part.to(device) for part in batch)
        return cross_entropy(model(images), labels)

    def evaluate(module: nn.Module) -> dict[str, float]:
        loss, accuracy, counted = Mean(), Accuracy(), Sum()
        for images, labels in held_out:
            logits, labels = module(images.to(device)), labels.to(device)
            loss.update(cross_entropy(logits, labels))
            accuracy.update(logits, labels)
            counted.update(torch.ones_like(labels))
        values = synchronize({"loss": loss, "accuracy": accuracy, "images": counted})
        return {**values, "correct": round(values["accuracy"] * values["images"])}

    extra = {"recipe": "digits", "config": config.as_dict()}
    return Trainer(model, optimizer, loader, loss_fn, evaluate=evaluate, accumulate=config.accumulate, extra=extra)


def _views(
    options: argparse.Namespace,
    config: DigitsConfig,
    world: World,
    trainer: Trainer,
    folder: Path,
    notes: Sequence[str],
) -> list[RunLog | Display]:
    """The log and the display of rank 0."""
    header = {
        "recipe": "digits",
        "config": config.as_dict(),
        "world_size": world.world_size,
        "backend": world.backend,
        "resumed_from": None if options.resume is None else str(options.resume),
        "environment": describe_environment(),
    }
    log = RunLog(folder, header, resumed=options.resume, resumed_step=trainer.step)
    if options.quiet:
        return [log]
    parameters = sum(parameter.numel() for parameter in trainer.model.module.parameters())
    heading = (
        f"digits: {world.world_size} {'rank' if world.world_size == 1 else 'ranks'} on {world.backend}, "
        f"{parameters:,} parameters in {config.dtype}, global batch {config.batch_size}"
    )
    heading = "\n".join([heading, *notes])
    if options.resume is not None:
        heading += f"\nresuming after epoch {trainer.epoch} of {options.resume}, in {folder}"
    steps_per_epoch = -(-len(trainer.loader) // config.accumulate)
    total = trainer.step + (config.epochs - trainer.epoch) * steps_per_epoch
    return [log, Display(heading, folder, config.epochs, trainer.step, total)]
