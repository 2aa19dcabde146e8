"""What a run leaves behind: its folder, `metrics.jsonl`, TensorBoard scalars and `curves.png`.

`metrics.jsonl` holds one JSON object per line, each with a "kind":

    run       first line, and one more each time that the run goes on: configuration, environment, number of ranks
    step      one optimizer step (`StepReport`)
    epoch     one epoch (`EpochReport`), its evaluation under held_out_…
    note      a line that a person has seen, such as that the run was stopped early
    result    last line of a finished run

Lines are only ever appended, and whole lines at that, so a run that was killed can be read. A run that goes on in its
folder first drops the lines of what it does again, in one step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

import lockstep
from lockstep.errors import InputError
from lockstep.rank_zero import on_rank_zero
from lockstep.recipes.curves import draw_curves
from lockstep.recipes.options import DEFAULT_OUT
from lockstep.recipes.summary import Summary
from lockstep.train import EpochReport, Report

__all__ = ["RunLog", "create_run_folder", "describe_environment", "find_run", "folder_of_run", "read_metrics"]

METRICS = "metrics.jsonl"
CURVES = "curves.png"
_LARGEST = 1e300

Record = dict[str, Any]


def create_run_folder(out: Path, name: str) -> Path:
    """Make a new folder `out/name`, or `out/name-2`, `out/name-3`, … where that exists.

    Collective: rank 0 makes it, every rank gets its path.

    Raises:
        InputError: it cannot be made.
    """

    def create() -> str:
        number = 1
        while True:
            folder = out / (name if number == 1 else f"{name}-{number}")
            try:
                out.mkdir(parents=True, exist_ok=True)
                folder.mkdir()
                return str(folder)
            except FileExistsError:
                if not folder.exists():  # it is `out` that is no folder
                    raise InputError(f"cannot keep runs in {out}: it is a file; choose another --out") from None
                number += 1
            except OSError as error:
                raise InputError(f"cannot make {folder}: {error.strerror}; choose another --out") from error

    return Path(on_rank_zero(create))


def folder_of_run(options: argparse.Namespace, recipe: str) -> Path:
    """The folder of the run that goes on, unless a place for a new one was named; else a new one. Collective.

    Args:
        options: those of `lockstep.recipes.options.add_run_options`.
        recipe: the name of runs that are given none.

    Raises:
        InputError: it cannot be made.
    """
    resumed = None if options.resume is None else find_run(options.resume)
    if resumed is not None and options.name is None and options.out is None:
        return resumed
    return create_run_folder(options.out or DEFAULT_OUT, options.name or recipe)


def describe_environment() -> Record:
    """Versions and hardware, for the record of a run. Local."""
    return {
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch.get_num_threads(),
    }


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a `metrics.jsonl`; a last line that was cut off is left out. Local.

    Raises:
        InputError: a line is no record; names it.
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
        raise InputError(f"{place}: {line[:60].strip()!r} is no record of a run; remove the line, or resume elsewhere")
    return dict(record)


def _are_numbers(record: Record) -> bool:
    """Whether the values of a step or an epoch are those of its report, which has numbers alone."""
    are_plain = all(
        value is None or (isinstance(value, int | float) and abs(value) <= _LARGEST)
        for name, value in record.items()
        if name != "kind"
    )
    return are_plain and all(
        type(record.get(name)) is int and 0 <= record[name] < 1 << 62 for name in ("step", "epoch")
    )


class RunLog:
    """Writes the reports of a run as they come. For rank 0 alone; a context manager.

    Args:
        folder: the run's folder.
        header: contents of the first line.
        resumed: the `--resume` path of a run that goes on. The steps and epochs of that one are copied, or stay
            where this is its folder, so that every log is the whole story.
        resumed_step: the last step to copy or to leave.
    """

    def __init__(
        self, folder: Path, header: Mapping[str, Any], *, resumed: Path | None = None, resumed_step: int = 0
    ) -> None:
        self.folder = folder
        earlier = None if resumed is None else find_run(resumed)
        goes_on = earlier is not None and earlier.samefile(folder)
        if goes_on:
            _drop_after(folder / METRICS, resumed_step)
        copied = list(read_metrics(earlier / METRICS)) if earlier is not None and not goes_on else []
        self._file = (folder / METRICS).open("a", encoding="utf-8")
        self._scalars = SummaryWriter(folder, purge_step=resumed_step + 1 if goes_on else None)
        self._append({"kind": "run", **header})
        for record in copied:
            if _is_of(record, resumed_step):
                self._enter(record)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._scalars.close()

    def __call__(self, report: Report) -> None:
        """Enter one report; a `Trainer` callback."""
        if isinstance(report, EpochReport):
            values = asdict(report)
            held_out = {f"held_out_{name}": value for name, value in values.pop("evaluation").items()}
            self._enter({"kind": "epoch", **values, **held_out})
        else:
            self._enter({"kind": "step", **asdict(report)})

    def say(self, line: str) -> None:
        """Enter a line that people see."""
        self._append({"kind": "note", "text": line})

    def stop(self, why: str) -> None:
        """The run ends before its last epoch."""
        self.say(why)

    def finish(self, summary: Summary) -> None:
        """Enter what the run came to, and draw its curves."""
        self._append({"kind": "result", **summary.as_dict()})
        title = f"{self.folder.name}: {len(summary.ranks)} {'rank' if len(summary.ranks) == 1 else 'ranks'}"
        draw_curves(read_metrics(self.folder / METRICS), self.folder / CURVES, title)

    def _enter(self, record: Record) -> None:
        """One line, and its numbers as scalars."""
        self._append(record)
        names = {
            "step": {"loss": "train/loss", "lr": "train/lr", "samples_per_s": "train/samples_per_s"},
            "epoch": {
                "held_out_loss": "held_out/loss",
                "held_out_accuracy": "held_out/accuracy",
                "held_out_top5": "held_out/top5",
            },
        }[record["kind"]]
        for key, tag in names.items():
            if isinstance(record.get(key), int | float):
                self._scalars.add_scalar(tag, record[key], record["step"])

    def _append(self, record: Record) -> None:
        # JSON has no nan and no infinity; a diverged loss becomes null.
        finite = {name: None if _is_no_number(value) else value for name, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()


def _is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def find_run(resumed: Path) -> Path | None:
    """The folder of the run that a `--resume` path (run, checkpoint folder or file) belongs to. Local."""
    for folder in (resumed, resumed.parent, resumed.parent.parent):
        if (folder / METRICS).is_file():
            return folder
    return None


def _is_of(record: Record, last_step: int) -> bool:
    """Whether it is a step or an epoch that was over by then."""
    return record["kind"] in ("step", "epoch") and bool(record["step"] <= last_step)


def _drop_after(path: Path, last_step: int) -> None:
    """Leave out of a `metrics.jsonl` what came after a step, and what it came to."""
    kept = [record for record in read_metrics(path) if record["kind"] == "run" or _is_of(record, last_step)]
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(draft, path)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
