"""The folder of a run: a new one, or that of a resumed run, with its `metrics.jsonl`.

Needs no package of an extra, because `lockstep bench` uses such folders too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.rank_zero import on_rank_zero
from lockstep.recipes.options import DEFAULT_OUT

__all__ = ["CHECKPOINTS", "METRICS", "Record", "create_run_folder", "find_run", "folder_of_run", "read_metrics"]

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
_LARGEST = 1e300

Record = dict[str, Any]


def create_run_folder(out: Path, name: str) -> Path:
    """Create a new folder `out/name`, or, if that exists, `out/name-2`, `out/name-3`, ….

    Collective: rank 0 creates it, every rank gets its path.

    Raises:
        InputError: it cannot be created.
    """
    return Path(on_rank_zero(lambda: _create(out, name)))


def folder_of_run(options: argparse.Namespace, recipe: str) -> Path:
    """The folder of the resumed run, or a new one if there is none or `--name` or `--out` is given.

    Collective: rank 0 chooses it, every rank gets its path.

    Args:
        options: parsed options of `lockstep.recipes.options.add_run_options`.
        recipe: default name of runs.

    Raises:
        InputError: it cannot be created or written, or the `metrics.jsonl` of the resumed run cannot be read.
    """

    def choose() -> str:
        resumed = None if options.resume is None else find_run(options.resume)
        if resumed is not None:
            _check_metrics(resumed / METRICS)
            if options.name is None and options.out is None:
                _check_writable(resumed)
                return str(resumed)
        return _create(options.out or DEFAULT_OUT, options.name or recipe)

    return Path(on_rank_zero(choose))


def find_run(resumed: Path) -> Path | None:
    """The run folder of a `--resume` path, which is a run, checkpoint folder or file. Local."""
    for folder in (resumed, resumed.parent, resumed.parent.parent):
        if (folder / METRICS).is_file():
            return folder
    return None


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a `metrics.jsonl`; skips a truncated last line. Local.

    Raises:
        InputError: a line is not a record; quotes it.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                yield _parse(line, f"{path}, line {number}")


def _parse(line: str, place: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or (kind in ("step", "epoch") and not _are_numbers(record)):
        raise InputError(f"{place}: {line[:60].strip()!r} is not a record of a run; remove the line to resume")
    return dict(record)


def _are_numbers(record: Record) -> bool:
    """Whether all values of a step or an epoch are numbers, as in its report."""
    are_plain = all(
        value is None or (isinstance(value, int | float) and abs(value) <= _LARGEST)
        for name, value in record.items()
        if name != "kind"
    )
    return are_plain and all(
        type(record.get(name)) is int and 0 <= record[name] < 1 << 62 for name in ("step", "epoch")
    )


def _create(out: Path, name: str) -> str:
    number = 1
    while True:
        folder = out / (name if number == 1 else f"{name}-{number}")
        try:
            out.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            return str(folder)
        except FileExistsError:
            if not folder.exists():  # `out` itself is not a folder
                raise InputError(f"cannot keep runs in {out}: it is a file; choose another --out") from None
            number += 1
        except OSError as error:
            raise InputError(f"cannot create {folder}: {error.strerror}; choose another --out") from error


def _check_metrics(path: Path) -> None:
    """Find lines that are not records before training, which would copy them."""
    try:
        deque(read_metrics(path), maxlen=0)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def _check_writable(folder: Path) -> None:
    try:
        with (folder / METRICS).open("a", encoding="utf-8"):
            pass
        for each in (folder, folder / CHECKPOINTS):
            if each.exists():
                with tempfile.TemporaryFile(dir=each):
                    pass
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror}; resume in a new folder, with --name or --out"
        ) from error
