"""The training and validation images of a run, and their loaders."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lockstep
from lockstep.errors import DataError
from lockstep.recipes.imagenet.images import DummyImages, FolderImages
from lockstep.recipes.imagenet.listing import list_part
from lockstep.recipes.imagenet.options import ImagenetConfig
from lockstep.recipes.options import DEFAULT_OUT
from lockstep.recipes.run_folder import find_run
from lockstep.world import World

__all__ = ["Images", "check_classes", "class_names_of", "make_loader", "open_images"]

_LISTINGS = ".listings"

Images = FolderImages | DummyImages


def open_images(options: argparse.Namespace, config: ImagenetConfig) -> tuple[tuple[Images, Images], list[str]]:
    """The training images, the validation images, and notes to print. Collective.

    Raises:
        DataError: they cannot be listed, or there are validation images of classes that are not trained.
    """
    if config.dummy:
        return (DummyImages("train", config.size), DummyImages("val", config.size)), ["noise instead of images"]
    kept_in = _beside_the_run(options) / _LISTINGS
    train, val = (list_part(options.data, part, kept_in) for part in ("train", "val"))
    unknown = sorted(set(val.classes) - set(train.classes))
    if unknown:
        raise DataError(f"{val.root / unknown[0]} is a class that {train.root} does not have")
    places = {name: label for label, name in enumerate(train.classes)}
    val = val.relabelled([places[name] for name in val.classes], train.classes)
    seconds = train.seconds + val.seconds
    how = f"listed in {seconds:.1f} s" if seconds else f"from the listing stored in {kept_in}"
    note = f"{options.data}: {len(train):,} training images, {len(val):,} held out, {len(train.classes):,} classes"
    images = (
        FolderImages(train, config.size, augment=True, skip_broken=options.skip_broken),
        FolderImages(val, config.size, augment=False, skip_broken=options.skip_broken),
    )
    return images, [f"{note}; {how}"]


def make_loader(
    options: argparse.Namespace, config: ImagenetConfig, images: Images, world: World, *, evaluation: bool
) -> lockstep.DataLoader[Any]:
    """A loader of this rank's part of each global batch; in order and without fillers for evaluation."""
    workers = -(-options.workers // world.local_world_size)  # per host, as in the reference example
    return lockstep.DataLoader(
        images,
        batch_size=config.batch_size,
        shuffle=not evaluation,
        seed=config.seed,
        evaluation=evaluation,
        num_workers=workers,
        persistent_workers=workers > 0,
        seed_global_rng=False,  # images have their own generator
        device=world.device if world.device.type == "cuda" else None,
    )


def check_classes(state: Mapping[str, Any], images: Images, path: Path) -> None:
    """Check that a checkpoint has these classes.

    Raises:
        DataError: it has others; names one.
    """
    saved, here = state["extra"]["classes"], class_names_of(images)
    if saved != here:
        gone = sorted(set(saved).symmetric_difference(here))
        raise DataError(
            f"{path} was trained on {len(saved)} classes, the data has {len(here)}; {gone[0]} is in only one of the two"
        )


def class_names_of(images: Images) -> list[str]:
    """Class names in the order of labels; empty for noise."""
    return list(images.listing.classes) if isinstance(images, FolderImages) else []


def _beside_the_run(options: argparse.Namespace) -> Path:
    """The folder of all runs."""
    resumed = None if options.resume is None else find_run(options.resume)
    out: Path | None = options.out
    return out or (DEFAULT_OUT if resumed is None else resumed.parent)
