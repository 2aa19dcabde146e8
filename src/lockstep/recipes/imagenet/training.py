"""The program of each rank of the ImageNet program."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep import checkpoint, env, seeding
from lockstep.errors import CheckpointError, DataError, InputError, SetupError
from lockstep.launch.config import resolve_nproc
from lockstep.launch.environment import visible_cores
from lockstep.rank_zero import on_rank_zero
from lockstep.recipes.imagenet.broken import BrokenImages
from lockstep.recipes.imagenet.datasets import Images, check_classes, class_names_of, make_loader, open_images
from lockstep.recipes.imagenet.evaluation import evaluate
from lockstep.recipes.imagenet.images import normalize
from lockstep.recipes.imagenet.models import check_name, check_size, create_model
from lockstep.recipes.imagenet.options import ImagenetConfig, resolve_config
from lockstep.recipes.imagenet.reporting import evaluation_line, heading, make_views
from lockstep.recipes.imagenet.schedule import RateSchedule
from lockstep.recipes.imagenet.starting import choose_strategy, meeting_url
from lockstep.recipes.imagenet.strategies import Strategy, prepare
from lockstep.recipes.imagenet.waiting import LoaderAdvice
from lockstep.recipes.mistakes import open_world, say_mistake, say_together
from lockstep.recipes.options import check_epochs_left, saved_config
from lockstep.recipes.run_folder import CHECKPOINTS, folder_of_run
from lockstep.recipes.summary import RankTimes
from lockstep.train import Parallel, Trainer
from lockstep.world import World

__all__ = ["Job", "make_job", "run"]

_MISTAKES = (InputError, CheckpointError, DataError, SetupError)


@dataclass
class Job:
    """Everything needed to train or evaluate.

    Attributes:
        config: the configuration.
        strategy: the network, and how it is trained.
        trainer: the training loop.
        evaluate: called by the loop after each epoch.
        broken: images that could not be read.
        notes: lines to print before training.
    """

    config: ImagenetConfig
    strategy: Strategy
    trainer: Trainer
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    broken: BrokenImages
    notes: list[str] = field(default_factory=list)


def run(options: argparse.Namespace, url: str | None = None) -> int:
    """Train, show progress, and write a run folder. Collective: every rank calls it.

    Args:
        options: parsed options.
        url: rendezvous address; None for the launcher's.

    Returns:
        0; or 2 if the options cannot be used, after rank 0 has printed the error on stderr.
    """
    try:
        strategy = choose_strategy(options)
        place = _place(options, strategy, url)
    except InputError as mistake:
        say_mistake("imagenet", mistake, env.RANK.get() or 0)
        return 2
    backend, device, notes = _device(options)
    opened = open_world("imagenet", backend, device, **place)
    if opened is None:
        return 2
    world, notes_on_device = opened
    with world:
        try:
            job = make_job(options, strategy, world)
            folder = None if options.evaluate else folder_of_run(options, "imagenet")
        except _MISTAKES as mistake:
            say_together("imagenet", mistake, world.rank)
            return 2
        job.notes[:0] = [*notes, *notes_on_device]
        if folder is None:
            _only_evaluate(options, strategy, job, world)
        else:
            _train(options, strategy, job, world, folder)
        job.strategy.close()
    return 0


def _train(options: argparse.Namespace, strategy: str, job: Job, world: World, folder: Path) -> None:
    trainer = job.trainer
    trainer.checkpoints = folder / CHECKPOINTS
    with ExitStack() as stack:
        views = make_views(options, strategy, job.config, world, trainer, folder, job.notes) if world.rank == 0 else []
        for view in views:
            stack.enter_context(view)
        job.broken.report_to(folder, views)
        times = RankTimes()
        says_why = [LoaderAdvice(views, options.workers, visible_cores(), world.local_world_size)] if views else []
        trainer.callbacks = (times, *views, *says_why)
        if not trainer.fit(job.config.epochs, options.max_steps):
            for view in views:
                view.stop(f"stopped after step {trainer.step:,} by --max-steps; resume with --resume {folder}")
            return
        summary = times.summary()
        for each in (*says_why, *views):
            each.finish(summary)


def make_job(options: argparse.Namespace, strategy: str, world: World) -> Job:
    """Create data, network, strategy and loop, from the start or from a checkpoint. Collective: every rank calls it.

    Raises:
        InputError: the options contradict each other or the checkpoint to resume from.
        CheckpointError: it cannot be read, or another program wrote it.
        DataError: the images cannot be listed, or have other classes than the checkpoint.
        SetupError: a package is missing.
    """
    state = None if options.resume is None else checkpoint.load(options.resume)
    config = resolve_config(options, None if state is None else saved_config(state, options.resume, "imagenet"))
    replicas = resolve_nproc(options.processes, env.snapshot()) if strategy == "dp" else 1
    _check(options, config, strategy, state)
    check_name(config.arch)
    parts, notes = open_images(options, config)
    train_set, val_set = parts
    module, optimizer = _network(options, config, train_set.num_classes, world, is_resumed=state is not None)
    chosen = prepare(
        strategy,
        module,
        optimizer,
        world,
        precision=config.precision,
        opt_level=options.opt_level,
        replicas=replicas,
        accumulate=config.accumulate,
        shards=False if options.evaluate else options.shard_optimizer,
    )
    notes += chosen.notes
    notes += _batch_norm_note(config, module, max(world.world_size, replicas))
    job = _assemble(options, config, chosen, world, train_set, val_set)
    job.notes += notes
    if state is not None:
        check_classes(state, train_set, options.resume)
        job.trainer.load_state_dict(state)
    if options.start_epoch:
        job.notes += _begin_at(job.trainer, options.start_epoch, is_resumed=state is not None)
    return job


def _begin_at(trainer: Trainer, epoch: int, is_resumed: bool) -> list[str]:
    """Start with a later epoch: with its order of images, and its learning rate. Local.

    Returns:
        Notes to print: a resumed run takes its epoch from the checkpoint, as in the reference example.
    """
    if is_resumed:
        begins_as_asked = trainer.epoch == epoch
        return [] if begins_as_asked else [f"--start-epoch {epoch}: continuing in epoch {trainer.epoch}, as resumed"]
    trainer.epoch, trainer.step = epoch, epoch * -(-len(trainer.loader) // trainer.accumulate)
    trainer.loader.set_epoch(epoch)
    assert trainer.scheduler is not None
    trainer.scheduler.load_state_dict({"step": trainer.step})
    return []


class _Task:
    """The computation on a batch, in training and evaluation.

    Args:
        options: parsed options.
        config: the configuration.
        strategy: the network, and how it is trained.
        world: the ranks.
        val_loader: loader of the validation images.
        num_classes: number of classes.
        broken: notes images that cannot be read.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        config: ImagenetConfig,
        strategy: Strategy,
        world: World,
        val_loader: lockstep.DataLoader[Any],
        num_classes: int,
        broken: BrokenImages,
    ) -> None:
        self.strategy, self.device, self.val_loader = strategy, world.device, val_loader
        self.num_classes, self.broken = num_classes, broken
        self.skips, self.channels_last = options.skip_broken, options.channels_last
        self.dtype = torch.float64 if config.precision == "fp64" else torch.float32
        self.autocast = _autocast(config, world.device)

    def forward(self, model: Parallel | nn.Module, images: Tensor) -> Tensor:
        """Logits `(n, classes)` of images `(n, height, width, 3)`, in the dtype of losses."""
        inputs = normalize(images.to(self.device), self.dtype, channels_last=self.channels_last)
        with self.autocast():
            logits: Tensor = model(inputs)
        return logits.to(self.dtype)

    def loss(self, model: Parallel, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The mean loss over the images of a batch, a scalar tensor."""
        images, labels, indices = batch
        labels = labels.to(self.device)
        if not self.skips:
            return cross_entropy(self.forward(model, images), labels)
        self.broken.note("train", indices, labels)
        # A broken image gets no gradient, but still counts in the mean.
        losses = cross_entropy(self.forward(model, images), labels.clamp_min(0), reduction="none")
        return losses.where(labels >= 0, torch.zeros_like(losses)).mean()

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """Evaluate a network over all validation images. Collective."""
        self.strategy.align_buffers()
        note = functools.partial(self.broken.note, "val") if self.skips else None
        values = evaluate(module, self.val_loader, self.forward, self.num_classes, note)
        return {**values, **self.broken.collect()}


def _assemble(
    options: argparse.Namespace,
    config: ImagenetConfig,
    strategy: Strategy,
    world: World,
    train_set: Images,
    val_set: Images,
) -> Job:
    """The training loop for a strategy."""
    broken = BrokenImages({"train": train_set, "val": val_set}, world.device, options.skip_broken)
    train_loader = make_loader(options, config, train_set, world, evaluation=False)
    val_loader = make_loader(options, config, val_set, world, evaluation=True)
    task = _Task(options, config, strategy, world, val_loader, train_set.num_classes, broken)
    trainer = Trainer(
        strategy.model,
        strategy.optimizer,
        train_loader,
        task.loss,
        evaluate=task.evaluate,
        scheduler=RateSchedule(strategy.optimizer, config, -(-len(train_loader) // config.accumulate)),
        update=strategy.update,
        accumulate=config.accumulate,
        log_every=options.print_freq,
        save_every=options.save_every,
        extra={"recipe": "imagenet", "config": config.as_dict(), "classes": class_names_of(train_set)},
    )
    return Job(config, strategy, trainer, task.evaluate, broken)


def _network(
    options: argparse.Namespace, config: ImagenetConfig, num_classes: int, world: World, *, is_resumed: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    pretrained = config.pretrained and not is_resumed  # a checkpoint replaces every weight
    if pretrained:  # rank 0 downloads, for all ranks that share its cache
        on_rank_zero(lambda: str(create_model(config.arch, num_classes, pretrained=True, size=config.size) is not None))
    seeding.begin_common_stream(config.seed, world.rank)
    module = create_model(config.arch, num_classes, pretrained=pretrained, size=config.size)
    check_size(module, config.arch, config.size)
    if config.sync_bn:
        module = lockstep.SyncBatchNorm.convert_sync_batchnorm(module)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    module = module.to(world.device, dtype)
    if options.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if options.compile:
        module.compile()
    if world.device.type == "cuda":
        is_seeded = options.seed is not None  # as in the reference example
        torch.backends.cudnn.set_flags(_deterministic=is_seeded, _benchmark=not is_seeded)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(
        module.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    return module, optimizer


def _autocast(config: ImagenetConfig, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype)


def _place(options: argparse.Namespace, strategy: str, url: str | None) -> dict[str, Any]:
    """Arguments of `lockstep.init` for a process whose place is given by its options or by `spawn`.

    Raises:
        InputError: the rank is out of range.
    """
    if url is not None:
        return {"init_method": url} if not url.startswith("env://") else {}
    if strategy in ("single", "dp") or options.world_size <= 1:
        return {}
    if not 0 <= options.rank < options.world_size:
        raise InputError(
            f"--rank is {options.rank} of --world-size {options.world_size} processes; ranks are counted from 0"
        )
    place = {"rank": options.rank, "world_size": options.world_size}
    return {**place, "init_method": meeting_url(options, options.world_size)}


def _device(options: argparse.Namespace) -> tuple[str, str | None, list[str]]:
    """Backend and device for `lockstep.init`, and notes to print if they are not the requested ones."""
    gpu, notes = options.gpu, []
    if gpu is not None and options.multiprocessing_distributed:
        gpu, notes = None, [f"--gpu {gpu} is ignored: each process of --multiprocessing-distributed has its own GPU"]
    if torch.cuda.is_available() and not options.no_accel:
        return options.backend, None if gpu is None else f"cuda:{gpu}", notes
    why = "--no-accel" if options.no_accel else "there is no GPU"
    if options.backend == "nccl":
        return "auto", "cpu", [*notes, f"{why}: training on the CPU, without nccl"]
    if gpu is not None:
        notes.append(f"{why}: training on the CPU, not on GPU {gpu}")
    return options.backend, "cpu", notes


def _check(options: argparse.Namespace, config: ImagenetConfig, strategy: str, state: Mapping[str, Any] | None) -> None:
    """Check for incompatible options.

    Raises:
        InputError: names the options.
    """
    if strategy in ("single", "dp") and dist.get_world_size() > 1:
        raise InputError(
            f"--strategy {strategy} trains in one process, but there are {dist.get_world_size()}: start one, or choose "
            "another strategy"
        )
    if strategy == "dp" and (config.sync_bn or options.compile):
        option = "--sync-bn" if config.sync_bn else "--compile"
        raise InputError(f"{option} is not supported by --strategy dp, whose replicas are threads: use ddp")
    if strategy != "apex" and options.opt_level != "O0":
        raise InputError(
            f"--opt-level {options.opt_level} is an option of Apex: use --strategy apex, or --precision instead"
        )
    if options.shard_optimizer and strategy not in ("ddp", "spawn", "slurm"):
        raise InputError(f"--shard-optimizer is not supported by --strategy {strategy}: use ddp, spawn or slurm")
    if state is not None and not options.evaluate:
        check_epochs_left(state, options.resume, config.epochs)
        if options.max_steps is not None and state["step"] >= options.max_steps:
            raise InputError(f"{options.resume} has done {state['step']} steps already, which --max-steps includes")


def _batch_norm_note(config: ImagenetConfig, module: nn.Module, num_parts: int) -> list[str]:
    normalizes = any(isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for each in module.modules())
    if not normalizes or config.sync_bn or num_parts == 1:
        return []
    return [
        f"batch normalization sees {config.batch_size} images in {num_parts} parts, so losses depend on the number of "
        "parts; --sync-bn normalizes over all"
    ]


def _only_evaluate(options: argparse.Namespace, strategy: str, job: Job, world: World) -> None:
    module = job.trainer.model.module
    module.eval()
    with torch.no_grad():
        values = job.evaluate(module)
    if world.rank == 0:
        lines = heading(strategy, job.config, world, job.trainer)
        print(*([] if options.quiet else [*lines, *job.notes]), evaluation_line(values), sep="\n", flush=True)
