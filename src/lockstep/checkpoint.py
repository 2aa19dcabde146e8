"""Checkpoints that survive a kill at any moment, in one folder that keeps the last few.

A checkpoint is one file, and its name says when it was taken and what it must contain::

    runs/digits/checkpoints/
        step-00000438-5f0ce1d2a9b3c487.pt      step, then the first 16 hex digits of its SHA-256
        step-00000460-97c1e0a4be55d210.pt

The checksum is part of the name, as in torch.hub's files, so that one rename publishes contents and checksum together;
a separate checksum file could get lost between the two. Writing means: hidden temporary file, fsync, rename, fsync of
the folder. So a file with a final name is complete, whenever the process is killed. `load` verifies it nevertheless,
since disks fail too, and falls back to the newest good one.

[Note: going back] A folder belongs to one run, whose step number only grows. A run that loads an earlier step and
continues from there, or that starts over in a folder that is not empty, finds checkpoints of later steps. They belong
to another history: `load` must not take them for this run's newest, and they must not push this run's own files out of
the `keep` newest. So `save` renames them to `abandoned-step-....pt`, with a warning. Nothing is lost: they can still be
loaded by name. They are renamed before the new file appears, so that after a kill in between the newest checkpoint is
the one that the run went back to.

Files are ordinary `torch.save` archives that `torch.load(..., weights_only=True)` reads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import os
import random
import re
import struct
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep import seeding
from lockstep.agreement import collective_device
from lockstep.errors import CheckpointError, CheckpointNotWritten, CollectiveMismatch, InputError, InputTypeError
from lockstep.log import get_logger
from lockstep.rank_zero import on_rank_zero

__all__ = ["available", "check_folder", "gather_rng", "load", "restore_rng", "save"]

State = dict[str, Any]

_NAME = re.compile(r"step-(?P<step>\d{8,})-(?P<checksum>[0-9a-f]{16})\.pt")
_ZIP_MAGIC = b"PK\x03\x04"  # without it, torch.load expects the format from before torch 1.6
_TEMPORARY = ".writing-"
_ABANDONED = "abandoned-"
# Types that `torch.load(weights_only=True)` reads back, besides tensors; exact types, since a subclass would need an
# import, which it refuses.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def save(folder: str | os.PathLike[str], state: State, *, step: int, keep: int = 3) -> Path:
    """Write `state` as the checkpoint of `step`, and delete all but the newest `keep`.

    Collective: every rank calls it, and only rank 0 writes. All ranks return once the file is on disk, or all raise
    if it could not be written.

    Checkpoints of later steps are left over from before this run went back to an earlier step: they are renamed, with
    a warning, and no longer loaded or counted. See [Note: going back].

    Args:
        folder: this run's checkpoint folder, not shared with other runs; created if it does not exist.
        state: nested dicts and lists of tensors, numbers and strings; NumPy numbers are stored as Python's, which a
            safe load can read. Only rank 0's is used.
        step: number of the checkpoint, usually the optimizer step; at least 0.
        keep: how many checkpoints to keep in the folder; at least 1.

    Returns:
        The path of the new file, the same on every rank.

    Raises:
        InputTypeError: `state` contains an object that a safe load would refuse; says where.
        InputError: `step` or `keep` is out of range.
        CheckpointNotWritten: rank 0 could not write (disk full, for example); an OSError that names the folder.
        CollectiveMismatch: this rank's `step` differs from rank 0's, which numbers the file.
    """
    if not isinstance(step, int | np.integer) or step < 0:
        raise InputError(f"checkpoint.save: step is {step!r}; expected an integer, 0 or more")
    if not isinstance(keep, int | np.integer) or keep < 1:
        raise InputError(
            f"checkpoint.save: keep is {keep!r}; expected an integer of at least 1, or the new file would be deleted"
        )
    final = Path(on_rank_zero(lambda: str(_write(Path(folder), state, step, keep))))
    _check_alike(final, Path(folder), step)
    return final


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Create the folder if necessary, and check before training that a checkpoint can be written there.

    Collective: every rank calls it; only rank 0 touches the folder.

    Raises:
        CheckpointNotWritten: rank 0 cannot write there; an OSError that says why, and names the folder.
    """
    on_rank_zero(lambda: _try(Path(folder)))


def load(path: str | os.PathLike[str], *, map_location: str | torch.device = "cpu") -> State:
    """Read and verify a checkpoint.

    Collective if there is a process group: rank 0 picks the file, and every rank reads and verifies it. Without one, it
    just reads.

    Args:
        path: a folder that `save` wrote to, or a run's folder, which contains a `checkpoints` folder: its newest good
            checkpoint is loaded. Or a single file, which is loaded without falling back to others.
        map_location: the device to load tensors to.

    Returns:
        The state as saved, on every rank.

    Raises:
        CheckpointError: there is no checkpoint, or no good one; names what was found and what is wrong with it.
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
    """The state of the process-wide generators of every rank, to be saved. Collective: every rank calls it.

    Returns:
        `{"cpu": uint8 [world_size, 5056], "numpy": uint8 [world_size, 2512], "random": uint8 [world_size, 2512]}`:
        those of torch, `np.random` and `random`; plus `"cuda"`, of the current GPU, if GPUs are in use.
    """
    states = {"cpu": torch.get_rng_state(), "numpy": _numpy_state(), "random": _python_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return {kind: torch.stack(_all_gather(state)) for kind, state in states.items()}


def restore_rng(states: Mapping[str, torch.Tensor]) -> None:
    """Restore this rank's generators, before or after the model is wrapped. Local.

    A rank that did not exist when the states were saved (the run resumes with more ranks) keeps its current states.

    Raises:
        InputTypeError: `states` is not what `gather_rng` returned.
    """
    if not isinstance(states, Mapping) or "cpu" not in states:
        raise InputTypeError(f"restore_rng: expected what gather_rng() returned, got {type(states).__name__}")
    seeding.begin_rank_streams_of_engine()  # otherwise an engine that is created later would leave the restored streams
    rank = _own_rank()
    own = {kind: of_ranks[rank].cpu().clone() for kind, of_ranks in states.items() if rank < len(of_ranks)}
    if "cpu" in own:
        torch.set_rng_state(own["cpu"])
    if "numpy" in own:  # older checkpoints have torch's only
        _restore_numpy(own["numpy"])
    if "random" in own:
        _restore_python(own["random"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])


# Both are Mersenne Twisters: their numbers, position, and the second normal number of a pair, if there is one.
_TWISTER = struct.Struct("=625Iid")


def _numpy_state() -> torch.Tensor:
    """The state of `np.random`; of another generator than a Mersenne Twister only that it was another."""
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return _packed(*[0] * 626, 0.0)
    return _packed(*state["state"]["key"].tolist(), state["state"]["pos"], state["has_gauss"], state["gauss"])


def _restore_numpy(packed: torch.Tensor) -> None:
    *key, position, has_gauss, gauss = _TWISTER.unpack(packed.numpy().tobytes())
    if any(key):
        np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, gauss))


def _python_state() -> torch.Tensor:
    _, numbers, second = random.getstate()
    return _packed(*numbers, second is not None, second or 0.0)


def _restore_python(packed: torch.Tensor) -> None:
    *numbers, has_second, second = _TWISTER.unpack(packed.numpy().tobytes())
    random.setstate((random.Random.VERSION, tuple(numbers), second if has_second else None))


def _packed(*values: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(_TWISTER.pack(*values)), dtype=torch.uint8)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _HashingWriter:
    """A file that `torch.save` writes sequentially, hashed on the fly, without a second copy in memory."""

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
    """Create a folder to write to. Errors of the operating system become one that names the folder."""
    doing = "make"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        doing = "write to"
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch's error for a failed write
        if not isinstance(cause, OSError):
            raise
        reason = cause.strerror or str(cause)
        said = CheckpointNotWritten(f"checkpoint.save: rank 0 cannot {doing} {folder}: {reason}; choose another folder")
        said.errno = cause.errno
        raise said from None


def _check_alike(final: Path, folder: Path, step: int) -> None:
    """Compare this rank's step and folder with the file that rank 0 has written."""
    rank = _own_rank()
    if step != _step_of(final):
        raise CollectiveMismatch(
            f"checkpoint.save: rank {rank} saves step {step}, but rank 0 has written step {_step_of(final)}: the "
            "ranks are not at the same step. Look for a branch that only some ranks take, or a loop that some leave "
            "earlier",
            (rank,),
        )
    if folder.resolve() != final.parent.resolve():
        get_logger(__name__).warning(
            "checkpoint.save: rank %d passed the folder %s, but rank 0, which alone writes, %s: this rank's state is "
            "not saved. Gather it, or choose one folder for all ranks, with lockstep.rank_zero.on_rank_zero",
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
        if leftover.name.startswith(_TEMPORARY):  # from a killed writer: there is one writer per folder
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
    raise CheckpointError(f"no intact checkpoint in {folder}: {'; '.join(problems)}. Restore the folder from a copy")


def _problem(path: Path) -> str:
    """Why `path` must not be loaded; empty if its contents match the checksum in its name."""
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
    """Step and checksum from the name of a checkpoint, abandoned ones included."""
    return _NAME.fullmatch(path.name.removeprefix(_ABANDONED))


def _step_of(path: Path) -> int:
    match = _parse(path)
    assert match is not None, path
    return int(match["step"])


def _alternatives(path: Path) -> str:
    """The good checkpoints in the folder of a bad one, as the end of a message."""
    good = [entry.name for entry in available(path.parent) if entry != path and not _problem(entry)]
    return f". Intact ones next to it: {', '.join(good)}" if good else ""


def _loadable(value: Any, place: str) -> Any:
    """`value` in a form that can be loaded; unchanged, except for NumPy numbers and their containers.

    Values that could not be loaded are refused when saving: a checkpoint that cannot be read is worse than none.
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
    """`_loadable` for a dict of one of the types that a safe load reads."""
    changed = {}
    for key, item in value.items():
        if type(key) not in (str, int, float, bool, type(None)):
            raise InputTypeError(f"checkpoint.save: {place} has a key of type {type(key).__name__}: {key!r}")
        loadable = _loadable(item, f"{place}[{key!r}]")
        if loadable is not item:
            changed[key] = loadable
    if not changed:
        return value
    stored = copy.copy(value)  # keeps the `_metadata` of a module's state
    for key, item in changed.items():  # Counter.update would add
        stored[key] = item
    return stored


@functools.cache
def _loads_counters() -> bool:
    """Whether this version of torch reads back the milestones of its own MultiStepLR."""
    file = io.BytesIO()
    torch.save(Counter(), file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except UnpicklingError:
        return False
    return True


def _all_gather(state: torch.Tensor) -> list[torch.Tensor]:
    """`state` (uint8, same shape on all ranks) of every rank, in order; only this rank's without a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return [state]
    state = state.to(collective_device())
    gathered = [torch.empty_like(state) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, state)
    return [each.cpu() for each in gathered]


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable where folders can be opened, which excludes Windows."""
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
    with contextlib.suppress(OSError):  # deleted after it was listed
        return path.stat().st_mtime_ns
    return 0


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
