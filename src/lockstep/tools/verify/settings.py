"""What the user asks for, and what the command tells every process of that, on its way through one variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep import env
from lockstep.tools.shared import read_settings

__all__ = ["ONE", "RANKS", "REVERSED", "Verification", "VerifySettings"]

# The three roles that a run of the script may have.
RANKS, ONE, REVERSED = "ranks", "one", "reversed"


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
        role: `RANKS`, the run on N ranks; `ONE`, one process that starts each step from what the ranks had; `REVERSED`,
            the same once more, with every sum over a batch added up from its end.
        world_size: N.
        steps: optimizer steps to record.
        folder: where records and states are written, and the ranks' are found.
        double: compute in float64.
        devices: stand-ins for GPUs; 0 for none.
        keeper: pid of the process as which the script sees files, or 0; see `scratch.py`.
        time_first: samples are columns of batches that are as long as wide; None where nobody knows.
        batch_sizes: of the loaders of torch that one process makes, in order; None for what the script says.
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

    @property
    def is_reference(self) -> bool:
        """Whether this is one process that takes the steps of the ranks."""
        return self.role != RANKS

    def record_file(self, rank: int, role: str | None = None) -> Path:
        """Where a process leaves what it recorded."""
        return Path(self.folder, f"{role or self.role}-{rank}.record")

    def state_file(self, step: int) -> Path:
        """Parameters, buffers, optimizers and random state of rank 0 at the beginning of a step, from 0."""
        return Path(self.folder, f"state-{step}")

    def draws_file(self, step: int, rank: int) -> Path:
        """The random numbers that a rank drew in a step."""
        return Path(self.folder, f"draws-{step}-{rank}")

    def keys_file(self) -> Path:
        """The samples of all ranks, for the one process: see `draws.py`."""
        return Path(self.folder, "ranks-keys")

    def epoch_file(self, number: int, word: str) -> Path:
        """That rank 0 has begun an epoch, and "goes" on to record or "stops"."""
        return Path(self.folder, f"epoch-{number}-{word}")

    def orders_file(self) -> Path:
        """The indices that loaders of the one process hand out, where not their own: see `orders.py`."""
        return Path(self.folder, "orders")

    def dump(self) -> str:
        """The text of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls) -> VerifySettings:
        """The settings of the run that this process belongs to; see `read_settings`."""
        values = read_settings(env.LOCKSTEP_VERIFY, "verify")
        return cls(**{**values, "batch_sizes": tuple(values["batch_sizes"])})
