"""The first lines that a run of the ImageNet program prints, and its logs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import lockstep
from lockstep.recipes.display import Display
from lockstep.recipes.imagenet.options import ImagenetConfig
from lockstep.recipes.imagenet.schedule import describe_rate
from lockstep.recipes.runlog import RunLog, describe_environment
from lockstep.train import Trainer
from lockstep.world import World

__all__ = ["evaluation_line", "heading", "make_views"]


def heading(strategy: str, config: ImagenetConfig, world: World, trainer: Trainer) -> list[str]:
    """The first lines: what is trained, how, and where."""
    parameters = sum(parameter.numel() for parameter in trainer.model.module.parameters())
    ranks = f"{world.world_size} {'rank' if world.world_size == 1 else 'ranks'} on {world.backend}"
    together = f", {config.accumulate} of them per step" if config.accumulate > 1 else ""
    sharded = isinstance(trainer.optimizer, lockstep.ZeroRedundancyOptimizer) and world.world_size > 1
    shares = ", each of which updates a shard of them" if sharded else ""
    return [
        f"imagenet: {config.arch}, {parameters:,} parameters in {config.precision}, {strategy}, {ranks}{shares}",
        f"batches of {config.batch_size} images{together}; {describe_rate(config)}",
    ]


def evaluation_line(values: Mapping[str, float]) -> str:
    """The last line of an evaluation."""
    return (
        f"top-1 {values['accuracy']:.2%}   top-5 {values['top5']:.2%}   loss {values['loss']:.4f}   "
        f"{values['images']:,.0f} of {values['expected']:,.0f} counted"
    )


def make_views(
    options: argparse.Namespace,
    strategy: str,
    config: ImagenetConfig,
    world: World,
    trainer: Trainer,
    folder: Path,
    notes: Sequence[str],
) -> list[RunLog | Display]:
    """The log and the display of rank 0."""
    header = {
        "recipe": "imagenet",
        "config": config.as_dict(),
        "strategy": strategy,
        "shards_optimizer": isinstance(trainer.optimizer, lockstep.ZeroRedundancyOptimizer),
        "opt_level": options.opt_level if strategy == "apex" else None,
        "world_size": world.world_size,
        "backend": world.backend,
        "data": None if options.data is None else str(options.data),
        "resumed_from": None if options.resume is None else str(options.resume),
        "environment": describe_environment(),
    }
    log = RunLog(folder, header, resumed=options.resume, resumed_step=trainer.step)
    if options.quiet:
        return [log]
    lines = [*heading(strategy, config, world, trainer), *notes]
    if options.resume is not None:
        lines.append(f"resuming after epoch {trainer.epoch}, step {trainer.step:,} of {options.resume}, in {folder}")
    steps_per_epoch = -(-len(trainer.loader) // config.accumulate)
    total = config.epochs * steps_per_epoch
    if options.max_steps is not None:
        total = min(total, options.max_steps)
    return [log, Display("\n".join(lines), folder, config.epochs, trainer.step, total)]
