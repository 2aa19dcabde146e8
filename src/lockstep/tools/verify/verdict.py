"""The verdict on a script at one number of ranks: step by step, then on what follows the steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lockstep.tools.verify import causes
from lockstep.tools.verify.aftermath import judge_aftermath
from lockstep.tools.verify.linear import read_gradients
from lockstep.tools.verify.samples import Record, Samples, contents, entered
from lockstep.tools.verify.step import (
    Gradients,
    Runs,
    StepOfJob,
    counted,
    distance_of_gradients,
    each_step,
    with_means,
)
from lockstep.tools.verify.words import Difference, difference

__all__ = ["Verdict", "first_steps", "judge", "train_apart"]

# Comparisons of one process with the ranks, in the order of events in a step; then those of its outcome.
_BEFORE = (
    causes.read_samples,
    causes.read_passes,
    causes.read_inputs,
    causes.read_moved,
    causes.read_outputs,
    causes.read_others,
    causes.read_unaveraged,
    read_gradients,
)
_AFTER = (causes.read_settings, causes.read_parameters, causes.read_buffers)
# Differences of two runs of one process above which a script counts as not determining its own steps: of gradients, to
# which rounding alone may do much, and of inputs (without 16-bit numbers), which shows draws that happen to be alike.
_MOST_NOISE = 1e-2
_MOST_IN_INPUTS = 1e-4
# Relative difference of gradients in float32 below which a finding must also be one in float64.
_MOST_BY_ROUNDING = 1e-3
_BY_CHANCE = "rounding alone changes what one process computes"
_BY_ITSELF = "two runs on one process already differ"
_OF_ALL = "Create the samples of all ranks on each, and let each use its part"
_NO_NUMBERS = "no gradient is finite (nan, inf), on the ranks or in one process, so nothing can be compared"
_REST = "rest: what follows this difference (later steps, evaluations, saved files) was not compared"
_JOINED = "a rank has no batches left, and takes part in the steps of others (Join), which cannot be compared"
_OF_PARTS = "parameters that are split over the ranks, or whose size depends on a rank's data, cannot be compared"
_PIECES = (
    "pieces: the script cuts its batches into pieces of a fixed size; one process, with the batch of all ranks, has "
    "N times as many. The gradients are the same up to that factor; parameters and buffers after the steps were not "
    "compared"
)


@dataclass
class Verdict:
    """The findings at one number of ranks.

    Attributes:
        world_size: the number of ranks.
        differences: the first difference in training, and those in the aftermath.
        notes: things that were set aside, or could not be compared.
        steps: number of steps compared.
        digits: for each step, the largest relative difference of each stage; for gradients, of all together.
        unknown: why there is no verdict; empty if there is one.
        wants_double: why a step should be compared in float64, because in float32 rounding determines its result, hides
            what clipping leaves of a factor, or may be all that differs; empty if it need not.
    """

    world_size: int
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    digits: list[dict[str, float]] = field(default_factory=list)
    unknown: str = ""
    wants_double: str = ""

    @property
    def first(self) -> tuple[str, str]:
        """Stage and cause of the first difference; empty if there is none."""
        return (self.differences[0].stage, self.differences[0].cause) if self.differences else ("", "")

    @property
    def code(self) -> int:
        """0 if the ranks give the answer of one process, 1 if they give another, 2 if unknown."""
        return 1 if self.differences else 2 if self.unknown else 0


def judge(runs: Runs, failure: str = "") -> Verdict:
    """Compare the run on N ranks with that of one process.

    Args:
        runs: the runs to compare.
        failure: the error that ended the ranks, but not one process.
    """
    rounded = filter(None, map(_why_rounded, runs.one["steps"]))
    verdict = Verdict(len(runs.ranks), wants_double=next(rounded, ""))
    _judge_steps(verdict, each_step(runs))
    if verdict.unknown:
        return verdict
    has_all = False
    if failure and verdict.differences:
        verdict.notes.append(f"failure: the ranks end with: {failure}")
    elif failure:
        verdict.differences.append(_failed(verdict.steps + 1, runs, failure))
    elif not verdict.differences:
        _judge_counts(verdict, runs)
        verdict.differences += _drawn_alike(runs.ranks)
        has_all = verdict.code == 0
        if has_all:
            verdict.differences, notes = judge_aftermath(runs)
            verdict.notes.extend(notes)
    verdict.notes.extend([_REST] * (bool(verdict.differences) and not has_all))
    verdict.notes.extend(_notes(runs))
    if not verdict.differences and _work_alike(runs.ranks):
        verdict.notes.append(
            "samples: all ranks got the same ones, so N ranks do the work of one. If this is not intended, split the "
            "data: a DistributedSampler, or lockstep.DataLoader"
        )
    return verdict


# ---- the steps ---------------------------------------------------------------------------------------


def _judge_steps(verdict: Verdict, steps: Iterator[StepOfJob]) -> None:
    """Judge steps up to the first that differs or cannot be judged."""
    for step in steps:
        why, apart = _look_at_chance(verdict, step)
        if why and apart is None:
            verdict.unknown = f"step {step.number}: {why}"
            return
        verdict.steps = step.number
        if apart is not None:
            verdict.differences.append(apart)
            return
        if _cuts_pieces(step):
            verdict.digits.append({"gradients": 0.0})
            verdict.notes = [_PIECES]
            continue
        verdict.digits.append(_digits(step))
        found = _judge_step(step)
        verdict.wants_double = verdict.wants_double or _may_be_rounding(step, found)
        if found is not None and found.cause == "number-of-steps" and step.facts["joins"]:
            verdict.unknown = f"step {step.number}: {_JOINED}"
            return
        if found is not None:
            verdict.differences += [found, *_averaged_by_nobody(found, [step, *steps])]
            return


def _look_at_chance(verdict: Verdict, step: StepOfJob) -> tuple[str, Difference | None]:
    """Why a step cannot be compared, empty if it can; and a difference that can be told nevertheless."""
    why = _is_beyond_compare(step) or _has_other_samples(step)
    if why:
        return why, None
    why = _is_moved_by_rounding(step)
    if why:  # rounding does not change samples
        verdict.wants_double = verdict.wants_double or (_BY_CHANCE if _is_single(step.one) else "")
        return why, causes.read_samples(step)
    why = _is_made_by_ranks(step) if _judge_step(step) is not None else ""
    # Ranks whose parameters diverge are wrong, whatever one process's samples.
    return why, (causes.read_ranks(step) or causes.read_unaveraged(step)) if why else None


def _averaged_by_nobody(found: Difference, steps: Sequence[StepOfJob]) -> list[Difference]:
    """Ranks that step with their own gradients: reported even if an earlier stage of the step differs."""
    # Ranks that skip batches, or end an epoch, by themselves use those of different batches.
    if found.stage in ("gradients", "parameters") or found.cause in ("skips", "number-of-steps"):
        return []
    return list(filter(None, map(causes.read_unaveraged, steps)))[:1]


def _is_single(step: Record) -> bool:
    return bool(step["precision"] >= torch.finfo(torch.float32).eps)


def _why_rounded(step: Record) -> str:
    """Why rounding determines the result of a step; empty if it does not."""
    if step["rounded"]:
        return "the script computes in 16 bits"
    return "rounding grows between the calls of a closure" if _is_single(step) and step["closure"] > 1 else ""


def _may_be_rounding(step: StepOfJob, found: Difference | None) -> str:
    """Why gradients in float32 may hide the cause, or differ by rounding alone; empty if they do not."""
    if not _is_single(step.one):
        return ""
    if step.gradients.are_made_up:
        return "clipping hides a factor of the gradients"
    differ_little = found is not None and step.gradients.used.names and step.gradients.used.worst < _MOST_BY_ROUNDING
    return "gradients differ by no more than rounding may explain" if differ_little else ""


def _judge_step(step: StepOfJob) -> Difference | None:
    """The first stage of a step that differs, or None if one process would have taken the same step."""
    apart, after = causes.read_ranks(step), [read(step) for read in _AFTER]
    if apart or not (step.gradients.used.names or step.gradients.between.names or any(after)):
        return apart
    return next(filter(None, itertools.chain((read(step) for read in _BEFORE), after)), None)


def _has_other_samples(step: StepOfJob) -> str:
    """A text if one process has other samples in its second run, else empty."""
    if step.again is None or not Samples([step.again], step.one).differ:
        return ""
    return (
        f"{_BY_ITSELF}, in their samples. Seed what draws them. If a thread of the script fetches batches ahead "
        "(prefetch_generator), fetch them in the loop: verify counts a batch for the step in which it is fetched"
    )


def _is_moved_by_rounding(step: StepOfJob) -> str:
    """A text if one process has other inputs or gradients in its second run, else empty."""
    if step.again is None:
        return ""
    moved = {
        "inputs": (step.moved.inputs, _MOST_NOISE if step.one["rounded"] else _MOST_IN_INPUTS),
        "gradients": (distance_of_gradients(step.one, step.again), _MOST_NOISE),
    }
    far = [f"{part} by {distance:.1e}" for part, (distance, most) in moved.items() if distance > most]
    return f"{_BY_ITSELF}, {far[0]}: chance or rounding decides what the script computes" if far else ""


def _is_beyond_compare(step: StepOfJob) -> str:
    """A text if nothing in the step can be compared, else empty."""
    return _is_split(step) or _is_beyond_numbers(step)


def _is_split(step: StepOfJob) -> str:
    """A text if parameters have other shapes on the ranks than in one process, else empty."""
    counts = {len(each["shapes"]) for each in (step.one, *step.ranks)}
    pairs = (zip(step.one["names"], step.one["shapes"], each["shapes"], strict=False) for each in step.ranks)
    for name, one, own in itertools.chain(*pairs):
        if one != own:
            what = f"the shape of a parameter ({name or 'without a name'}) is {one} in one process, and {own} on a rank"
            if len(counts) > 1:
                what = f"one process trains {len(step.one['shapes'])} parameters, and ranks other numbers of them"
            return f"{what}: {_OF_PARTS}"
    return ""


def _is_beyond_numbers(step: StepOfJob) -> str:
    """A text if one process and the ranks all have gradients without a finite number, else empty."""
    values = [[value[:-1] for value in each["used"] if value is not None] for each in (step.one, *step.ranks)]
    if not all(values) or any(bool(one.isfinite().any()) for each in values for one in each):
        return ""
    begin = zip(step.one["names"], step.one["begin"], strict=False)
    names = [name or "?" for name, value in begin if not bool(value[:-1].isfinite().all())]
    before = f": {', '.join(names[:3])} and others were not finite before the step" if names else ""
    return _NO_NUMBERS + before


def _is_made_by_ranks(step: StepOfJob) -> str:
    """Why one process has only some of the ranks' samples, if each rank creates its own; empty if it has all."""
    without = [each for each in step.ranks if not each["batches"]]
    if len(without) < len(step.ranks) and any(each["calls"] for each in without):
        return (
            "ranks without a loader train on samples from another rank's loader (dispatch_batches), which verify "
            "cannot tell apart. Let each rank load its own (dispatch_batches=False)"
        )
    if step.runs.one["facts"]["loaders"]:
        is_theirs = step.samples.differ and _has_own_data(step)
        return f"each rank creates its own dataset. {_OF_ALL}" if is_theirs else ""
    rows, foreign = step.calls.rows, step.calls.foreign
    first, *others = map(entered, step.ranks)
    if not foreign or all(each == first for each in others):
        return ""
    return (
        f"there is no loader, and each rank creates its own samples: one process creates {rows}, and cannot get the "
        f"ranks' {foreign} others. Pass the argument that sets a rank's batch size: one process then gets a multiple. "
        f"Or {_OF_ALL[0].lower()}{_OF_ALL[1:]}"
    )


def _has_own_data(step: StepOfJob) -> bool:
    """Whether rank 0's samples are one process's, but other ranks have others at the same indices of a dataset.

    In the whole pass: at first, ranks may draw with one seed for their samples what one process draws for its first.
    """
    records, passes = (step.runs.one, *step.runs.ranks), {batch["pass"] for batch in step.one["batches"]}
    last = max([step.number, *(n for n, each in enumerate(step.runs.one["steps"], 1) if _is_of(each, passes))])
    one, *ranks = (contents(each["steps"][:last]) for each in records)
    sizes = {frozenset(loader["samples"] for loader in each["facts"]["loaders"]) for each in records}
    alike = [{found[index] == one[index] for index in found.keys() & one.keys()} for found in ranks]
    has_others = any({*one.values()}.isdisjoint(found.values()) for found in ranks[1:])
    return len(sizes) == 1 and alike[0] == {True} and {False} in alike[1:] and has_others


def _is_of(step: Record, passes: set[int]) -> bool:
    return any(batch["pass"] in passes for batch in step["batches"])


def _cuts_pieces(step: StepOfJob) -> bool:
    """Whether one process runs N times a rank's backward passes on the same samples, and gets N times its gradient."""
    passes, world_size = len(step.losses.one), len(step.ranks)
    if not passes or any(len(each) * world_size != passes for each in step.losses.ranks):
        return False
    if not step.one["batches"] or step.samples.differ or causes.read_ranks(step) is not None:
        return False
    factor = step.gradients.factor
    return factor is not None and abs(factor * world_size - 1) < 1e-3 and not step.gradients.between.names


def _digits(step: StepOfJob) -> dict[str, float]:
    losses, gradients = step.losses.sums("weighted"), distance_of_gradients(step.one, step.ranks[0])
    found = {"inputs": step.calls.inputs, "outputs": step.calls.outputs, "gradients": gradients}
    if losses is not None:
        found["loss"] = abs(losses[0] - losses[1]) / max(abs(losses[0]), abs(losses[1]), 1e-30)
    return found


# ---- the whole run -----------------------------------------------------------------------------------


def _failed(step: int, runs: Runs, failure: str) -> Difference:
    ranks, counts = runs.ranks, {len(each["steps"]) for each in (runs.one, *runs.ranks)}
    done = [rank for rank, each in enumerate(ranks) if each["facts"]["returned"]]
    if done and (len(counts) > 1 or runs.one["facts"]["goes_on"]):
        text = ", ".join(f"rank {rank} after {len(ranks[rank]['steps'])} steps" for rank in done)
        measured = f"the script ended on {text}, while other ranks continued: {failure}"
        return difference(step, "steps", "number-of-steps", measured)
    key = "fails samples" if "how many samples" in failure else "fails waits" if " in backward" in failure else "fails"
    return difference(step, "steps", key, f"one process continues, but {len(ranks)} ranks fail with: {failure}")


def _judge_counts(verdict: Verdict, runs: Runs) -> None:
    goes_on, counts = runs.one["facts"]["goes_on"], [len(each["steps"]) for each in runs.ranks]
    own = len(runs.one["steps"]) + int(goes_on)
    if {own, *counts} == {0}:
        verdict.unknown = "no optimizer took a step, on any number of processes"
    elif len({own, *counts}) > 1:
        text = ", ".join(map(str, counts))
        measured = f"optimizer steps: one process {own}{' or more' if goes_on else ''}, the ranks {text}"
        verdict.differences.append(difference(min(own, *counts) + 1, "steps", "number-of-steps", measured))


def _notes(runs: Runs) -> Iterator[str]:
    """Notes on things that were set aside, and that the run did not reach."""
    facts, begun = runs.ranks[0]["facts"], runs.one["facts"]["begun"]
    given = sum(step["given"] for step in runs.one["steps"])
    if given:
        yield (
            f"random numbers drawn within the steps (dropout, noise), {given} times: one process got those that the "
            "ranks drew, so different draws on N ranks and on one do not count"
        )
    if facts["scales"]:
        yield (
            "float16: the loss scale started at 1024 at most, which multiplies the losses shown, and did not grow; "
            "steps that a dynamic scale would skip are set aside"
        )
    if begun:
        yield (
            f"begin: before the first step, {len(begun)} parameters of one process ({', '.join(begun[:3])}) differed "
            "from the ranks'; it was given theirs. If they are drawn without a seed, this is chance; if they are "
            "computed from samples, compute them from those of all ranks"
        )
    if facts["end"]:
        yield f"end: {facts['end']}"
        return
    passes = [each for each in facts["passes"] if each["keys"] and facts["loaders"][each["loader"]]["shuffles"]]
    counts = Counter(each["line"] for each in passes)  # a loader may be recreated for each epoch
    if any(each["trains"] and counts[each["line"]] == 1 for each in passes):
        yield (
            "epochs: one was seen. A shuffling sampler needs set_epoch(epoch) before each further one; to "
            "compare this, let the script begin a second epoch"
        )


# ---- ranks by themselves -----------------------------------------------------------------------------


def first_steps(ranks: Sequence[Record]) -> list[Record]:
    """The first step of each rank; empty if any rank has taken none."""
    return [each["steps"][0] for each in ranks] if all(each["steps"] for each in ranks) else []


def train_apart(ranks: Sequence[Record]) -> int:
    """Whether ranks train independently in their first step, without an engine.

    Returns:
        2 if they do the same work, 1 if they step with different gradients, else 0.
    """
    if not first_steps(ranks) or any(each["facts"]["engines"] for each in ranks):
        return 0
    first, _ = with_means(first_steps(ranks))
    gradients = Gradients(first, first[0], None, float(first[0]["precision"]))
    return 2 if _work_alike(ranks) else int(bool(gradients.between.names))


def _drawn_alike(ranks: Sequence[Record]) -> list[Difference]:
    """Without a loader: some ranks had the same rows in all steps, but not all, nor groups of one size (of a mesh)."""
    rows = [[entered(step) for step in each["steps"]] for each in ranks]
    alike = [rank for rank, each in enumerate(rows) if rows.count(each) > 1]
    first = next((rows[rank] for rank in alike), [])
    if any(each["facts"]["loaders"] for each in ranks) or len({rows.count(each) for each in rows}) < 2:
        return []
    if len(first) < 2 or not all(len(each) > 1 for each in first):  # few rows may be alike by chance
        return []
    measured = f"ranks {', '.join(map(str, alike))} had the same {counted(first[0].total(), 'row')}, also later"
    lines = tuple(ranks[alike[0]]["steps"][0]["lines"].get("call", ()))
    return [difference(1, "samples", "no-sampler drawn", measured, lines)]


def _work_alike(ranks: Sequence[Record]) -> bool:
    """Whether all ranks train on the same samples in their first steps, with or without a loader."""
    first = first_steps(ranks)
    if any(each["batches"] for each in first):
        return Samples(first, first[0]).is_alike
    keys = [[call["keys"] for call in each["calls"]] for each in first]
    return bool(keys) and any(keys[0]) and all(each == keys[0] for each in keys[1:])
