"""The digits recipe: a small CNN on scikit-learn's handwritten digits, at any number of ranks.

    lockstep train digits --nproc 2
    python -m lockstep.recipes.digits                    # alone, or under any launcher

This module holds the options and imports no torch: the process that starts the ranks only asks
for the options. What the ranks do is in `digits_training`, data and model are in `digits_task`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, SetupError

__all__ = ["DigitsConfig", "add_arguments", "main", "resolve_config"]

_LEARNING_RATES = {"sgd": 0.02, "adam": 0.002}
_EXTRAS = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib", "tensorboard": "tensorboard"}


@dataclass(frozen=True)
class DigitsConfig:
    """What the answer depends on. The number of ranks is not part of it.

    Attributes:
        epochs: passes over the 1438 training images.
        batch_size: images in a global batch.
        lr: learning rate.
        optimizer: "sgd" (momentum 0.9) or "adam".
        seed: of the initial weights, the order of the images and their shifts.
        dtype: "float32" or "float64".
        accumulate: global batches per optimizer step.
        augment: shift each image at random in each epoch.
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
        """Plain values, as they are stored with checkpoints and in metrics.jsonl."""
        return asdict(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe's options to `parser`. Local; imports no torch.

    An option that is not given is None, so that a resumed run can take it from its checkpoint.

    Raises:
        SetupError: a package of the "train" extra is missing. Said here, it is said once and before
            any rank is started.
    """
    _check_extras()
    default = DigitsConfig()
    training = parser.add_argument_group("training")
    training.add_argument(
        "--epochs", type=_integer(1), metavar="N", help=f"passes over the training images (default: {default.epochs})"
    )
    training.add_argument(
        "--batch-size",
        type=_integer(1),
        metavar="N",
        help=f"images per batch, over all ranks together (default: {default.batch_size})",
    )
    training.add_argument("--optimizer", choices=sorted(_LEARNING_RATES), help=f"default: {default.optimizer}")
    rates = ", ".join(f"{rate} for {name}" for name, rate in _LEARNING_RATES.items())
    training.add_argument("--lr", type=_positive, metavar="RATE", help=f"learning rate (default: {rates})")
    training.add_argument("--accumulate", type=_integer(1), metavar="K", help="batches per optimizer step (default: 1)")
    training.add_argument(
        "--augment", action=argparse.BooleanOptionalAction, default=None, help="shift each image by up to one pixel"
    )
    training.add_argument("--seed", type=_integer(0), metavar="N", help=f"default: {default.seed}")
    training.add_argument("--dtype", choices=("float32", "float64"), help=f"default: {default.dtype}")
    run = parser.add_argument_group("run")
    run.add_argument("--name", type=_name, help="folder of the run inside --out (default: digits, digits-2, …)")
    run.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept (default: runs)"
    )
    run.add_argument("--backend", default="auto", help="process group backend (default: auto)")
    run.add_argument(
        "--resume", type=_existing, metavar="PATH", help="go on from a run's folder or from one checkpoint file"
    )
    run.add_argument("--quiet", action="store_true", help="print nothing but errors")


def resolve_config(given: argparse.Namespace, saved: Mapping[str, Any] | None = None) -> DigitsConfig:
    """The configuration that options and, when resuming, a checkpoint make together.

    Args:
        given: as `add_arguments` parses it; None means that the option was not given.
        saved: the configuration in the checkpoint that is resumed.

    Raises:
        InputError: an option contradicts the checkpoint in what cannot change half way.
    """
    values: dict[str, Any] = dict(saved or {})
    for name in (field.name for field in fields(DigitsConfig)):
        value = getattr(given, name)
        if value is None:
            continue
        if saved is not None and name not in ("epochs", "lr") and value != saved[name]:
            option = "--" + name.replace("_", "-")
            raise InputError(
                f"{option} is {value}, but {given.resume} was trained with {saved[name]}: "
                f"leave {option} out to go on with it, or start a new run without --resume"
            )
        values[name] = value
    if saved is None and given.lr is None:
        values["lr"] = _LEARNING_RATES[values.get("optimizer", DigitsConfig.optimizer)]
    return DigitsConfig(**values)


def main(namespace: argparse.Namespace) -> int:
    """Run the recipe on this rank. Collective: every rank of the job calls it with the same options.

    Returns:
        0; or 2, on every rank, where the options cannot be used with each other or with the checkpoint
        that they name: rank 0 has then said so in one line on stderr.

    Raises:
        LockstepError: the ranks could not meet, or one of them failed.
    """
    from lockstep.recipes.digits_training import run  # torch, and everything else that takes its time

    return run(namespace)


def _check_extras() -> None:
    missing = [package for module, package in _EXTRAS.items() if find_spec(module) is None]
    if missing:
        raise SetupError(
            f"the digits recipe needs {' and '.join(missing)}, not installed here: pip install 'torch-lockstep[train]'"
        )


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; give {least} or more")
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is out of range; give a number above 0")
    return value


def _name(text: str) -> str:
    if not text or text in (".", "..") or "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no folder name; use --out to choose where runs are kept")
    return text


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is nothing at {text!r}; give a run's folder or a checkpoint file")
    return path


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="lockstep train digits", description="Train a CNN on handwritten digits.")
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
