"""Lists the files of an ImageFolder: once, by rank 0, which stores the listing and broadcasts it.

A folder of 1.3 million files takes a while to list, and a file system that many hosts share takes longer when all
ranks list it at once. So rank 0 lists it, in one pass that reads names only, and broadcasts; a file of numpy arrays
stores the listing for the next run.

[Note: checked] Adding or removing a file changes the mtime of its folder. A stored listing is used only if each listed
folder still has the same mtime, and if all of these were some seconds old when they were read: a
folder may change twice within a tick of the clock (git calls such entries racy). Checking reads the mtimes of a
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

    Paths are in one array of bytes, not in a million Python strings, so that memory which loader workers inherit is not
    copied when reference counts change.

    Attributes:
        root: the folder listed.
        classes: sorted names of the class folders; a label is an index into these.
        names: uint8; the concatenated paths below `root`, in the encoding of the file system.
        ends: int64 [n]; the end of each path in `names`.
        labels: int64 [n].
        seconds: time that listing took; 0 if it was read from a file.
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
        """The same images with other labels: label k becomes `labels[k]`, an index into `classes`."""
        return replace(self, classes=classes, labels=np.array(labels, dtype=np.int64)[self.labels])

    def path(self, index: int) -> Path:
        """The path of image `index`."""
        begin = self.ends[index - 1] if index else 0
        return self.root / os.fsdecode(self.names[begin : self.ends[index]].tobytes())


def list_part(folder: Path, part: str, kept_in: Path) -> Listing:
    """List the images in `folder/part`. Collective; rank 0 lists them, or uses a stored listing.

    Args:
        folder: folder of the images; has this path on every rank.
        part: "train" or "val".
        kept_in: folder for stored listings; created if missing.

    Raises:
        DataError: on every rank, if the folder is missing, has no class folders, or one of these is empty.
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
        The listing, and each folder that was read, with its mtime in nanoseconds.

    Raises:
        DataError: there is no class folder, or one without images, which is named.
    """
    started = time.perf_counter()
    folders = [(str(root), os.stat(root).st_mtime_ns)]
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    if not classes:
        raise DataError(f"{root} has no class folders: expected a folder per class, with its images inside")
    names, labels = bytearray(), []
    ends: list[int] = []
    for label, name in enumerate(classes):
        before = len(ends)
        for path in sorted(_images(os.path.join(root, name), name, folders, ())):
            names += os.fsencode(path)
            ends.append(len(names))
        if len(ends) == before:
            raise DataError(
                f"{root / name} has no images: expected files that end in {', '.join(EXTENSIONS)}. Add some, or "
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
    """Paths, relative to the root, of the images in a folder and its subfolders."""
    status = os.stat(folder)
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise DataError(f"{folder} links to one of its parent folders: remove the link")
    folders.append((folder, status.st_mtime_ns))
    with os.scandir(folder) as entries:
        for entry in entries:
            # Check the extension first: it is enough for most entries.
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
            f"{folder}/{root.name} is missing: {folder} must have train/ and val/, with a folder per class in "
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
    with contextlib.suppress(OSError):  # if it cannot be stored, the next run lists again
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
    """A stored listing that is still valid; otherwise None. See [Note: checked]."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            classes = _classes_if_unchanged(arrays["header"].tobytes())
            if classes is None:
                return None
            listing = Listing(root, classes, arrays["names"], arrays["ends"], arrays["labels"])
    except Exception:  # Missing, truncated or damaged, for which zipfile and numpy raise many errors: list again.
        return None
    return listing if _is_whole(listing) else None


def _classes_if_unchanged(text: bytes) -> tuple[str, ...] | None:
    """The classes, from the header of a stored listing; None if it is invalid or outdated.

    Raises:
        ValueError, RecursionError: it is not JSON.
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
    """Whether the arrays are consistent, as `scan_folder` makes them."""
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
    except (OSError, ValueError):  # removed, or not a valid name
        return False


def _broadcast(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Broadcast rank 0's array; every rank passes one of the same size."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return array
    # A copy, because arrays that numpy has read may be read-only.
    tensor = torch.tensor(array).to(collective_device())
    dist.broadcast(tensor, src=0)
    together: npt.NDArray[_T] = tensor.cpu().numpy()
    return together
