"""A script, and its runs on N ranks and on one process: arguments, devices, files and last output."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lockstep import env
from lockstep.compat.legacy.choice import tell_ranks
from lockstep.compat.legacy.sources import locate_target
from lockstep.launch.config import LaunchConfig
from lockstep.launch.root_cause import RankFailure
from lockstep.launch.supervisor import launch_job
from lockstep.tools.rehearse.plan import Needs, option_for_local_rank, read_script
from lockstep.tools.verify.samples import Record
from lockstep.tools.verify.scratch import folders_of, kept_apart
from lockstep.tools.verify.settings import RANKS, Changes, Orders, Verification, VerifySettings
from lockstep.tools.verify.verdict import Verdict, first_steps, train_apart

__all__ = ["Script", "said_number"]

_RANK_MODULE = "lockstep.tools.verify.rank"
# Messages of scripts that require a GPU.
_WANTS_GPU = ("cuda", "nccl", "nvidia", "gpu")
_LAST_WORDS = "  what():"  # as C++ prints an exception that nothing catches
_LISTED = 4  # lines of an error after one that ends with a colon
_SHOWN_FILES = 4
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FOREIGN = (
    "Files and folders of other users cannot be written through the overlay: give the script a folder of your own. "
)
_ON_STAND_INS = "it got stand-ins for GPUs, one per rank (--devices cpu: none)"
_WITHOUT_STAND_INS = "devices: the ranks of this script train separately, and fail on stand-ins for GPUs"


def said_number(records: Sequence[Record]) -> int | None:
    """The number of ranks that a script asks for, if it differs from the number started."""
    numbers = (each["facts"]["starts"] for each in records)
    return next((each for each in numbers if each is not None), None)


def _are_columns(records: Sequence[Record], world_size: int) -> bool:
    """Whether the ranks' first inputs, without a loader, are as long as that of one process, and together as wide."""
    firsts = [step for each in records for step in each["steps"][:1] if step["calls"] and not step["batches"]]
    lengths = [step["calls"][0]["lengths"] for step in firsts]
    if len(lengths) != world_size + 1 or {*map(len, lengths)} != {2}:
        return False
    *ranks, one = lengths
    return {each[0] for each in ranks} == {one[0]} and sum(each[1] for each in ranks) == one[1]


def _padding_of(records: Sequence[Record]) -> tuple[int, ...]:
    """The most frequent endings of rows whose last two values are equal, in tables of varying width."""
    ends = [end for each in records for end in each["facts"]["ends"]]
    places = Counter(place for place, _ in {(place, width) for place, width, _ in ends})
    each = (Counter(end for at, _, end in ends if at == place) for place, count in places.items() if count > 1)
    return tuple({counts.most_common(1)[0][0] for counts in each})


def _local_rank_option(what: Verification) -> str:
    source = locate_target(what.target, what.is_module)
    needs = Needs() if source is None else read_script(source.file)
    return "" if needs.starts_ranks else option_for_local_rank(needs, what.target, what.is_module)


@contextlib.contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Context manager that discards the launcher's output, as the report includes what matters.

    Args:
        folder: parent of the launcher's own folder, which unlike the folder for temporary files is also seen by ranks.
    """
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        tempfile.tempdir = before
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


class Script:
    """A script, and its runs for one number of ranks.

    Args:
        what: the script and options.
        world_size: number of ranks.
        folder: folder for records and logs.
        by_sample: see `VerifySettings`.

    Attributes:
        what, world_size, folder: as given, unless the script asks for another number of ranks, or for GPUs.
        changes: what is changed for one process.
        devices: number of simulated GPUs in the run on N ranks; 0 for none.
        devices_of_one: number of these that one process sees.
        streams: see `VerifySettings`; set before another run on one process.
        notes: notes for the report.
        failure_of_ranks: the error that ended the run on N ranks; empty for none.
    """

    def __init__(self, what: Verification, world_size: int, folder: Path, by_sample: bool = False) -> None:
        self.what, self.world_size, self.folder = what, world_size, folder
        self.changes = Changes(what.args)
        self.devices = world_size if what.devices == "gpu" else 0
        self.devices_of_one = 1
        self.streams = ""
        self.notes: list[str] = []
        self.failure_of_ranks = ""
        # See `VerifySettings`.
        self._by_sample = by_sample
        self._across = False
        self._time_first: bool | None = None
        self._padding: tuple[int, ...] | None = None
        self._option = _local_rank_option(what)
        self._folders = folders_of(what.target, what.is_module, what.args)
        self._most_steps = 0
        self._count = 0  # of runs
        self._written: set[str] = set()
        self._not_kept = ""
        self._failures: dict[tuple[Path, str], str] = {}
        self._places: dict[tuple[Path, str], str] = {}  # where, for those errors

    def run(
        self,
        role: str,
        batch_sizes: tuple[int | None, ...] = (),
        orders: Orders | None = None,
        moves: bool = False,
    ) -> tuple[int, list[Record]]:
        """Run the script in a role; returns the exit code, and the records of the processes that left one, by rank."""
        what, count = self.what, self.world_size if role == RANKS else 1
        settings = VerifySettings(
            role=role,
            world_size=self.world_size,
            steps=what.steps,
            folder=str(self.folder),
            double=what.double,
            devices=min(self.devices, count if role == RANKS else self.devices_of_one),
            batch_sizes=batch_sizes,
            time_first=self._time_first,
            padding=self._padding or (),
            by_sample=self._by_sample,
            changes=Changes(what.args) if role == RANKS else self.changes,
            local_rank_option=self._option,
            across=self._across,
            streams=self.streams,
            moves=moves,
            target=self._target(),
            most_steps=self._most_steps,
        )
        if orders is not None:
            torch.save(orders, settings.file("orders"))
        files = [settings.file("record", role, rank) for rank in range(count)]
        for file in files:
            file.unlink(missing_ok=True)
        self._count += 1
        with kept_apart(self._folders, self.folder / f"files-{self._count}") as keeper:
            code = self._launch(dataclasses.replace(settings, keeper=keeper.pid), count)
        self._written.update(keeper.written)
        self._not_kept = keeper.why
        return code, [torch.load(file, weights_only=True) for file in files if file.exists()]

    def _launch(self, settings: VerifySettings, count: int) -> int:
        what, variables = self.what, env.snapshot()
        env.LOCKSTEP_VERIFY.set(settings.dump(), variables)
        env.CUDA_VISIBLE_DEVICES.set(",".join(map(str, range(settings.devices))), variables)
        tell_ranks(variables, None if what.with_shims else False, what.target, what.is_module, what.args)
        config = LaunchConfig(
            target=_RANK_MODULE,
            args=(*(("-m",) if what.is_module else ()), what.target, *settings.changes.args),
            nproc=count,
            is_module=True,
            log_dir=str(self.folder / f"log-{settings.role}"),
            environment=variables,
            on_failure=functools.partial(self._note_failure, settings.role),
            warns_unjoined=False,
            forks=True,
        )
        with _quiet(self.folder):
            code = launch_job(config)
        if code - 128 in _INTERRUPTS:  # the launcher caught a signal that was meant for this process
            raise SystemExit(code)
        return code

    def _target(self) -> str:
        """See `VerifySettings.target`."""
        file = self.folder / "target"
        return file.read_text() if file.exists() else ""

    def _run_as_many(self) -> tuple[int, list[Record]]:
        """Run on N ranks, or on as many as the script asks for. See [Note: ranks in place] in `starts.py`."""
        before = self._target()
        code, ranks = self.run(RANKS)
        if self._target() != before:
            code, ranks = self.run(RANKS)
        number = said_number(ranks)
        if number is not None and number > 1:
            self.notes.append(f"ranks: the script starts {number} ranks, whatever --nproc says")
            self.world_size = number
            code, ranks = self.run(RANKS)
        return code, self._until_killed() if len(ranks) < self.world_size else ranks

    def _until_killed(self) -> list[Record]:
        """Run again, up to the last step of all ranks: a rank that was killed, such as by gloo, left no record."""
        self._most_steps = min(len([*self.folder.glob(f"draws-*-{rank}")]) for rank in range(self.world_size))
        for file in self.folder.iterdir():
            if file.is_file() and file.name != "target":
                file.unlink()
        return self.run(RANKS)[1] if self._most_steps else []

    def run_ranks(self) -> tuple[int, list[Record]]:
        """Run on N ranks; again with simulated GPUs if the script requires them, or may train independently without.

        Without GPUs, Accelerate and others let each rank train independently.
        """
        code, ranks = self._run_as_many()
        has_failed = code or not any(each["steps"] for each in ranks)
        if not self._may_want_gpus(ranks, bool(has_failed)):
            return code, ranks
        without, failure_without = self.folder, self.failure(RANKS) if code else ""
        self.folder, self.devices = Path(tempfile.mkdtemp(prefix="gpus-", dir=without)), self.world_size
        code_of_gpus, ranks_of_gpus = self._run_as_many()
        trains = bool(first_steps(ranks_of_gpus)) and train_apart(ranks_of_gpus) < train_apart(ranks)
        if not has_failed and not trains:
            failure = self.failure(RANKS) if code_of_gpus else ""
            self.notes += [f"{_WITHOUT_STAND_INS}: {failure}"] if failure else []
            self.folder, self.devices = without, 0
            return code, ranks
        what = "this script does nothing" if has_failed else "the ranks of this script train separately"
        what = f"this script fails with {failure_without}" if failure_without else what
        self.notes.append(f"devices: without GPUs {what}; {_ON_STAND_INS}")
        return code_of_gpus, ranks_of_gpus

    def _may_want_gpus(self, ranks: Sequence[Record], has_failed: bool) -> bool:
        if self.devices or self.what.devices != "auto":
            return False
        if not has_failed:
            return train_apart(ranks) > 0
        said = self.output(RANKS).lower()
        asked = any(each["facts"]["wants_gpus"] for each in ranks) or any(word in said for word in _WANTS_GPU)
        return asked or said_number(ranks) in (0, 1)

    def turns_draws(self, one: Sequence[Record]) -> bool:
        """Switch to the other layout of draws, see `VerifySettings.across`; returns whether there was one to try."""
        if self._across or not any(each["facts"]["several"] for each in one):
            return False
        self._across, self.changes = True, Changes(self.what.args)
        return True

    def learns_layout(self, records: Sequence[Record]) -> bool:
        """Note if samples are columns, and what pads them; returns whether other batches must be read differently."""
        batches = (batch for each in records for step in each["steps"] for batch in step["batches"])
        layouts = {batch["time_first"] for batch in batches}
        is_new = self._time_first is None and _are_columns(records, self.world_size)
        self._time_first = self._time_first or (True in layouts or is_new or None)
        if self._padding is None:
            self._padding = _padding_of(records)
            is_new |= bool(self._padding)
        return is_new or {None, True} <= layouts

    def output(self, role: str, most: int = 30) -> str:
        """The last lines printed by a run's processes."""
        lines: list[str] = []
        for file in sorted((self.folder / f"log-{role}").glob("*.log")):
            lines += [f"{file.stem}: {line}" for line in file.read_text(errors="replace").splitlines()[-most:]]
        return "\n".join(lines[-2 * most :])

    def _note_failure(self, role: str, failures: Sequence[RankFailure]) -> None:
        report, deadlock = failures[0].report, self.folder / "deadlock"
        if deadlock.exists():
            shown = [deadlock.read_text()]
        elif report is not None:
            lines = f"{report.type}: {report.message}".strip().splitlines()
            shown = lines[: 1 + _LISTED] if lines[0].endswith(":") else lines[:1]
            place = f", {os.path.basename(report.file)}:{report.line}" if report.file else ""
            self._places[self.folder, role] = f" (rank {report.rank}{place})"
        else:
            log = self.output(role, sys.maxsize).splitlines()
            last_words = (line.partition(_LAST_WORDS)[2] for line in log if _LAST_WORDS in line)
            shown = [failures[0].describe(), *(f"({line.strip()})" for line in last_words)]
        self._failures[self.folder, role] = " ".join(map(str.strip, shown))

    def place_of_failure(self, role: str) -> str:
        """Rank and line of the error that ended a run, in brackets; empty if unknown."""
        return self._places.get((self.folder, role), "")

    def failure(self, role: str) -> str:
        """The error that ended a run, from the rank that failed first."""
        last = "".join(self.output(role).splitlines()[-1:]).partition(": ")[2]  # without the name of the rank
        return self._failures.get((self.folder, role)) or last or "no word"

    def ended(self, role: str, code: int, where: str) -> Verdict:
        """The verdict if a run failed, so that nothing can be said."""
        output = self.output(role)
        why = _FOREIGN if f"[Errno {errno.EOVERFLOW}]" in output else ""
        words = f"the script exits with code {code} on {where}. {why}Its last output:\n{output}"
        return Verdict(self.world_size, unknown=words)

    def words_on_files(self) -> list[str]:
        """Notes on the files that the runs have written."""
        if self._not_kept:
            return [f"files: each run wrote to the script's real files: {self._not_kept}"]
        written = sorted(self._written)
        more = f" and {len(written) - _SHOWN_FILES} more" if len(written) > _SHOWN_FILES else ""
        text = f"the runs wrote {', '.join(written[:_SHOWN_FILES])}{more}, each into its own memory"
        return [f"files: yours are unchanged; {text}"] if written else []
