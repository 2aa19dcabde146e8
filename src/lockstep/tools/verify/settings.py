"""The user's request, and the settings that each process receives through an environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep import env
from lockstep.tools.shared import read_settings

__all__ = [
    "HALVES",
    "IN_TURN",
    "JOINED",
    "OF_RANK_0",
    "ONE",
    "RANKS",
    "Changes",
    "Number",
    "Orders",
    "Verification",
    "VerifySettings",
]

# The three roles that a run of the script may have.
RANKS, ONE, HALVES = "ranks", "one", "halves"
# Number of a pass over a loader -> the indices of each of its batches. Under OF_RANK_0, the numbers of passes in which
# Lockstep's loaders yield rank 0's part.
Orders = dict[int, list[list[int]]]
OF_RANK_0 = -1
# A number in a script that is replaced: line, column, its text, and the new one.
Number = tuple[int, int, str, str]
# How one process is given the batches of the ranks' streams: one batch of each rank at a time, or one after the other.
JOINED, IN_TURN = "joined", "in turn"


@dataclass(frozen=True)
class Verification:
    """What to verify.

    Attributes:
        target: path of a script, or name of a module.
        args: arguments of the script, passed on unchanged.
        nproc: numbers of ranks to verify.
        steps: number of optimizer steps to compare.
        double: whether to compute in float64.
        is_module: whether `target` is a module.
        with_shims: whether scripts for Horovod, Apex and old releases of torch get Lockstep's shims.
        devices: when to simulate GPUs: "auto", if the script fails without, or ranks train independently; "cpu", never;
            "gpu", always.
    """

    target: str
    args: tuple[str, ...] = ()
    nproc: tuple[int, ...] = (2,)
    steps: int = 4
    double: bool = False
    is_module: bool = False
    with_shims: bool = True
    devices: str = "auto"


@dataclass(frozen=True)
class Changes:
    """What is changed in a script for one process, so that it starts alone, or with the batches of all ranks.

    Attributes:
        args: its arguments.
        numbers: numbers in its source that are replaced.
        replaces: the number of ranks that it may start although only the first one is run; 0 for none.
        argument: which occurrence of `replaces` in the arguments of the ranks is replaced by 1; -1 for none.
    """

    args: tuple[str, ...]
    numbers: tuple[Number, ...] = ()
    replaces: int = 0
    argument: int = -1


@dataclass(frozen=True)
class VerifySettings:
    """One run of the script.

    Attributes:
        role: `RANKS`, the run on N ranks; `ONE`, one process that starts each step from the ranks' state; `HALVES`, the
            same again, with every sum over a batch computed in two halves.
        world_size: N.
        steps: number of optimizer steps to record.
        folder: folder for records and states, including those of the ranks.
        double: whether to compute in float64.
        devices: number of simulated GPUs; 0 for none.
        keeper: pid of the process whose view of files the script gets, or 0; see `scratch.py`.
        time_first: whether samples are columns in batches that are as long as wide, and without a loader; None if
            unknown.
        padding: numbers that rows may be padded with besides 0 and -100, because many rows end with them.
        batch_sizes: batch sizes of the torch loaders created in one process, in order; None for the script's own.
        by_sample: whether the draws of a sample from torch's loaders depend only on its index.
        changes: what is changed in the script; for all ranks, nothing.
        local_rank_option: option with the local rank, put before the script's own arguments; empty for none.
        across: draws with several rows per sample have the first row of all samples, then the second, as for joined
            views; otherwise all rows of the first sample, then of the second, as for attention heads.
        most_steps: number of steps after which ranks end, because one of them is killed in a later step; 0 for none.
        moves: whether models that are evaluated without a loader return other numbers, to show what depends on them.
        target: the function of processes that the script starts as ranks, as seen in a run before; empty for none. Not
            read from the file, as another rank may already have written it in this run.
        streams: in one process, how it is given the batches of the ranks' streams; empty for its own batches.
    """

    role: str
    world_size: int
    steps: int
    folder: str
    double: bool = False
    devices: int = 0
    keeper: int = 0
    time_first: bool | None = None
    padding: tuple[int, ...] = ()
    batch_sizes: tuple[int | None, ...] = ()
    by_sample: bool = False
    changes: Changes = Changes(())
    local_rank_option: str = ""
    across: bool = False
    moves: bool = False
    target: str = ""
    most_steps: int = 0
    streams: str = ""

    @property
    def is_reference(self) -> bool:
        """Whether this is the one process that repeats the steps of the ranks."""
        return self.role != RANKS

    def file(self, *name: str | int) -> Path:
        """Path of a file through which processes of all runs exchange data.

        Args:
            name: "record", a role and a rank: what a process recorded; "state" and a step from 0: parameters, buffers,
                optimizers and random state of rank 0 at its beginning; "draws", a step and a rank: the rank's random
                numbers and samples; "stream", a pass, a number and a rank: a batch of a stream; "orders": the indices
                that loaders of the one process yield instead of their own; "target": the next run's `target`; "epoch",
                a number and "goes" or "stops": whether rank 0 records that epoch; "waits" and a rank: where it waits
                for others; "deadlock": that all do.
        """
        return Path(self.folder, "-".join(map(str, name)))

    def dump(self) -> str:
        """The text of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls) -> VerifySettings:
        """The settings of the run that this process belongs to; see `read_settings`."""
        values = read_settings(env.LOCKSTEP_VERIFY, "verify")
        return cls(**{**values, "batch_sizes": tuple(values["batch_sizes"]), "changes": Changes(**values["changes"])})
