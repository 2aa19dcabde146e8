"""Checkpoints that survive a kill at any moment, in one folder that keeps the last few.

A checkpoint is one file, and its name says when it was taken and what it must contain::

    runs/digits/checkpoints/
        step-00000438-5f0ce1d2a9b3c487.pt      step, then the first 16 hex digits of its SHA-256
        step-00000460-97c1e0a4be55d210.pt

The checksum stands in the name, as in torch.hub's files, so that one rename publishes the
contents and their checksum together; a second file could be lost between the two. Writing
goes to a hidden temporary file, fsync, rename, fsync of the folder: whatever is killed, a
file with a final name is whole. `load` verifies it all the same, since disks fail too, and
falls back to the newest one that is good.

[Note: going back] A folder belongs to one run, whose steps go up. A run that loads the file of an earlier step and
trains on, or that starts anew in a folder that is not empty, leaves checkpoints of later steps behind. They are another
history: `load` must not take them for this run's newest, nor may they push this run's own files out of the `keep`
newest. So `save` renames them to `abandoned-step-....pt`, with a warning. Nothing is lost: they can still be loaded by
their names. They are renamed before the new file appears, so a kill in between leaves the checkpoint that the run
went back to as the newest.

Files are ordinary `torch.save` archives that `torch.load(..., weights_only=True)` reads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import os
import re
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.agreement import collective_device
from lockstep.errors import CheckpointError, CheckpointNotWritten, CollectiveMismatch, InputError, InputTypeError
from lockstep.log import get_logger
from lockstep.rank_zero import on_rank_zero

__all__ = ["available", "check_folder", "gather_rng", "load", "restore_rng", "save"]

State = dict[str, Any]

_NAME = re.compile(r"step-(?P<step>\d{8,})-(?P<checksum>[0-9a-f]{16})\.pt")
_ZIP_MAGIC = b"PK\x03\x04"  # without it, torch.load takes the file for one of torch before 1.6
_TEMPORARY = ".writing-"
_ABANDONED = "abandoned-"
# What `torch.load(weights_only=True)` reads back, besides tensors; exact types, since a subclass needs an import that
# it refuses.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def save(folder: str | os.PathLike[str], state: State, *, step: int, keep: int = 3) -> Path:
    """Write `state` as the checkpoint of `step`, and delete all but the newest `keep`.

    Collective: every rank calls it; rank 0 alone writes, and all return when the file is on
    disk, or raise together if it could not be written.

    Checkpoints of later steps are those of a run that was left when this one went back: they are
    renamed, with a warning, and neither loaded nor counted any more. See [Note: going back].

    Args:
        folder: where this run's checkpoints lie, and no other's; made if it is not there.
        state: nested dicts and lists of tensors, numbers and strings; NumPy's numbers are stored as Python's, which a
            safe load reads. Only rank 0's is used.
        step: what to number it by, usually the optimizer step; at least 0.
        keep: how many checkpoints to leave in the folder; at least 1.

    Returns:
        The path of the new file, the same on every rank.

    Raises:
        InputTypeError: `state` holds an object that a safe load would refuse; names its place.
        InputError: `step` or `keep` is out of range.
        CheckpointNotWritten: rank 0 could not write (the disk is full, say); an OSError that names the folder.
        CollectiveMismatch: this rank's `step` is not that of rank 0, by which the file is numbered.
    """
    if step < 0:
        raise InputError(f"checkpoint.save: step is {step}; expected 0 or more")
    if keep < 1:
        raise InputError(f"checkpoint.save: keep is {keep}; expected at least 1, or the new checkpoint would go too")
    final = Path(on_rank_zero(lambda: str(_write(Path(folder), state, step, keep))))
    _check_alike(final, Path(folder), step)
    return final


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Make the folder if it is not there, and find out whether a checkpoint can be written there, before a training.

    Collective: every rank calls it; rank 0 alone tries.

    Raises:
        CheckpointNotWritten: rank 0 cannot; an OSError that says why, and names the folder.
    """
    on_rank_zero(lambda: _try(Path(folder)))


def load(path: str | os.PathLike[str], *, map_location: str | torch.device = "cpu") -> State:
    """Read a checkpoint, verified.

    Collective where a process group exists: rank 0 picks the file, every rank reads and verifies
    that one. Alone, it just reads.

    Args:
        path: a folder that `save` wrote to, or the folder above a `checkpoints` folder (a run):
            its newest good checkpoint. Or one file: that one and no other.
        map_location: the device that tensors come back on.

    Returns:
        The state as saved, on every rank.

    Raises:
        CheckpointError: there is none, or none is whole; names what was found and what is wrong.
    """
    chosen = Path(on_rank_zero(lambda: str(_choose(Path(path)))))
    problem = _problem(chosen)
    if problem:
        raise CheckpointError(f"checkpoint {chosen} {problem}, though rank 0 could read it: do ranks share the folder?")
    try:
        state = torch.load(chosen, map_location=map_location, weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"checkpoint {chosen} cannot be read: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {chosen} holds a {type(state).__name__}; expected a dict, as `save` writes")
    return state


def available(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `folder`, newest first, unverified. Local."""
    found = [entry for entry in _entries(Path(folder)) if _NAME.fullmatch(entry.name)]
    return sorted(found, key=lambda entry: (_step_of(entry), _modified(entry)), reverse=True)


def gather_rng() -> State:
    """Every rank's random-number state, to be saved. Collective: every rank calls it.

    Returns:
        `{"cpu": uint8 (world_size, 5056)}`, with `"cuda"` beside it where GPUs are in use.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return {kind: torch.stack(_all_gather(state)) for kind, state in states.items()}


def restore_rng(states: Mapping[str, torch.Tensor]) -> None:
    """Take this rank's random-number state back. Local.

    A rank that was not there when the states were saved (the run resumes with more ranks) keeps
    the state it has.
    """
    rank = _own_rank()
    if rank < len(states["cpu"]):
        torch.set_rng_state(states["cpu"][rank].cpu().clone())  # it takes no view into a larger tensor
    if torch.cuda.is_available() and rank < len(states.get("cuda", ())):
        torch.cuda.set_rng_state(states["cuda"][rank].cpu().clone())


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _HashingWriter:
    """A file that `torch.save` writes to front to back, hashed on the way: no second copy in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder to write to. What the system refuses comes out as an error that names the folder."""
    doing = "make"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        doing = "write to"
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch, of a write that has failed
        if not isinstance(cause, OSError):
            raise
        reason = cause.strerror or str(cause)
        said = CheckpointNotWritten(f"checkpoint.save: rank 0 cannot {doing} {folder}: {reason}; choose another folder")
        said.errno = cause.errno
        raise said from None


def _check_alike(final: Path, folder: Path, step: int) -> None:
    """Compare what this rank gave with the file that rank 0 has written."""
    rank = _own_rank()
    if step != _step_of(final):
        raise CollectiveMismatch(
            f"checkpoint.save: rank {rank} saves step {step}, and rank 0 has written step {_step_of(final)}: the ranks "
            "are not at the same step. Look for a branch that only some ranks take, or a loop that some leave earlier",
            (rank,),
        )
    if folder.resolve() != final.parent.resolve():
        get_logger(__name__).warning(
            "checkpoint.save: rank %d gave the folder %s, and rank 0, which alone writes, %s: what this rank has is "
            "not saved. Gather it, or name one folder for all ranks, by lockstep.rank_zero.on_rank_zero",
            rank,
            folder,
            final.parent,
        )


def _try(folder: Path) -> str:
    """Rank 0's part of `check_folder`."""
    with _made(folder), tempfile.TemporaryFile(dir=folder):
        return ""


def _write(folder: Path, state: State, step: int, keep: int) -> Path:
    """Rank 0's part of `save`."""
    state = _loadable(state, "state")
    with _made(folder):
        return _write_into(folder, state, step, keep)


def _write_into(folder: Path, state: State, step: int, keep: int) -> Path:
    for leftover in _entries(folder):
        if leftover.name.startswith(_TEMPORARY):  # of a writer that was killed: there is one writer per folder
            leftover.unlink()
    temporary = folder / f"{_TEMPORARY}{os.getpid()}"
    try:
        with temporary.open("xb") as file:
            writer = _HashingWriter(file)
            torch.save(state, writer)  # type: ignore[arg-type]  # it needs no more than write and flush
            writer.flush()
            os.fsync(file.fileno())
        final = folder / f"step-{step:08d}-{writer.digest.hexdigest()[:16]}.pt"
        _set_later_ones_aside(folder, step)
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(folder)
    others = [entry for entry in available(folder) if entry != final]
    for old in others[keep - 1 :]:
        old.unlink(missing_ok=True)
    return final


def _set_later_ones_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints of steps after `step`. See [Note: going back]."""
    later = [entry for entry in available(folder) if _step_of(entry) > step]
    for entry in later:
        entry.replace(folder / f"{_ABANDONED}{entry.name}")
    if later:
        steps = f"step{'s' if len(later) > 1 else ''} {', '.join(str(_step_of(entry)) for entry in reversed(later))}"
        get_logger(__name__).warning(
            "checkpoint.save: step %d comes after %s in %s: the run went back, or another one used the folder. "
            "Those later checkpoints are renamed to %sstep-*.pt; delete them, or give each run a folder of its own",
            step,
            steps,
            folder,
            _ABANDONED,
        )


def _choose(path: Path) -> Path:
    """The file to load: the one named, or the newest good one of a folder."""
    if path.is_file():
        problem = _problem(path)
        if problem:
            raise CheckpointError(f"checkpoint {path} {problem}{_alternatives(path)}")
        if not _parse(path):
            get_logger(__name__).warning("checkpoint %s has no checksum in its name; it is loaded unverified", path)
        return path
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: there is no such file or folder")
    folder = path if available(path) else path / "checkpoints"
    candidates = available(folder)
    if not candidates:
        raise CheckpointError(f"no checkpoint in {path}: expected files named step-<step>-<checksum>.pt")
    problems = []
    for candidate in candidates:
        problem = _problem(candidate)
        if not problem:
            return candidate
        problems.append(f"{candidate.name} {problem}")
        get_logger(__name__).warning("checkpoint %s %s; falling back to the one before it", candidate, problem)
    raise CheckpointError(f"no whole checkpoint in {folder}: {'; '.join(problems)}. Restore the folder from a copy")


def _problem(path: Path) -> str:
    """Why `path` must not be loaded, or nothing if its bytes are those that its name promises."""
    match = _parse(path)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
                return "is damaged: it does not begin as a torch.save archive"
            file.seek(0)
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if match and digest.hexdigest()[:16] != match["checksum"]:
        return f"is damaged: SHA-256 begins {digest.hexdigest()[:16]}, its name says {match['checksum']}"
    return ""


def _parse(path: Path) -> re.Match[str] | None:
    """Step and checksum in the name of a checkpoint, an abandoned one too."""
    return _NAME.fullmatch(path.name.removeprefix(_ABANDONED))


def _step_of(path: Path) -> int:
    match = _parse(path)
    assert match is not None, path
    return int(match["step"])


def _alternatives(path: Path) -> str:
    """Good checkpoints beside a bad one, as the end of a message."""
    good = [entry.name for entry in available(path.parent) if entry != path and not _problem(entry)]
    return f". Whole ones beside it: {', '.join(good)}" if good else ""


def _loadable(value: Any, place: str) -> Any:
    """`value` as it can be loaded; itself, but for numbers of NumPy and what holds them.

    What could not be loaded is refused at saving: a checkpoint that nobody can read is worse than none.
    """
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.generic) and type(value.item()) in _PLAIN:  # a learning rate of np.cos, a mean loss
        return value.item()
    if type(value) in (dict, OrderedDict) or (type(value) is Counter and _loads_counters()):
        return _loadable_dict(value, place)
    if type(value) in (list, tuple, set):
        old = list(value)
        new = [_loadable(item, f"{place}[{index}]") for index, item in enumerate(old)]
        return type(value)(new) if any(after is not before for after, before in zip(new, old, strict=True)) else value
    raise InputTypeError(
        f"checkpoint.save: {place} is a {type(value).__module__}.{type(value).__qualname__}, which a safe load "
        "refuses; save tensors, numbers, strings, and dicts or lists of them"
    )


def _loadable_dict(value: dict[Any, Any], place: str) -> dict[Any, Any]:
    """`_loadable` of a dict, of one of the types that a safe load reads."""
    changed = {}
    for key, item in value.items():
        if type(key) not in (str, int, float, bool, type(None)):
            raise InputTypeError(f"checkpoint.save: {place} has a key of type {type(key).__name__}: {key!r}")
        loadable = _loadable(item, f"{place}[{key!r}]")
        if loadable is not item:
            changed[key] = loadable
    if not changed:
        return value
    stored = copy.copy(value)  # which keeps the `_metadata` of a module's state
    for key, item in changed.items():  # Counter.update would add
        stored[key] = item
    return stored


@functools.cache
def _loads_counters() -> bool:
    """Whether this torch reads back the milestones of its own MultiStepLR."""
    file = io.BytesIO()
    torch.save(Counter(), file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except UnpicklingError:
        return False
    return True


def _all_gather(state: torch.Tensor) -> list[torch.Tensor]:
    """`state` (uint8, one shape on all ranks) of every rank, in order; just this one without a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return [state]
    state = state.to(collective_device())
    gathered = [torch.empty_like(state) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, state)
    return [each.cpu() for each in gathered]


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where folders can be opened: not on Windows."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _modified(path: Path) -> int:
    with contextlib.suppress(OSError):  # deleted since it was listed
        return path.stat().st_mtime_ns
    return 0


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
