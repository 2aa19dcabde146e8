"""The options of the digits recipe, and their configuration. Does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lockstep.recipes.options import add_run_options, check_packages, merge_with_saved, positive, whole_number

__all__ = ["DigitsConfig", "add_arguments", "resolve_config"]

_LEARNING_RATES = {"sgd": 0.02, "adam": 0.002}
_EXTRAS = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib", "tensorboard": "tensorboard"}


@dataclass(frozen=True)
class DigitsConfig:
    """Everything that the results depend on, so not the number of ranks.

    Attributes:
        epochs: passes over the 1438 training images.
        batch_size: images per global batch.
        lr: learning rate.
        optimizer: "sgd" (momentum 0.9) or "adam".
        seed: seed of the initial weights, the order of the images and their shifts.
        dtype: "float32" or "float64".
        accumulate: global batches per optimizer step.
        augment: whether to shift each image at random in each epoch.
    """

    epochs: int = 20
    batch_size: int = 64
    lr: float = _LEARNING_RATES["sgd"]
    optimizer: str = "sgd"
    seed: int = 0
    dtype: str = "float32"
    accumulate: int = 1
    augment: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as stored with checkpoints and in metrics.jsonl."""
        return asdict(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe's options to `parser`. Local; does not import torch.

    An option that is not given is None, so that a resumed run can take it from its checkpoint.

    Raises:
        SetupError: a package of the "train" extra is missing. Raised here, it is reported once, before
            any rank starts.
    """
    check_packages("digits", _EXTRAS)
    default = DigitsConfig()
    training = parser.add_argument_group("training")
    training.add_argument(
        "--epochs",
        type=whole_number(1),
        metavar="N",
        help=f"passes over the training images (default: {default.epochs})",
    )
    training.add_argument(
        "--batch-size",
        type=whole_number(1),
        metavar="N",
        help=f"images per global batch (default: {default.batch_size})",
    )
    training.add_argument("--optimizer", choices=sorted(_LEARNING_RATES), help=f"default: {default.optimizer}")
    rates = ", ".join(f"{rate} for {name}" for name, rate in _LEARNING_RATES.items())
    training.add_argument("--lr", type=positive, metavar="RATE", help=f"learning rate (default: {rates})")
    training.add_argument(
        "--accumulate", type=whole_number(1), metavar="K", help="batches per optimizer step (default: 1)"
    )
    training.add_argument(
        "--augment", action=argparse.BooleanOptionalAction, default=None, help="shift each image by up to one pixel"
    )
    training.add_argument("--seed", type=whole_number(0), metavar="N", help=f"default: {default.seed}")
    training.add_argument("--dtype", choices=("float32", "float64"), help=f"default: {default.dtype}")
    add_run_options(parser, "digits")


def resolve_config(given: argparse.Namespace, saved: Mapping[str, Any] | None = None) -> DigitsConfig:
    """The configuration given by options and, when resuming, a checkpoint.

    Args:
        given: parsed options; None means that the option was not given.
        saved: the configuration stored in the checkpoint to resume from.

    Raises:
        InputError: an option contradicts the checkpoint, and cannot change during a run.
    """
    values = merge_with_saved(given, [field.name for field in fields(DigitsConfig)], saved, ("epochs", "lr"))
    if saved is None and given.lr is None:
        values["lr"] = _LEARNING_RATES[values.get("optimizer", DigitsConfig.optimizer)]
    return DigitsConfig(**values)
