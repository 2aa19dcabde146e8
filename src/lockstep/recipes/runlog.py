"""Writes the files of a run folder: `metrics.jsonl`, TensorBoard scalars and `curves.png`.

`metrics.jsonl` holds one JSON object per line, each with a "kind":

    run       first line, and another after each resume: configuration, environment, number of ranks
    step      one optimizer step (`StepReport`)
    epoch     one epoch (`EpochReport`), with its evaluation as held_out_…
    note      a line shown to the user, such as that the run was stopped early
    result    last line of a finished run

Whole lines are appended, so the file is readable after a run was killed. A run that is resumed in
its folder first drops, atomically, the lines of steps that it repeats.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

import lockstep
from lockstep.recipes.curves import draw_curves
from lockstep.recipes.run_folder import METRICS, Record, find_run, read_metrics
from lockstep.recipes.summary import Summary
from lockstep.shm.processor import cpuinfo
from lockstep.train import EpochReport, Report

__all__ = ["RunLog", "describe_environment"]

CURVES = "curves.png"


def describe_environment() -> Record:
    """Versions and hardware, for the record of a run. Local."""
    return {
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpuinfo("model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch.get_num_threads(),
    }


class RunLog:
    """Writes the reports of a run as they arrive. For rank 0 only; a context manager.

    Args:
        folder: the run's folder.
        header: contents of the first line.
        resumed: the `--resume` path, if any. The steps and epochs of that run are copied, or kept if this is its
            folder, so that every log is complete.
        resumed_step: the last step to copy or keep.
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
        """Log a report; a `Trainer` callback."""
        if isinstance(report, EpochReport):
            values = asdict(report)
            held_out = {f"held_out_{name}": value for name, value in values.pop("evaluation").items()}
            self._enter({"kind": "epoch", **values, **held_out})
        else:
            self._enter({"kind": "step", **asdict(report)})

    def say(self, line: str) -> None:
        """Log a line shown to the user."""
        self._append({"kind": "note", "text": line})

    def stop(self, why: str) -> None:
        """Log that the run ends before its last epoch."""
        self.say(why)

    def finish(self, summary: Summary) -> None:
        """Log the results of the run, and plot its curves."""
        self._append({"kind": "result", **summary.as_dict()})
        title = f"{self.folder.name}: {len(summary.ranks)} {'rank' if len(summary.ranks) == 1 else 'ranks'}"
        draw_curves(read_metrics(self.folder / METRICS), self.folder / CURVES, title)

    def _enter(self, record: Record) -> None:
        """Write a line, and its numbers as scalars."""
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
        # JSON has neither nan nor infinity; a diverged loss becomes null.
        finite = {name: None if _is_no_number(value) else value for name, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()


def _is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_of(record: Record, last_step: int) -> bool:
    """Whether it is a step or an epoch that ended at or before `last_step`."""
    return record["kind"] in ("step", "epoch") and bool(record["step"] <= last_step)


def _drop_after(path: Path, last_step: int) -> None:
    """Remove from a `metrics.jsonl` everything after a step, and results."""
    kept = [record for record in read_metrics(path) if record["kind"] == "run" or _is_of(record, last_step)]
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(draft, path)
