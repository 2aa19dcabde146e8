"""The runs of a script for one number of ranks, and what they say together."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lockstep import env
from lockstep.compat.legacy.choice import tell_ranks
from lockstep.launch.config import LaunchConfig
from lockstep.launch.supervisor import launch_job
from lockstep.tools.verify.aftermath import LOGGED
from lockstep.tools.verify.orders import Orders, evaluation_of_first, order_of_ranks
from lockstep.tools.verify.scratch import folders_of, kept_apart
from lockstep.tools.verify.settings import HALVES, ONE, RANKS, Verification, VerifySettings
from lockstep.tools.verify.step import Record
from lockstep.tools.verify.verdict import (
    Verdict,
    judge,
    lacks_batch_size,
    needed_batch_sizes,
    read_records,
    train_apart,
)

__all__ = ["verify_at"]

_SHOWN = 4
_RANK_MODULE = "lockstep.tools.verify.rank"
# What a script says that cannot do without a GPU.
_ERROR = re.compile(r"[\w.]*(Error|Exception|Mismatch|Parameters|Lost|Timeout|Exit)\b.*: ")
_WANTS_GPU = ("cuda", "nccl", "nvidia", "gpu")
_FOREIGN = (
    "A file or folder that belongs to another user cannot be written to where files are kept apart: give the script a "
    "folder of your own. "
)
_ON_STAND_INS = (
    "devices: without GPUs each rank of this script trains by itself; it was given stand-ins for GPUs, one for each "
    "rank (--devices cpu: none)"
)
_WIDE = (
    "precision: the script computes in 16 bits, which hide as much as they make up; it was compared in float64, where "
    "autocast leaves numbers as they are"
)
# What is said of samples where ranks and one process only draw another order; see [Note: orders that are given].
_OTHER_ORDER = (("samples", "order"), ("samples", "padded"), ("samples", "no-sampler"))
# Causes that may be a number which the script takes for the size of a batch; "" where one process fails by it.
_BY_SIZE = ("", "drawn", "batch", "not-linear", "factor", "after-averaging", "settings")
_NO_SIZE = (
    "a loader has no batch size that one process could have N times (batch_size=None, or a batch_sampler without "
    "batch_size), so it cannot be given the batches of all ranks"
)
_GIVEN = (
    "order: one process by itself draws another order of samples than the ranks, among whom no sample came twice; it "
    "was given theirs"
)


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
        self.world_size = world_size
        self._folder = folder
        self._devices = world_size if what.devices == "gpu" else 0
        self._folders = folders_of(what.target, what.is_module, what.args)
        self._count = 0
        self.time_first: bool | None = None  # as `VerifySettings` has it
        self.written: list[str] = []
        self.notes: list[str] = []
        self.not_kept = ""

    @property
    def has_stand_ins(self) -> bool:
        """Whether the script was given stand-ins for GPUs."""
        return self._devices > 0

    def start(self, role: str, batch_sizes: tuple[int | None, ...] = ()) -> tuple[int, VerifySettings]:
        """Run the script in a role; the exit code, and the settings under which its records are."""
        self._count += 1
        with kept_apart(self._folders, self._folder / f"files-{self._count}") as keeper:
            code, settings = self._start(role, batch_sizes, keeper.pid)
        self.written, self.not_kept = sorted({*self.written, *keeper.written}), keeper.why
        return code, settings

    def _start(self, role: str, batch_sizes: tuple[int | None, ...], keeper: int) -> tuple[int, VerifySettings]:
        what = self._what
        devices = self._devices if role == RANKS else min(1, self._devices)  # a rank has one of its own
        settings = VerifySettings(
            role=role,
            world_size=self.world_size,
            steps=what.steps,
            folder=str(self._folder),
            double=what.double,
            devices=devices,
            batch_sizes=batch_sizes,
            keeper=keeper,
            time_first=self.time_first,
        )
        variables = env.snapshot()
        env.LOCKSTEP_VERIFY.set(settings.dump(), variables)
        env.CUDA_VISIBLE_DEVICES.set(",".join(map(str, range(devices))), variables)
        tell_ranks(variables, None if what.with_shims else False, what.target, what.is_module, what.args)
        config = LaunchConfig(
            target=_RANK_MODULE,
            args=(*(("-m",) if what.is_module else ()), what.target, *what.args),
            nproc=self.world_size if role == RANKS else 1,
            is_module=True,
            log_dir=str(self._folder / f"log-{role}"),
            environment=variables,
            on_end=lambda folder: None,
            warns_unjoined=False,
            forks=True,
        )
        with _quiet():
            return launch_job(config), settings

    def reference(self, role: str, batch_sizes: tuple[int | None, ...], orders: Orders) -> tuple[int, Record | None]:
        """Run the script on one process: the exit code, and its record or None."""
        settings_of_orders = VerifySettings(role, self.world_size, 0, str(self._folder))
        torch.save(orders, settings_of_orders.orders_file())
        code, settings = self.start(role, batch_sizes)
        records = read_records(settings, role, 1)
        return code, records[0] if records else None

    def learns_layout(self, records: Sequence[Record]) -> bool:
        """Whether some batches were as long as wide, of which others say that samples are columns."""
        batches = (batch for each in records for step in each["steps"] for batch in step["batches"])
        layouts = {batch["time_first"] for batch in batches}
        self.time_first = self.time_first or (True in layouts or None)
        return {None, True} <= layouts

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

    def words_on_files(self) -> list[str]:
        """What the runs have written, and where."""
        if self.not_kept:
            return [f"files: the script wrote where it writes, once for each run: {self.not_kept}"]
        if not self.written:
            return []
        more = f" and {len(self.written) - _SHOWN} more" if len(self.written) > _SHOWN else ""
        return [
            f"files: nothing of yours was changed; the runs wrote {', '.join(self.written[:_SHOWN])}{more}, each into "
            "memory of its own"
        ]

    def ranks(self) -> tuple[int, VerifySettings]:
        """The run on N ranks, once more with stand-ins for GPUs where the script asks for some, or may do without.

        Accelerate and others, where they find no GPU, have each rank train by itself.
        """
        code, settings = self.start(RANKS)
        wants = any(word in self.output(RANKS).lower() for word in _WANTS_GPU)
        if self._what.devices != "auto" or (not wants if code else not self._train_apart(settings)):
            return code, settings
        without = self._folder
        self._folder, self._devices = Path(tempfile.mkdtemp(prefix="gpus-", dir=without)), self.world_size
        code_of_gpus, settings_of_gpus = self.start(RANKS)
        if code == 0 and (code_of_gpus or self._train_apart(settings_of_gpus)):
            self._folder, self._devices = without, 0
            return code, settings
        self.notes += [] if code else [_ON_STAND_INS]
        return code_of_gpus, settings_of_gpus

    def _train_apart(self, settings: VerifySettings) -> bool:
        return train_apart(read_records(settings, RANKS, self.world_size))


def verify_at(what: Verification, world_size: int, folder: Path) -> Verdict:
    """The verdict at one number of ranks; of a script that computes in 16 bits, in float64 where it can do so."""
    session = _Session(what, world_size, folder)
    verdict = _compared(session)
    if verdict.is_rounded and not what.double:
        devices = "gpu" if session.has_stand_ins else what.devices
        what = dataclasses.replace(what, double=True, devices=devices)
        second = _compared(_Session(what, world_size, Path(tempfile.mkdtemp(dir=folder))))
        if not second.unknown and not second.is_rounded:
            verdict = second
            verdict.notes.append(_WIDE)
    verdict.notes.extend([*session.notes, *session.words_on_files()])
    return verdict


def _compared(session: _Session) -> Verdict:
    world_size = session.world_size
    code, settings = session.ranks()
    ranks = read_records(settings, RANKS, world_size)
    refused = next((each["facts"]["refused"] for each in ranks if each["facts"]["refused"]), "")
    if refused or len(ranks) < world_size:
        return Verdict(world_size, unknown=refused or _ended(session.output(RANKS), code, f"{world_size} ranks"))
    if session.learns_layout(ranks):
        return _compared(session)
    _write_keys(settings, ranks)
    failure = session.failure(RANKS) if code else ""
    code, one, sizes = _reference(session, ranks)
    if one is not None and session.learns_layout([*ranks, one]):
        return _compared(session)
    words = _ended(session.output(ONE), code, "one process that is started as a rank")
    verdict = Verdict(world_size, unknown=words)
    if one is not None:
        judged = _judged(session, ranks, one, sizes, failure)
        is_found = any(0 < each.step <= len(one["steps"]) for each in judged.differences)
        verdict = judged if is_found or not code else verdict
    if code or not verdict.unknown:
        verdict.notes.extend(_words_on_sizes(verdict, ranks[0]["facts"]["made"], sizes))
    return verdict


def _words_on_sizes(verdict: Verdict, asked: Sequence[int | None], given: Sequence[int | None]) -> list[str]:
    """That a script may compute something from a batch size which one process did not have."""
    pairs = [(one, other) for one, other in zip(asked, given, strict=False) if other is not None and one != other]
    if not pairs or verdict.first[1] not in _BY_SIZE or (not verdict.differences and not verdict.unknown):
        return []
    return [
        f"sizes: one process was given batches of {pairs[0][1]} where the script asks for {pairs[0][0]}. What the "
        "script computes from that number (a divisor, a mask, a learning rate, noise) is then another: take it from "
        "the batch, len(x)"
    ]


def _ended(output: str, code: int, where: str) -> str:
    why = _FOREIGN if f"[Errno {errno.EOVERFLOW}]" in output else ""
    return f"the script ends with exit code {code} on {where}. {why}Its last words:\n{output}"


def _reference(session: _Session, ranks: Sequence[Record]) -> tuple[int, Record | None, tuple[int | None, ...]]:
    """The run on one process with batches of all ranks: its exit code, its record or None, and their sizes."""
    sizes = needed_batch_sizes(ranks, None)
    code, one = session.reference(ONE, sizes, {})
    if one is not None and not code and needed_batch_sizes(ranks, one) != sizes:
        sizes = needed_batch_sizes(ranks, one)
        code, one = session.reference(ONE, sizes, {})
    return code, one, sizes


def _judged(
    session: _Session, ranks: Sequence[Record], one: Record, sizes: tuple[int | None, ...], failure: str
) -> Verdict:
    verdict = judge(ranks, one, None, failure)
    facts = [each["facts"] for each in ranks]
    orders = order_of_ranks(facts) if verdict.first in _OTHER_ORDER else {}
    if orders:
        _, given = session.reference(ONE, sizes, orders)
        one = one if given is None else given
        verdict = judge(ranks, one, None, failure)
    if verdict.code != 0 or any(each.startswith(LOGGED) for each in verdict.notes):
        _, again = session.reference(HALVES, sizes, orders)
        second = judge(ranks, one, again, failure)
        # Of the answer of one process a second run has only to say which printed numbers are none, such as seconds.
        verdict = second if verdict.code != 0 or second.code == 0 else verdict
        if verdict.first[0] == "evaluated":
            _, moved = session.reference(ONE, sizes, {**orders, **evaluation_of_first(facts, one["facts"])})
            verdict = judge(ranks, one, again, failure, moved)
    if verdict.first == ("samples", "order") and lacks_batch_size(ranks, one):
        return Verdict(len(ranks), unknown=_NO_SIZE)
    if orders and verdict.first not in _OTHER_ORDER:
        verdict.notes.append(_GIVEN)
    return verdict


def _write_keys(settings: VerifySettings, ranks: Sequence[Record]) -> None:
    """The samples of all ranks, batch by batch, for the one process to find the ranks' draws by."""
    keys: dict[tuple[int, int], list[int]] = {}
    for each in ranks:
        for step, content in enumerate(each["steps"]):
            for number, batch in enumerate(content["batches"]):
                if not batch["filler"]:
                    keys.setdefault((step, number), []).extend(key for key, _ in batch["keys"])
    torch.save(keys, settings.keys_file())
