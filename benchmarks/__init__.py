"""Measurements of Lockstep, each beside its peer in the same run.

Run them with `python -m benchmarks` (or `make bench`); `python -m benchmarks --help` lists the rest.

What measures is `lockstep.bench`, which `lockstep bench` uses as well. Here lie:

- `case_all_reduce`, `case_train_step`, `case_threads`, `case_sharded`, `case_horovod`, `case_startup`, `case_record`,
  `case_hosts`, `case_contention`, `case_decode`, `case_rows`, `case_epoch`, `case_listing`: what is measured.
- `lab`: those cases that depend on the number of cores, and the GPU checks, in eight minutes (`make lab`).
- `report`, `plots`: tables and pictures, generated from the JSON files and nothing else.
- `startup_scripts/`: the two scripts that `case_startup` starts.

`report` and `plots` do not import torch.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CASES", "REPOSITORY", "RESULTS"]

CASES = (
    "all_reduce",
    "train_step",
    "threads",
    "sharded",
    "horovod",
    "startup",
    "record",
    "hosts",
    "contention",
    "decode",
    "rows",
    "epoch",
    "listing",
)
"""The cases, in the order in which they run; each is a module `case_<name>`."""

REPOSITORY = Path(__file__).resolve().parent.parent
"""Root of the source tree; rank processes start there."""

RESULTS = REPOSITORY / "benchmarks" / "results"
"""Where full runs leave their results. Quick runs write below `build/`, which git ignores."""
