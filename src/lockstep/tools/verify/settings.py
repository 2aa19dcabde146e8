"""What the user asks for, and what the command tells every process of that, on its way through one variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep import env
from lockstep.tools.shared import read_settings

__all__ = ["HALVES", "OF_RANK_0", "ONE", "RANKS", "Orders", "Verification", "VerifySettings"]

# The three roles that a run of the script may have.
RANKS, ONE, HALVES = "ranks", "one", "halves"
# For each pass over a loader, by its number, the indices of each batch; in the place of one, the passes in which
# Lockstep's loaders hand out what is rank 0's.
Orders = dict[int, list[list[int]]]
OF_RANK_0 = -1


@dataclass(frozen=True)
class Verification:
    """What to verify.

    Attributes:
        target: path of a script, or name of a module.
        args: arguments of the script, handed on untouched.
        nproc: numbers of ranks.
        steps: optimizer steps to compare.
        double: compute in float64.
        is_module: `target` is a module.
        with_shims: let scripts for Horovod, Apex and old releases of torch find Lockstep's shims.
        devices: "auto", stand-ins for GPUs where the script fails without, or ranks train apart; "cpu", never; "gpu",
            always.
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
class VerifySettings:
    """One run of the script.

    Attributes:
        role: `RANKS`, the run on N ranks; `ONE`, one process that starts each step from what the ranks had; `HALVES`,
            the same once more, with every sum over a batch added up in two halves.
        world_size: N.
        steps: optimizer steps to record.
        folder: where records and states are written, and the ranks' are found.
        double: compute in float64.
        devices: stand-ins for GPUs; 0 for none.
        keeper: pid of the process as which the script sees files, or 0; see `scratch.py`.
        time_first: samples are columns of batches that are as long as wide; None where nobody knows.
        batch_sizes: of the loaders of torch that one process makes, in order; None for what the script says.
        by_sample: what a sample of torch's loaders draws depends on its index alone.
        replaces: in one process, of which number of ranks the first that a script hands to them becomes 1; 0 for none.
        local_rank_option: for the local rank, which goes before the script's own arguments; empty for none.
        across: draws with several rows for each sample have first one for each, then the next, as those for views that
            are joined; else all of a sample, then those of the next, as those for the heads of attention.
    """

    role: str
    world_size: int
    steps: int
    folder: str
    double: bool = False
    devices: int = 0
    keeper: int = 0
    time_first: bool | None = None
    batch_sizes: tuple[int | None, ...] = ()
    by_sample: bool = False
    replaces: int = 0
    local_rank_option: str = ""
    across: bool = False

    @property
    def is_reference(self) -> bool:
        """Whether this is one process that takes the steps of the ranks."""
        return self.role != RANKS

    def file(self, *name: str | int) -> Path:
        """Where processes of all runs leave something, and find it.

        Args:
            name: "record", a role and a rank: what a process recorded; "state" and a step from 0: parameters, buffers,
                optimizers and random state of rank 0 at its beginning; "draws", a step and a rank: the random numbers
                that it drew, and its samples; "orders": the indices that loaders of the one process hand out, where not
                their own; "target": the function of processes that a script starts as ranks; "epoch", a number and a
                word: that rank 0 has begun it, and "goes" on to record or "stops".
        """
        return Path(self.folder, "-".join(map(str, name)))

    def dump(self) -> str:
        """The text of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls) -> VerifySettings:
        """The settings of the run that this process belongs to; see `read_settings`."""
        values = read_settings(env.LOCKSTEP_VERIFY, "verify")
        return cls(**{**values, "batch_sizes": tuple(values["batch_sizes"])})
