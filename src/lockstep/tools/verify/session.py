"""The runs of a script for one number of ranks, and what they say together.

[Note: orders that are given] Some libraries draw the order of an epoch otherwise on one process than on several, as
Accelerate does, and Trainers that put in a sampler which splits. One process then trains on other samples in each step,
which is no mistake where the ranks' parts are parts of one order, so that no sample comes twice in an epoch. One
process is given that order, batch by batch, and what follows can be compared. What fills up the last batch is left out,
so that it is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from lockstep import env
from lockstep.compat.legacy.choice import tell_ranks
from lockstep.compat.legacy.sources import locate_target
from lockstep.launch.config import LaunchConfig
from lockstep.launch.report import read_reports
from lockstep.launch.supervisor import launch_job
from lockstep.tools.rehearse.plan import Needs, option_for_local_rank, read_script
from lockstep.tools.verify.aftermath import LOGGED
from lockstep.tools.verify.samples import Record, Samples, batches_of, passes_are_shared_out, rows_of
from lockstep.tools.verify.scratch import folders_of, kept_apart
from lockstep.tools.verify.settings import HALVES, OF_RANK_0, ONE, RANKS, Orders, Verification, VerifySettings
from lockstep.tools.verify.step import Runs, counted
from lockstep.tools.verify.verdict import Verdict, first_steps, judge, train_apart

__all__ = ["verify_at"]

_RANK_MODULE = "lockstep.tools.verify.rank"
# What a script says that cannot do without a GPU.
_WANTS_GPU = ("cuda", "nccl", "nvidia", "gpu")
_SHOWN_FILES = 4
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FOREIGN = (
    "A file or folder that belongs to another user cannot be written to where files are kept apart: give the script a "
    "folder of your own. "
)
_ON_STAND_INS = "it was given stand-ins for GPUs, one for each rank (--devices cpu: none)"
_WITHOUT_STAND_INS = "devices: each rank of this script trains by itself, and fails on stand-ins for GPUs"
_WIDE = (
    "precision: rounding hides or makes up too much of this script (numbers of 16 bits, several calls of a closure in "
    "a step, gradients that are clipped); it was compared in float64, which autocast leaves as it is"
)
_DRAWN = ("samples", "drawn")
_BY_SAMPLE = (
    "samples: all steps were taken once more, with what samples draw by torch, numpy and random made to depend on "
    "their index alone, on the ranks and on one process"
)
_ALIKE = ": that was the answer of one process, so the draws of samples are all that differs"
# What is said of samples where ranks and one process only draw another order; see [Note: orders that are given].
_OTHER_ORDER = (("samples", "order"), ("samples", "padded"), ("samples", "no-sampler"))
# Causes that may be a number which the script takes for the size of a batch; "" where one process fails by it.
_BY_SIZE = ("", "drawn", "batch", "not-linear", "sum", "factor", "after-averaging", "settings", "other-weights")
_STAGES = ("steps", "samples", "inputs", "outputs", "loss", "gradients", "parameters", "buffers", "evaluated", "saved")
_MOST_OPTIONS = 3  # that are tried
_BY_OPTION = "options: one process was given the batches of all ranks by its arguments, which were"
_NO_SIZE = (
    "a loader has no batch size that one process could have N times (batch_size=None, or a batch_sampler without "
    "batch_size), so it cannot be given the batches of all ranks"
)
_OTHER_NUMBER = (
    "the script asks for {ranks}, and not for as many as were started: give it the argument that says how many"
)
_NEVER_ONE = (
    "the script starts {number} ranks, and none of its arguments makes it start one: let it take their number from an "
    "argument, from torch.cuda.device_count() or from WORLD_SIZE"
)
_OF_STREAMS = (
    "each rank reads a stream of its own (an IterableDataset) for its part of the passes of a step, and one process "
    "cannot be given the ranks' batches, pass by pass"
)
_GIVEN = (
    "order: one process by itself draws another order of samples than the ranks, among whom no sample came twice; it "
    "was given theirs"
)


def _said_number(records: Sequence[Record]) -> int | None:
    """How many ranks a script says there are, where that is another number than were started."""
    numbers = (each["facts"]["starts"] for each in records)
    return next((each for each in numbers if each is not None), None)


def _with_another(args: tuple[str, ...], values: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Arguments of a script with one of some values replaced, in each way to be tried."""
    parts = [argument.rpartition("=") for argument in args]
    places = [place for place, (*_, value) in enumerate(parts) if value in values][:_MOST_OPTIONS]
    return [
        (*args[:place], "".join([*parts[place][:2], values[parts[place][2]]]), *args[place + 1 :]) for place in places
    ]


def _local_rank_option(what: Verification) -> str:
    source = locate_target(what.target, what.is_module)
    needs = Needs() if source is None else read_script(source.file)
    return "" if needs.starts_ranks else option_for_local_rank(needs, what.target, what.is_module)


@contextlib.contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """A context: what the launcher says goes nowhere; the report says what matters of it.

    Args:
        folder: where it makes its own, which the ranks see as it does, other than that for temporary files.
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


class _Session:
    """The runs for one number of ranks.

    Args:
        what: to verify.
        world_size: that number.
        folder: for records and logs.
        by_sample: as `VerifySettings` has it.
    """

    def __init__(self, what: Verification, world_size: int, folder: Path, by_sample: bool = False) -> None:
        self._what = what
        self._by_sample = by_sample
        self.args = what.args  # of one process
        self.replaces = 0  # as `VerifySettings` has it
        self._across = False  # as `VerifySettings` has it
        self.world_size = world_size
        self.folder = folder
        self._option = _local_rank_option(what)
        self._folders = folders_of(what.target, what.is_module, what.args)
        self._count = 0
        self._time_first: bool | None = None  # as `VerifySettings` has it
        self._written: set[str] = set()
        self._not_kept = ""
        self._failures: dict[tuple[Path, str], str] = {}
        self.devices = world_size if what.devices == "gpu" else 0
        self.notes: list[str] = []
        self.failure_of_ranks = ""  # the error with which they ended

    def run(
        self, role: str, batch_sizes: tuple[int | None, ...] = (), orders: Orders | None = None
    ) -> tuple[int, list[Record]]:
        """Run the script in a role; the exit code, and the records of the processes that left one, rank by rank."""
        what, count = self._what, self.world_size if role == RANKS else 1
        settings = VerifySettings(
            role=role,
            world_size=self.world_size,
            steps=what.steps,
            folder=str(self.folder),
            double=what.double,
            devices=min(count, self.devices),
            batch_sizes=batch_sizes,
            time_first=self._time_first,
            by_sample=self._by_sample,
            replaces=self.replaces,
            local_rank_option=self._option,
            across=self._across,
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
        what, variables = self._what, env.snapshot()
        args = what.args if settings.role == RANKS else self.args
        env.LOCKSTEP_VERIFY.set(settings.dump(), variables)
        env.CUDA_VISIBLE_DEVICES.set(",".join(map(str, range(settings.devices))), variables)
        tell_ranks(variables, None if what.with_shims else False, what.target, what.is_module, what.args)
        config = LaunchConfig(
            target=_RANK_MODULE,
            args=(*(("-m",) if what.is_module else ()), what.target, *args),
            nproc=count,
            is_module=True,
            log_dir=str(self.folder / f"log-{settings.role}"),
            environment=variables,
            on_end=functools.partial(self._note_failure, settings.role),
            warns_unjoined=False,
            forks=True,
        )
        with _quiet(self.folder):
            code = launch_job(config)
        if code - 128 in _INTERRUPTS:  # which the launcher has heard in our place
            raise SystemExit(code)
        return code

    def _run_as_many(self) -> tuple[int, list[Record]]:
        """The run on N ranks, or on as many as the script says there are. See [Note: ranks in place] in `starts.py`."""
        target = self.folder / "target"
        was_known = target.exists()
        code, ranks = self.run(RANKS)
        if target.exists() and not was_known:
            code, ranks = self.run(RANKS)
        number = _said_number(ranks)
        if number is not None and number > 1:
            self.notes.append(f"ranks: the script starts {number} ranks, whatever --nproc says")
            self.world_size = number
            code, ranks = self.run(RANKS)
        return code, ranks

    def run_one(self, sizes: tuple[int | None, ...]) -> tuple[int, list[Record]]:
        """The run on one process, also of a script that takes the number of its ranks from elsewhere. See the same."""
        code, one = self.run(ONE, sizes, {})
        number = _said_number(one)
        for args in () if number is None else _with_another(self._what.args, {str(number): "1"}):
            self.args = args
            code, one = self.run(ONE, sizes, {})
            if one and _said_number(one) is None:
                return code, one
        if number is not None:
            self.args, self.replaces = self._what.args, number
            code, one = self.run(ONE, sizes, {})
        return code, one

    def run_ranks(self) -> tuple[int, list[Record]]:
        """The run on N ranks, once more with stand-ins for GPUs where the script asks for some, or may do without.

        Accelerate and others, where they find no GPU, have each rank train by itself.
        """
        code, ranks = self._run_as_many()
        has_failed = code or not any(each["steps"] for each in ranks)
        wants = any(word in self.output(RANKS).lower() for word in _WANTS_GPU) or _said_number(ranks) in (0, 1)
        if self._what.devices != "auto" or not (wants if has_failed else train_apart(ranks)):
            return code, ranks
        without = self.folder
        self.folder, self.devices = Path(tempfile.mkdtemp(prefix="gpus-", dir=without)), self.world_size
        code_of_gpus, ranks_of_gpus = self._run_as_many()
        trains = bool(first_steps(ranks_of_gpus)) and train_apart(ranks_of_gpus) < train_apart(ranks)
        if not has_failed and not trains:
            failure = self.failure(RANKS) if code_of_gpus else ""
            self.notes += [f"{_WITHOUT_STAND_INS}: {failure}"] if failure else []
            self.folder, self.devices = without, 0
            return code, ranks
        if not code:
            what = "this script does nothing" if has_failed else "each rank of this script trains by itself"
            self.notes.append(f"devices: without GPUs {what}; {_ON_STAND_INS}")
        return code_of_gpus, ranks_of_gpus

    def turns_draws(self, one: Sequence[Record]) -> bool:
        """Whether there is another way to give one process the draws that have several rows for each sample."""
        if self._across or not any(each["facts"]["several"] for each in one):
            return False
        self._across, self.args = True, self._what.args
        return True

    def learns_layout(self, records: Sequence[Record]) -> bool:
        """Whether some batches were as long as wide, of which others say that samples are columns."""
        batches = (batch for each in records for step in each["steps"] for batch in step["batches"])
        layouts = {batch["time_first"] for batch in batches}
        self._time_first = self._time_first or (True in layouts or None)
        return {None, True} <= layouts

    def output(self, role: str, most: int = 30) -> str:
        """The last lines that a run's processes printed."""
        lines: list[str] = []
        for file in sorted((self.folder / f"log-{role}").glob("*.log")):
            lines += [f"{file.stem}: {line}" for line in file.read_text(errors="replace").splitlines()[-most:]]
        return "\n".join(lines[-2 * most :])

    def _note_failure(self, role: str, folder: Path) -> None:
        reports = read_reports(folder, dict.fromkeys(range(self.world_size), 0)).values()
        if reports:
            first = min(reports, key=lambda each: (each.secondary, each.time))
            self._failures[self.folder, role] = f"{first.type}: {first.message}".strip().splitlines()[0]

    def failure(self, role: str) -> str:
        """The error with which a run ended, of the rank that failed first."""
        lines = self.output(role).splitlines()
        return self._failures.get((self.folder, role)) or (lines[-1] if lines else "no word")

    def ended(self, role: str, code: int, where: str) -> Verdict:
        """Nothing can be said, since a run came to nothing."""
        output = self.output(role)
        why = _FOREIGN if f"[Errno {errno.EOVERFLOW}]" in output else ""
        words = f"the script ends with exit code {code} on {where}. {why}Its last words:\n{output}"
        return Verdict(self.world_size, unknown=words)

    def words_on_files(self) -> list[str]:
        """What the runs have written, and where."""
        if self._not_kept:
            return [f"files: the script wrote where it writes, once for each run: {self._not_kept}"]
        written = sorted(self._written)
        more = f" and {len(written) - _SHOWN_FILES} more" if len(written) > _SHOWN_FILES else ""
        text = f"the runs wrote {', '.join(written[:_SHOWN_FILES])}{more}, each into memory of its own"
        return [f"files: nothing of yours was changed; {text}"] if written else []


def verify_at(what: Verification, world_size: int, folder: Path) -> Verdict:
    """The verdict at one number of ranks.

    Of a script whose samples are drawn by each rank, what follows is compared with samples that draw by their index; of
    one of which rounding hides or makes up too much, in float64.
    """
    session = _Session(what, world_size, folder)
    verdict = _compared(session)
    drawn = verdict if verdict.first == _DRAWN else None
    if drawn is not None:
        verdict = _compared(_again(session, what, by_sample=True))
    if verdict.wants_double and not what.double:
        second = _compared(_again(session, dataclasses.replace(what, double=True), drawn is not None))
        if not second.unknown and not second.wants_double:
            verdict = second
            verdict.notes.append(_WIDE)
    if drawn is not None:
        verdict = _beside_drawn(drawn, verdict)
    verdict.notes.extend([*session.notes, *session.words_on_files()])
    return verdict


def _again(session: _Session, what: Verification, by_sample: bool) -> _Session:
    """One that runs anew, with stand-ins for GPUs where those of before had some."""
    what = dataclasses.replace(what, devices="gpu" if session.devices else what.devices)
    return _Session(what, session.world_size, Path(tempfile.mkdtemp(dir=session.folder)), by_sample)


def _beside_drawn(drawn: Verdict, verdict: Verdict) -> Verdict:
    """What was found of a script whose samples are drawn by each rank, and of the same with samples that are not."""
    if verdict.unknown or verdict.first == _DRAWN:
        why = verdict.unknown.partition("\n")[0] or "samples still differ, by collate_fn or a generator of their own"
        drawn.notes.append(f"{_BY_SAMPLE}, which tells nothing: {why}")
        return drawn
    verdict.notes.append(f"{_BY_SAMPLE}{_ALIKE if not verdict.differences else ''}")
    verdict.differences = [*drawn.differences, *verdict.differences]
    return verdict


def _compared(session: _Session) -> Verdict:
    code, ranks = session.run_ranks()
    world_size, number = session.world_size, _said_number(ranks)
    refused = next((each["facts"]["refused"] for each in ranks if each["facts"]["refused"]), "")
    if refused or number is not None:
        return Verdict(world_size, unknown=refused or _OTHER_NUMBER.format(ranks=counted(number or 0, "rank")))
    if len(ranks) < world_size:
        return session.ended(RANKS, code, f"{world_size} ranks")
    if session.learns_layout(ranks):
        return _compared(session)
    session.failure_of_ranks = session.failure(RANKS) if code else ""
    code, one, sizes = _run_one(session, ranks)
    if _said_number(one) is not None:
        return Verdict(world_size, unknown=_NEVER_ONE.format(number=world_size))
    if session.learns_layout([*ranks, *one]):
        return _compared(session)
    verdict = _on_one(session, code, ranks, one, sizes)
    if verdict.differences and session.turns_draws(one):
        second = _compared(session)
        return second if _comes_further(second, verdict) else verdict
    return verdict


def _on_one(
    session: _Session,
    code: int,
    ranks: Sequence[Record],
    one: Sequence[Record],
    sizes: tuple[int | None, ...],
) -> Verdict:
    """The verdict by one process, or where it may be explained by what a script computes from batch sizes, by another.

    Args:
        code: with which one process ended.
        ranks: what they have recorded.
        one: the same of one process; none where it left nothing.
        sizes: of the batches that it was given.
    """
    if first_steps(ranks) and not any(each["steps"] or each["facts"]["passes"] for each in one):
        one = []  # as of a script that does nothing with less than two GPUs
    verdict = _judged(session, Runs(ranks, *one), sizes) if one else None
    if verdict is None or (code and not any(0 < each.step <= len(one[0]["steps"]) for each in verdict.differences)):
        is_alike = session.failure_of_ranks == session.failure(ONE)
        where = f"{len(ranks)} ranks and on one process alike" if is_alike else "one process that is started as a rank"
        verdict = session.ended(ONE, code, where)
        code = 0 if is_alike else code
    if verdict.unknown and not code:
        return verdict
    words = _words_on_sizes(verdict, ranks[0]["facts"]["made"], sizes)
    by_option = _run_one_by_option(session, ranks, one, sizes) if words else []
    if by_option:
        verdict = _judged(session, Runs(ranks, *by_option), ())
        words = [f"{_BY_OPTION} {' '.join(session.args)}"]
    verdict.notes.extend(words)
    return verdict


def _comes_further(second: Verdict, first: Verdict) -> bool:
    """Whether what a second verdict found comes later than what the first did, or is nothing."""
    ways = [
        (each.steps, _STAGES.index(each.first[0]) if each.differences else len(_STAGES)) for each in (second, first)
    ]
    return not second.unknown and ways[0] > ways[1]


def _run_one(session: _Session, ranks: Sequence[Record]) -> tuple[int, list[Record], tuple[int | None, ...]]:
    """The run on one process with batches of all ranks: its exit code, its record if it left one, and their sizes."""
    sizes = _needed_batch_sizes(ranks, [])
    code, one = session.run_one(sizes)
    corrected = _needed_batch_sizes(ranks, one)
    if code or corrected == sizes:
        return code, one, sizes
    return *session.run(ONE, corrected, {}), corrected


def _run_one_by_option(
    session: _Session, ranks: Sequence[Record], one: Sequence[Record], sizes: tuple[int | None, ...]
) -> list[Record]:
    """The same where the script's arguments ask for these sizes, and so for what else it computes from them.

    Which argument it is, is tried: one that is the size of the ranks' batches, and by which loaders are made with what
    one process needs. Nothing where there is none.
    """
    asked, args = ranks[0]["facts"]["made"], session.args
    if not one or one[0]["facts"]["asked"] != asked:
        return []
    needed = {str(size): str(other) for size, other in zip(asked, sizes, strict=True) if size is not None}
    for changed in _with_another(args, needed):
        session.args = changed
        code, found = session.run(ONE, (), {})
        if found and not code and tuple(found[0]["facts"]["made"]) == sizes:
            return found
    session.args = args
    return []


def _needed_batch_sizes(ranks: Sequence[Record], one: Sequence[Record]) -> tuple[int | None, ...]:
    """The batch size that each loader of torch needs in one process to hand out what all ranks had.

    Args:
        ranks: their records.
        one: that of one process which had such sizes, to correct them by; none for the first try.
    """
    first, facts = first_steps(ranks), ranks[0]["facts"]
    parts, factor = first, float(len(ranks))
    draws_order = any(facts["loaders"][batch["loader"]]["draws_order"] for batch in batches_of(*first[:1]))
    if first and not draws_order and Samples(first, first[0]).is_alike:
        # All ranks walk the same samples in the order of the data, as one process does.
        parts, factor = first[:1], 1.0
    factor *= _times_rows(parts, *first_steps(one)) if first and first_steps(one) else 1.0
    return tuple(None if size is None else max(1, round(size * factor)) for size in facts["made"])


def _times_rows(ranks: Sequence[Record], one: Record) -> float:
    """How many times as many samples the ranks have in a step as one process.

    By its first batch, and how many there are: those that are filled up, or fetched ahead, are the last ones.
    """
    own, *theirs = (batches_of(each) for each in (one, *ranks))
    if not own or not all(theirs):
        return 1.0
    counts = {len(each) for each in theirs}
    times = counts.pop() / len(own) if len(counts) == 1 else 1.0
    return times * sum(int(each[0]["rows"]) for each in theirs) / max(1, int(own[0]["rows"]))


def _judged(session: _Session, runs: Runs, sizes: tuple[int | None, ...]) -> Verdict:
    failure = session.failure_of_ranks
    verdict = judge(runs, failure)
    orders = _order_of_ranks(runs, verdict)
    if orders:
        _, given = session.run(ONE, sizes, orders)
        runs = Runs(runs.ranks, *given) if given else runs
        verdict = judge(runs, failure)
    if verdict.code != 0 or any(each.startswith(LOGGED) for each in verdict.notes):
        _, again = session.run(HALVES, sizes, orders)
        runs = Runs(runs.ranks, runs.one, *again)
        second = judge(runs, failure)
        # Of the answer of one process a second run has only to say which printed numbers are none, such as seconds.
        verdict = second if verdict.code != 0 or second.code == 0 else verdict
        if verdict.first[0] == "evaluated":
            _, moved = session.run(ONE, sizes, {**orders, **_evaluation_of_first(runs)})
            verdict = judge(dataclasses.replace(runs, moved=moved[0] if moved else None), failure)
    why = _why_not_given(runs) if verdict.first == ("samples", "order") else ""
    if why:
        return Verdict(session.world_size, unknown=why)
    if orders and verdict.first not in _OTHER_ORDER:
        verdict.notes.append(_GIVEN)
    return verdict


def _why_not_given(runs: Runs) -> str:
    """Why one process could not be given the samples of all ranks in its first step; empty if it was."""
    own, *ranks = (each["steps"][0] for each in (runs.one, *runs.ranks))
    facts = runs.ranks[0]["facts"]
    if None in facts["made"] and rows_of(own) < sum(map(rows_of, ranks)):
        return _NO_SIZE
    is_stream = any(one["stream"] and one["trains"] for one in facts["passes"])
    return _OF_STREAMS if is_stream and passes_are_shared_out(own, ranks) else ""


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


# ---- orders ------------------------------------------------------------------------------------------


def _has_other_batches(runs: Runs, verdict: Verdict) -> bool:
    """Whether samples came in other batches than the ranks', such as where a step takes an epoch, and steps differ."""
    for steps in zip(runs.one["steps"], *(each["steps"] for each in runs.ranks), strict=False):
        for own, *ranks in zip(*(each["batches"] for each in steps), strict=False):
            if Samples([{"batches": [each]} for each in ranks], {"batches": [own]}).differ:
                return verdict.code == 1
    return False


def _order_of_ranks(runs: Runs, verdict: Verdict) -> Orders:
    """For each pass that trains, by number, the indices of each batch of all ranks; none if one process has them.

    Nor where a sample comes twice in any of these: what is seen of a further epoch may be one batch.
    """
    found = dict[int, list[list[int]]]()
    if verdict.first not in _OTHER_ORDER and not _has_other_batches(runs, verdict):
        return found
    for number, passes in enumerate(zip(*(each["facts"]["passes"] for each in runs.ranks), strict=False)):
        if not passes[0]["trains"]:
            continue
        joined = _one_order([one["asked"] for one in passes])
        if joined is None:
            return {}
        own = [*runs.one["facts"]["passes"][number : number + 1], {"asked": ()}][0]["asked"]
        if any(sorted(each) != sorted(other or ()) for each, other in zip(joined, own, strict=False)):
            # Batches of one process may be parts of these, which accumulates over more of them.
            size = len(own[0]) if own and own[0] and len(joined[0]) % len(own[0]) == 0 else len(joined[0])
            found[number] = [each[at : at + size] for each in joined for at in range(0, len(each), size)]
    return found


def _one_order(asked: Sequence[Sequence[list[int] | None]]) -> list[list[int]] | None:
    seen: set[int] = set()
    batches: list[list[int]] = []
    last = max(map(len, asked)) - 1
    for number, parts in enumerate(itertools.zip_longest(*asked, fillvalue=[])):
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        indices = [index for part in known for index in part]
        new = [index for index in dict.fromkeys(indices) if index not in seen]
        if len(new) < len(indices) and number < last:
            return None
        seen.update(new)
        batches.append(new)
    return batches


def _evaluation_of_first(runs: Runs) -> Orders:
    """For each pass that evaluates, the batches of rank 0 alone, where one process has others."""
    facts = runs.ranks[0]["facts"]
    found, of_own_loaders = dict[int, list[list[int]]](), list[int]()
    for number, (first, own) in enumerate(zip(facts["passes"], runs.one["facts"]["passes"], strict=False)):
        if first["trains"]:
            continue
        if first["asked"] and None not in first["asked"] and first["asked"] != own["asked"]:
            found[number] = first["asked"]
        if facts["loaders"][first["loader"]]["own"]:
            of_own_loaders.append(number)
    return {**found, OF_RANK_0: [of_own_loaders]}
