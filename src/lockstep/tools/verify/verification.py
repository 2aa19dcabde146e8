"""One verification, from the command line to the report."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import env
from lockstep.compat.legacy.choice import tell_ranks
from lockstep.errors import LaunchError
from lockstep.launch.config import LaunchConfig, check_target
from lockstep.launch.supervisor import launch_job
from lockstep.tools.verify.settings import HALVES, ONE, RANKS, VerifySettings

__all__ = ["Verification", "verify"]

# The first optimizer and the first DDP of a process import torch._dynamo.
_PRELOADED = ("torch._dynamo", "torch.nn.parallel", "lockstep.tools.verify.gradients", "lockstep.tools.verify.loaders")
_RANK_MODULE = "lockstep.tools.verify.rank"
# What a script says that cannot do without a GPU.
_ERROR = re.compile(r"[\w.]*(Error|Exception|Mismatch|Parameters|Lost|Timeout|Exit)\b.*: ")
_WANTS_GPU = ("cuda", "nccl", "nvidia", "gpu")


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
        devices: "auto", stand-ins for GPUs where the script fails without; "cpu", never; "gpu", always.
    """

    target: str
    args: tuple[str, ...] = ()
    nproc: tuple[int, ...] = (2,)
    steps: int = 4
    double: bool = False
    is_module: bool = False
    with_shims: bool = True
    devices: str = "auto"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context: what the launcher says goes nowhere; the report says what matters of it."""
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


class _Session:
    """The runs for one number of ranks.

    Args:
        what: to verify.
        world_size: that number.
        folder: for records and logs.
    """

    def __init__(self, what: Verification, world_size: int, folder: Path) -> None:
        self._what = what
        self._world_size = world_size
        self._folder = folder
        self._devices = 0
        if what.devices == "gpu":
            self._devices = world_size

    def start(self, role: str, batch_sizes: tuple[int | None, ...] = ()) -> tuple[int, VerifySettings]:
        """Run the script in a role; the exit code, and the settings under which its records are."""
        what = self._what
        settings = VerifySettings(
            role=role,
            world_size=self._world_size,
            steps=what.steps,
            folder=str(self._folder),
            double=what.double,
            devices=self._devices,
            batch_sizes=batch_sizes,
        )
        variables = env.snapshot()
        env.LOCKSTEP_VERIFY.set(settings.dump(), variables)
        env.CUDA_VISIBLE_DEVICES.set(",".join(map(str, range(self._devices))), variables)
        tell_ranks(variables, None if what.with_shims else False, what.target, what.is_module, what.args)
        config = LaunchConfig(
            target=_RANK_MODULE,
            args=(*(("-m",) if what.is_module else ()), what.target, *what.args),
            nproc=self._world_size if role == RANKS else 1,
            is_module=True,
            log_dir=str(self._folder / f"log-{role}"),
            environment=variables,
            on_end=lambda folder: None,
            warns_unjoined=False,
            forks=True,
        )
        with _quiet():
            return launch_job(config), settings

    def reference(self, role: str, batch_sizes: tuple[int | None, ...]) -> tuple[int, Any]:
        """Run the script on one process: the exit code, and its record or None."""
        from lockstep.tools.verify.verdict import read_records

        code, settings = self.start(role, batch_sizes)
        records = read_records(settings, role, 1)
        return code, records[0] if records else None

    def failure(self, role: str) -> str:
        """The error with which the first rank of a run ended that did."""
        lines = [line.split(": ", 1)[-1] for line in self.output(role).splitlines()]
        return next((line for line in lines if _ERROR.match(line)), lines[-1] if lines else "no word")

    def output(self, role: str, most: int = 30) -> str:
        """The last lines that a run's processes printed."""
        lines: list[str] = []
        for file in sorted((self._folder / f"log-{role}").glob("*.log")):
            lines += [f"{file.stem}: {line}" for line in file.read_text(errors="replace").splitlines()[-most:]]
        return "\n".join(lines[-2 * most :])

    def ranks(self) -> tuple[int, VerifySettings]:
        """The run on N ranks, once more with stand-ins for GPUs where the script asks for some."""
        code, settings = self.start(RANKS)
        wants = any(word in self.output(RANKS).lower() for word in _WANTS_GPU)
        if code and wants and not self._devices and self._what.devices == "auto":
            for file in self._folder.glob("ranks-*"):
                file.unlink()
            self._devices = self._world_size
            code, settings = self.start(RANKS)
        return code, settings


def _verify_at(what: Verification, world_size: int, folder: Path) -> Any:
    """The verdict at one number of ranks."""
    from lockstep.tools.verify.verdict import Verdict, judge, needed_batch_sizes, read_records

    session = _Session(what, world_size, folder)
    code, settings = session.ranks()
    ranks = read_records(settings, RANKS, world_size)
    verdict = Verdict(world_size)
    words = session.output(RANKS)
    if len(ranks) < world_size:
        verdict.unknown = f"the script ends with exit code {code} on {world_size} ranks. Its last words:\n{words}"
        return verdict
    _write_keys(settings, ranks)
    failure = session.failure(RANKS) if code else ""
    sizes = needed_batch_sizes(ranks, None)
    code, one = session.reference(ONE, sizes)
    if one is not None and not code and needed_batch_sizes(ranks, one) != sizes:
        sizes = needed_batch_sizes(ranks, one)
        code, one = session.reference(ONE, sizes)
    if code or one is None:
        verdict.unknown = (
            f"the script ends with exit code {code} on one process. Its last words:\n{session.output(ONE)}"
        )
        return verdict
    verdict = judge(ranks, one, None, failure)
    if verdict.code == 0:
        return verdict
    _, again = session.reference(HALVES, sizes)
    return judge(ranks, one, again, failure)


def _write_keys(settings: VerifySettings, ranks: Sequence[Mapping[str, Any]]) -> None:
    """The samples of all ranks, batch by batch, for the one process to find the ranks' draws by."""
    import torch

    keys: dict[tuple[int, int], list[int]] = {}
    for each in ranks:
        for step, content in enumerate(each["steps"]):
            for number, batch in enumerate(content["batches"]):
                if not batch["filler"]:
                    keys.setdefault((step, number), []).extend(key for key, _ in batch["keys"])
    torch.save(keys, settings.keys_file())


def _import_for_ranks() -> None:
    """Import what every rank needs, which is forked from this process; see `launch/forked.py`."""
    import torch

    torch.set_num_threads(1)  # those of OpenMP do not outlive a fork
    for name in _PRELOADED:
        importlib.import_module(name)


def verify(what: Verification) -> list[Any]:
    """Verify a script at each number of ranks. Local.

    Args:
        what: to verify.

    Returns:
        A `verdict.Verdict` for each number of ranks.

    Raises:
        LaunchError: it cannot be started as asked.
    """
    check_target(what.target, what.is_module)
    if what.steps < 1 or not what.nproc or min(what.nproc) < 2:
        raise LaunchError(
            f"nproc is {list(what.nproc)} and steps {what.steps}; expected numbers of ranks from 2 on, and a step"
        )
    _import_for_ranks()
    verdicts = []
    for world_size in what.nproc:
        folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))
        try:
            verdicts.append(_verify_at(what, world_size, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return verdicts
