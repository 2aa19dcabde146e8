"""The options of the ImageNet program: those of PyTorch's ImageNet example, and its own. Does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.recipes.options import add_run_options, merge_with_saved, positive, rate, whole_number

__all__ = ["OPT_LEVELS", "PRECISIONS", "SCHEDULES", "STRATEGIES", "ImagenetConfig", "add_options", "resolve_config"]

STRATEGIES = ("single", "dp", "ddp", "spawn", "apex", "horovod", "slurm")
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
SCHEDULES = ("steps", "cosine", "constant")
OPT_LEVELS = ("O0", "O1", "O2", "O3")

# Options that may change when a run is resumed.
_MAY_CHANGE = ("epochs", "lr", "schedule", "step_epochs", "gamma", "warmup", "scale_lr")


@dataclass(frozen=True)
class ImagenetConfig:
    """Everything that the results depend on, so neither the number of ranks nor the strategy.

    Attributes:
        arch: name of a network, see `models.py`.
        epochs: passes over the training images.
        batch_size: images per global batch.
        accumulate: global batches per optimizer step.
        lr: learning rate for a step of 256 images.
        scale_lr: whether `lr` is scaled by the number of images per step; see `schedule.py`.
        schedule: "steps", "cosine" or "constant".
        step_epochs: with "steps", epochs until the rate is multiplied by `gamma`.
        gamma: factor of the drops, with "steps".
        warmup: number of warm-up epochs.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD.
        seed: seed of the initial weights, the order of the images and their crops and flips.
        precision: "fp64" and "fp32" throughout; "bf16" and "fp16" by autocast, with float32 weights.
        size: edge length of the cropped images, in pixels.
        sync_bn: whether batch normalization is over the images of all ranks.
        pretrained: whether to start with trained weights.
        dummy: whether to use noise instead of images.
    """

    arch: str = "resnet18"
    epochs: int = 90
    batch_size: int = 256
    accumulate: int = 1
    lr: float = 0.1
    scale_lr: bool = True
    schedule: str = "steps"
    step_epochs: int = 30
    gamma: float = 0.1
    warmup: int = 0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0
    precision: str = "fp32"
    size: int = 224
    sync_bn: bool = False
    pretrained: bool = False
    dummy: bool = False

    @property
    def step_images(self) -> int:
        """Images per optimizer step, over all ranks."""
        return self.batch_size * self.accumulate

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as stored with checkpoints and in metrics.jsonl."""
        return asdict(self)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options to `parser`. They default to None, so that a resumed run can take them from its checkpoint."""
    parser.add_argument("data", nargs="?", type=Path, metavar="DIR", help="folder with train/ and val/")
    _add_reference(parser.add_argument_group("as in PyTorch's ImageNet example"))
    _add_own(parser.add_argument_group("training"))
    add_run_options(parser, "imagenet", backend=("--backend", "--dist-backend"))


def resolve_config(given: argparse.Namespace, saved: Mapping[str, Any] | None = None) -> ImagenetConfig:
    """The configuration given by options and, when resuming, a checkpoint.

    Raises:
        InputError: an option contradicts the checkpoint, and cannot change during a run; or options are incompatible.
    """
    names = [field.name for field in fields(ImagenetConfig)]
    # Only for the weights of a new run; the checkpoint has its own.
    may_change = (*_MAY_CHANGE, "pretrained")
    config = ImagenetConfig(**merge_with_saved(given, names, saved, may_change))
    if given.data is None and not config.dummy:
        raise InputError(
            "DIR is missing: the folder of the images, with train/ and val/. `lockstep data make-imagenet shapes` "
            "writes a small one; --dummy trains on noise"
        )
    if config.warmup >= config.epochs and config.warmup > 0:
        raise InputError(f"--warmup is {config.warmup} of {config.epochs} epochs; expected less than --epochs")
    if given.start_epoch >= config.epochs:
        raise InputError(f"--start-epoch is {given.start_epoch} of --epochs {config.epochs}; epochs are counted from 0")
    return config


def _add_reference(group: argparse._ArgumentGroup) -> None:
    """Add the options of the example, with its names and short forms."""
    default = ImagenetConfig()
    number, least_one = whole_number(0), whole_number(1)
    group.add_argument(
        *("-a", "--arch"),
        metavar="ARCH",
        help=f"network: resnet18 … resnet152, tiny, tiny-bn, any of torchvision's, or timm's (default: {default.arch})",
    )
    group.add_argument(
        "-j", "--workers", type=number, default=4, metavar="N", help="processes that load images, per host (default: 4)"
    )
    group.add_argument("--epochs", type=least_one, metavar="N", help=f"default: {default.epochs}")
    group.add_argument(
        "--start-epoch",
        type=number,
        default=0,
        metavar="N",
        help="start with the order of images and the learning rate of epoch N, from 0; ignored when a checkpoint "
        "is resumed (default: 0)",
    )
    group.add_argument(
        *("-b", "--batch-size"),
        type=least_one,
        metavar="N",
        help=f"images per global batch, over all processes of all hosts (default: {default.batch_size})",
    )
    group.add_argument(
        *("--lr", "--learning-rate"),
        type=positive,
        metavar="RATE",
        help=f"learning rate for steps of 256 images, scaled to the actual number (default: {default.lr})",
    )
    group.add_argument("--momentum", type=rate, metavar="M", help=f"default: {default.momentum}")
    group.add_argument(
        *("--wd", "--weight-decay"),
        dest="weight_decay",
        type=rate,
        metavar="W",
        help=f"weight decay (default: {default.weight_decay:g})",
    )
    group.add_argument(
        *("-p", "--print-freq"),
        type=least_one,
        default=10,
        metavar="N",
        help="steps between two reports of the loss (default: 10)",
    )
    group.add_argument("-e", "--evaluate", action="store_true", help="only evaluate on val/")
    group.add_argument("--pretrained", action="store_const", const=True, help="start with trained weights")
    group.add_argument("--seed", type=number, metavar="N", help=f"default: {default.seed}")
    group.add_argument("--dummy", action="store_const", const=True, help="noise instead of images, for benchmarks")
    _add_places(group)


def _add_places(group: argparse._ArgumentGroup) -> None:
    """Add the example's options for devices and hosts."""
    group.add_argument("--gpu", type=whole_number(0), metavar="N", help="train on this GPU only")
    group.add_argument("--no-accel", action="store_true", help="train on the CPU even if there are GPUs")
    group.add_argument(
        *("--world-size",),
        type=int,
        default=-1,
        metavar="N",
        help="number of hosts with --multiprocessing-distributed, otherwise of processes",
    )
    group.add_argument("--rank", type=int, default=-1, metavar="R", help="number of this host or process")
    group.add_argument(
        "--dist-url", metavar="URL", help="rendezvous address, such as tcp://ADDRESS_OF_HOST_0:PORT, or env://"
    )
    group.add_argument(
        "--multiprocessing-distributed",
        action="store_true",
        help="start a process per GPU of this host (or per core), or --nproc; the same as --strategy spawn",
    )


def _add_own(group: argparse._ArgumentGroup) -> None:
    default = ImagenetConfig()
    least_one = whole_number(1)
    group.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="one of six ways to train on several devices, or a single device; results are the same (default: ddp)",
    )
    group.add_argument("--precision", choices=PRECISIONS, help=f"default: {default.precision}")
    group.add_argument(
        "--opt-level", choices=OPT_LEVELS, default="O0", help="opt level of --strategy apex (default: O0)"
    )
    group.add_argument("--accumulate", type=least_one, metavar="K", help="batches per optimizer step (default: 1)")
    group.add_argument(
        "--size",
        type=whole_number(8),
        metavar="N",
        help=f"edge length of the images in pixels (default: {default.size})",
    )
    _add_schedule(group)
    group.add_argument(
        "--sync-bn",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="batch normalization over the images of all processes",
    )
    group.add_argument(
        "--shard-optimizer",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="each rank updates a shard of the parameters, with the same results (default: on the CPU, if a host has "
        "several ranks and the network a million parameters or more)",
    )
    group.add_argument("--channels-last", action="store_true", help="use the channels-last memory format")
    group.add_argument("--compile", action="store_true", help="compile the network with torch.compile")
    group.add_argument("--skip-broken", action="store_true", help="leave out images that cannot be read, and list them")
    group.add_argument("--save-every", type=least_one, metavar="N", help="also write a checkpoint every N steps")
    group.add_argument(
        "--max-steps",
        type=least_one,
        metavar="N",
        help="stop after N optimizer steps, with a checkpoint to resume from",
    )


def _add_schedule(group: argparse._ArgumentGroup) -> None:
    default, least_one = ImagenetConfig(), whole_number(1)
    group.add_argument("--schedule", choices=SCHEDULES, help=f"learning rate schedule (default: {default.schedule})")
    group.add_argument(
        "--step-epochs",
        type=least_one,
        metavar="N",
        help=f"with --schedule steps: epochs between two drops (default: {default.step_epochs})",
    )
    group.add_argument(
        "--gamma",
        type=positive,
        metavar="G",
        help=f"with --schedule steps: factor of a drop (default: {default.gamma})",
    )
    group.add_argument("--warmup", type=whole_number(0), metavar="N", help="epochs of warm-up (default: 0)")
    group.add_argument(
        "--scale-lr",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="multiply --lr by the number of images per step / 256 (default: yes)",
    )
