"""The files of an ImageFolder: listed once, by rank 0, kept beside the runs, and handed to all ranks.

A folder of 1.3 million files takes a while to list, and a file system that many hosts share takes longer when all
ranks list it at once. So rank 0 lists, in one pass that asks the system for nothing but names, and broadcasts; a file
of numpy arrays keeps the listing for the next run.

[Note: checked] Files that come or go change the time of the folder they are in. A listing is used again only if each
folder that was listed has the time that it had, and if all of these times were some seconds old when they were read: a
folder may change twice within a tick of its clock (git calls such entries racy). Checking asks for the times of a
thousand folders, not of a million files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lockstep.agreement import collective_device
from lockstep.errors import DataError
from lockstep.rank_zero import on_rank_zero

__all__ = ["EXTENSIONS", "Listing", "list_part", "scan_folder"]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_T = TypeVar("_T", np.uint8, np.int64)
_SETTLED_NS = 2_000_000_000
_VERSION = 1


@dataclass(frozen=True)
class Listing:
    """The images of train/ or val/.

    Paths lie in one array of bytes, not in a million Python strings: what a process that loads images inherits is not
    copied when their reference counts change.

    Attributes:
        root: the folder listed.
        classes: names of the class folders, sorted; a label is a place in here.
        names: uint8; the paths below `root`, one after the other, as the file system spells them.
        ends: int64 [n]; where each path ends in `names`.
        labels: int64 [n].
        seconds: that the listing took; 0 where it was found in a file.
    """

    root: Path
    classes: tuple[str, ...]
    names: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.labels)

    def relabelled(self, labels: Sequence[int], classes: tuple[str, ...]) -> Listing:
        """The same images with other labels: those of class k become `labels[k]`, a place in `classes`."""
        return replace(self, classes=classes, labels=np.array(labels, dtype=np.int64)[self.labels])

    def path(self, index: int) -> Path:
        """Where image `index` lies."""
        begin = self.ends[index - 1] if index else 0
        return self.root / os.fsdecode(self.names[begin : self.ends[index]].tobytes())


def list_part(folder: Path, part: str, kept_in: Path) -> Listing:
    """The images in `folder/part`. Collective: rank 0 lists them, or finds its last listing unchanged.

    Args:
        folder: of the images; every rank sees it under this path.
        part: "train" or "val".
        kept_in: folder for listings; made if it is not there.

    Raises:
        DataError: there is no such folder, or no class folder in it, or an empty one; on every rank.
    """
    root = folder / part
    found: list[Listing] = []

    def find() -> str:
        found.append(_find(root, folder, kept_in))
        (one,) = found
        return json.dumps([list(one.classes), len(one.names), len(one), one.seconds])

    classes, num_bytes, length, seconds = json.loads(on_rank_zero(find))
    own = found[0] if found else None
    names = _broadcast(np.empty(num_bytes, dtype=np.uint8) if own is None else own.names)
    ends = _broadcast(np.empty(length, dtype=np.int64) if own is None else own.ends)
    labels = _broadcast(np.empty(length, dtype=np.int64) if own is None else own.labels)
    return Listing(root, tuple(classes), names, ends, labels, seconds)


def scan_folder(root: Path) -> tuple[Listing, list[tuple[str, int]]]:
    """List the images below the class folders of `root`. Local.

    Returns:
        The listing, and each folder that was looked into, with its time in nanoseconds.

    Raises:
        DataError: no class folder, or one without an image; names it.
    """
    started = time.perf_counter()
    folders = [(str(root), os.stat(root).st_mtime_ns)]
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    if not classes:
        raise DataError(f"{root} has no class folders: expected a folder for each class, with its images inside")
    names, labels = bytearray(), []
    ends: list[int] = []
    for label, name in enumerate(classes):
        before = len(ends)
        for path in sorted(_images(os.path.join(root, name), name, folders, ())):
            names += os.fsencode(path)
            ends.append(len(names))
        if len(ends) == before:
            raise DataError(
                f"{root / name} has no images: expected files that end in {', '.join(EXTENSIONS)}. Put some there, or "
                "remove the folder if there is no such class"
            )
        labels.append(np.full(len(ends) - before, label, dtype=np.int64))
    listing = Listing(
        root,
        tuple(classes),
        np.frombuffer(bytes(names), dtype=np.uint8),
        np.array(ends, dtype=np.int64),
        np.concatenate(labels),
        time.perf_counter() - started,
    )
    return listing, folders


def _images(
    folder: str, below: str, folders: list[tuple[str, int]], above: tuple[tuple[int, int], ...]
) -> Iterator[str]:
    """Paths below the root of the images in a folder and in those inside it."""
    status = os.stat(folder)
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise DataError(f"{folder} leads back to a folder that it is in: remove the link")
    folders.append((folder, status.st_mtime_ns))
    with os.scandir(folder) as entries:
        for entry in entries:
            # The ending first: for most entries nothing else is looked at.
            if entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith("."):
                yield f"{below}/{entry.name}"
            elif entry.is_dir():
                yield from _images(entry.path, f"{below}/{entry.name}", folders, (*above, identity))


def _find(root: Path, folder: Path, kept_in: Path) -> Listing:
    """Rank 0's part of `list_part`."""
    if not root.is_dir():
        inside = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())[:5] if folder.is_dir() else None
        there = "there is no such folder" if inside is None else f"in it: {', '.join(inside) or 'no folder'}"
        raise DataError(
            f"{folder}/{root.name} is missing: {folder} must hold train/ and val/, with a folder for each class in "
            f"both ({there})"
        )
    absolute = os.path.realpath(root)
    digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
    kept = kept_in / f"{root.name}-{digest}.npz"
    listing = _read(kept, root)
    if listing is not None:
        return listing
    listed_ns = time.time_ns()
    listing, folders = scan_folder(root)
    with contextlib.suppress(OSError):  # a listing that cannot be kept is made again
        _write(kept, listing, folders, listed_ns)
    return listing


def _write(path: Path, listing: Listing, folders: Sequence[tuple[str, int]], listed_ns: int) -> None:
    header = {
        "version": _VERSION,
        "classes": listing.classes,
        "listed_ns": listed_ns,
        "folders": folders,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".writing-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            np.savez(
                file,
                header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
                names=listing.names,
                ends=listing.ends,
                labels=listing.labels,
            )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, root: Path) -> Listing | None:
    """A kept listing that still holds; None where there is none. See [Note: checked]."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            classes = _classes_if_unchanged(arrays["header"].tobytes())
            if classes is None:
                return None
            listing = Listing(root, classes, arrays["names"], arrays["ends"], arrays["labels"])
    except Exception:  # None, cut off or damaged, of which zip files and numpy say many things: it is made again.
        return None
    return listing if _is_whole(listing) else None


def _classes_if_unchanged(text: bytes) -> tuple[str, ...] | None:
    """The classes, by the header of a kept listing; None where it does not hold any more, or is none.

    Raises:
        ValueError, RecursionError: it is no JSON.
    """
    match json.loads(text):
        case {"version": int(version), "classes": list(classes), "listed_ns": int(listed_ns), "folders": list(folders)}:
            is_typed = all(isinstance(name, str) for name in classes) and all(
                isinstance(one, list) and [type(part) for part in one] == [str, int] for one in folders
            )
            if version == _VERSION and is_typed and _unchanged(folders, listed_ns):
                return tuple(classes)
    return None


def _is_whole(listing: Listing) -> bool:
    """Whether the arrays are such as `scan_folder` makes."""
    names, ends, labels = listing.names, listing.ends, listing.labels
    is_typed = [array.dtype for array in (names, ends, labels)] == [np.uint8, np.int64, np.int64]
    if not is_typed or names.ndim != 1 or ends.ndim != 1 or ends.shape != labels.shape or len(ends) == 0:
        return False
    is_ordered = ends[0] > 0 and ends[-1] == len(names) and bool(np.all(ends[1:] > ends[:-1]))
    return is_ordered and bool(labels.min() >= 0) and bool(labels.max() < len(listing.classes))


def _unchanged(folders: Sequence[tuple[str, int]], listed_ns: int) -> bool:
    try:
        return all(
            changed_ns < listed_ns - _SETTLED_NS and os.stat(folder).st_mtime_ns == changed_ns
            for folder, changed_ns in folders
        )
    except (OSError, ValueError):  # gone; or no name of a folder
        return False


def _broadcast(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Rank 0's array on every rank, which brings one of that size."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return array
    # A copy, because what numpy has read may not be written.
    tensor = torch.tensor(array).to(collective_device())
    dist.broadcast(tensor, src=0)
    together: npt.NDArray[_T] = tensor.cpu().numpy()
    return together
