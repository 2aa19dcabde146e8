"""The verdict on a script at one number of ranks: step by step, then on what follows the steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lockstep.tools.verify.aftermath import judge_aftermath
from lockstep.tools.verify.causes import (
    read_buffers,
    read_inputs,
    read_moved,
    read_outputs,
    read_parameters,
    read_passes,
    read_ranks,
    read_settings,
    read_unaveraged,
)
from lockstep.tools.verify.compare import distance_of_gradients, measure_gradients
from lockstep.tools.verify.linear import read_gradients
from lockstep.tools.verify.samples import contents, measure_samples, rows_of
from lockstep.tools.verify.settings import VerifySettings
from lockstep.tools.verify.splits import read_samples
from lockstep.tools.verify.step import Record, StepOfJob, each_step
from lockstep.tools.verify.words import Difference, difference

__all__ = ["Verdict", "judge", "lacks_batch_size", "needed_batch_sizes", "read_records", "train_apart"]

# What rounding may do before a script counts as one that does not determine its own steps.
_MOST_NOISE = 1e-2
_OF_ALL = "Make the samples of all ranks on each, and let each take its part"
_PIECES = (
    "pieces: the script cuts its batches into pieces of a fixed size, of which one process with the batch of all ranks "
    "has N times as many; the gradients are the same but for that factor, and parameters and buffers after the steps "
    "were not compared"
)


@dataclass
class Verdict:
    """What was found at one number of ranks.

    Attributes:
        world_size: that number.
        differences: the first of training, and those of what follows.
        notes: what was set aside, or could not be compared.
        steps: how many were compared.
        digits: for each step, the largest relative difference of each stage; of the gradients, all together.
        unknown: why nothing can be said; empty if something can.
        is_rounded: whether a step computed with numbers of 16 bits.
    """

    world_size: int
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    digits: list[dict[str, float]] = field(default_factory=list)
    unknown: str = ""
    is_rounded: bool = False

    @property
    def first(self) -> tuple[str, str]:
        """Stage and cause of the first difference; empty if there is none."""
        return (self.differences[0].stage, self.differences[0].cause) if self.differences else ("", "")

    @property
    def code(self) -> int:
        """0 for the answer of one process, 1 for another, 2 for no telling."""
        return 1 if self.differences else 2 if self.unknown else 0


def read_records(settings: VerifySettings, role: str, count: int) -> list[Record]:
    """What the processes of a run left, rank by rank; fewer than `count` where some left nothing."""
    files: list[Path] = [settings.record_file(rank, role) for rank in range(count)]
    return [torch.load(file, weights_only=True) for file in files if file.exists()]


def needed_batch_sizes(ranks: Sequence[Record], one: Record | None) -> tuple[int | None, ...]:
    """The batch size that each loader of torch needs in one process to hand out what all ranks had.

    Args:
        ranks: their records.
        one: that of one process which had such sizes, to correct them by; None for the first try.
    """
    made = ranks[0]["facts"]["made"]
    first = [each["steps"][0] for each in ranks if each["steps"]]
    should, factor = sum(map(rows_of, first)), float(len(ranks))
    if len(first) == len(ranks) and _reads_alike(ranks, first):
        should = rows_of(first[0])
        factor = 1.0
    if one is not None and one["steps"] and first:
        factor *= should / max(1, rows_of(one["steps"][0]))
    return tuple(None if size is None else max(1, round(size * factor)) for size in made)


def lacks_batch_size(ranks: Sequence[Record], one: Record) -> bool:
    """Whether one process had fewer samples in its first step than the ranks, of a loader without a batch size."""
    rows = sum(rows_of(each["steps"][0]) for each in ranks)
    return None in ranks[0]["facts"]["made"] and rows_of(one["steps"][0]) < rows


def train_apart(ranks: Sequence[Record]) -> bool:
    """Whether no engine holds a model, and ranks do the same work in their first step, or step by other gradients."""
    first = [each["steps"][0] for each in ranks if each["steps"]]
    if not first or len(first) < len(ranks) or any(each["facts"]["engines"] for each in ranks):
        return False
    gradients = measure_gradients(first, first[0], None, float(first[0]["precision"]))
    return bool(gradients.between.names) or _work_alike(ranks)


def _reads_alike(ranks: Sequence[Record], first: Sequence[Record]) -> bool:
    """Whether all ranks walk the same samples in the order of the data, as one process would."""
    loaders = ranks[0]["facts"]["loaders"]
    if any(loaders[batch["loader"]]["draws_order"] for batch in first[0]["batches"]):
        return False
    return measure_samples(first, first[0]).is_alike


def _judge_step(step: StepOfJob) -> Difference | None:
    """The first stage of a step that differs, or None where one process would have taken the same step."""
    apart, after = read_ranks(step), [read(step) for read in (read_settings, read_parameters, read_buffers)]
    if apart or not (step.gradients.used.names or step.gradients.between.names or any(after)):
        return apart
    before = (read_samples, read_passes, read_inputs, read_moved, read_outputs, read_unaveraged, read_gradients)
    return next(filter(None, itertools.chain((read(step) for read in before), after)), None)


def judge(
    ranks: Sequence[Record], one: Record, again: Record | None, failure: str = "", moved: Record | None = None
) -> Verdict:
    """Compare the run on N ranks with that of one process.

    Args:
        ranks: the records of the ranks.
        one: of one process.
        again: of one process with halved sums; None where that did not run.
        failure: the error with which the ranks ended, and one process did not.
        moved: of one process that evaluated what rank 0 evaluates; None where that did not run.
    """
    verdict = Verdict(len(ranks), is_rounded=any(each["rounded"] for each in one["steps"]))
    _judge_steps(verdict, each_step(ranks, one, again))
    if verdict.unknown:
        return verdict
    if not verdict.differences and failure:
        verdict.differences.append(_failed(verdict.steps + 1, ranks, failure))
    elif not verdict.differences:
        _judge_counts(verdict, ranks, one)
        if verdict.code == 0:
            others = (None if each is None else each["facts"] for each in (again, moved))
            verdict.differences, notes = judge_aftermath([each["facts"] for each in ranks], one["facts"], *others)
            verdict.notes.extend(notes)
    _note(verdict, ranks, one)
    return verdict


def _judge_steps(verdict: Verdict, steps: Iterable[StepOfJob]) -> None:
    """Up to the first that differs or of which nobody can tell."""
    for step in steps:
        verdict.unknown = _is_undetermined(step) or _is_made_by_ranks(step)
        if verdict.unknown:
            return
        verdict.steps = step.number
        if _cuts_pieces(step):
            verdict.digits.append({"gradients": 0.0})
            verdict.notes = [_PIECES]
            continue
        verdict.digits.append(_digits(step))
        found = _judge_step(step)
        if found is not None:
            verdict.differences.append(found)
            return


def _failed(step: int, ranks: Sequence[Record], failure: str) -> Difference:
    done = [rank for rank, each in enumerate(ranks) if each["facts"]["returned"]]
    if done:
        text = ", ".join(f"rank {rank} after {len(ranks[rank]['steps'])} steps" for rank in done)
        measured = f"the script came to its end on {text}, and other ranks continued: {failure}"
        return difference(step, "steps", "number-of-steps", measured)
    return difference(step, "steps", "fails", f"one process continues, and {len(ranks)} ranks end with: {failure}")


def _cuts_pieces(step: StepOfJob) -> bool:
    """Whether one process makes N times the backward passes of a rank, of the same samples, N times its gradient."""
    passes, world_size = len(step.losses.one), len(step.ranks)
    if not passes or any(len(each) * world_size != passes for each in step.losses.ranks):
        return False
    if step.samples.differ or read_ranks(step) is not None:
        return False
    factor = step.gradients.factor
    return factor is not None and abs(factor * world_size - 1) < 1e-3 and not step.gradients.between.names


def _is_undetermined(step: StepOfJob) -> str:
    """Why one process does not repeat itself; empty if it does."""
    if step.again is None:
        return ""
    samples = measure_samples([step.again], step.one)
    if samples.differ:
        return (
            f"step {step.number}: two runs at one process differ by themselves: they have other samples. Seed what "
            "draws them"
        )
    distance = distance_of_gradients(step.one, step.again)
    if distance > _MOST_NOISE:
        return (
            f"step {step.number}: two runs at one process differ by themselves, gradients by {distance:.1e}: chance or "
            "rounding (of float16) decides what the script computes; --double takes the rounding away where the script "
            "allows that"
        )
    return ""


def _has_own_data(step: StepOfJob) -> bool:
    """Whether an index gives one process the sample of rank 0, and another rank one that one process has nowhere."""
    one, *ranks = map(contents, (step.own_facts, *step.facts))
    sizes = {tuple(loader["samples"] for loader in facts["loaders"]) for facts in (step.own_facts, *step.facts)}
    alike = [{found[index] == one[index] for index in found.keys() & one.keys()} for found in ranks]
    has_others = any({*one.values()}.isdisjoint(found.values()) for found in ranks[1:])
    return len(sizes) == 1 and alike[0] == {True} and {False} in alike[1:] and has_others


def _is_made_by_ranks(step: StepOfJob) -> str:
    """Why one process has a part of the ranks' samples, where each rank makes its own; empty if it has them all."""
    if any(each["batches"] for each in step.ranks) and any(
        not each["batches"] and each["calls"] for each in step.ranks
    ):
        return (
            f"step {step.number}: ranks without a loader train on samples that another rank's loader has handed out "
            "(dispatch_batches), which cannot be told apart. Let each rank load its own (dispatch_batches=False)"
        )
    if step.own_facts["loaders"]:
        is_theirs = step.samples.differ and _has_own_data(step)
        return f"step {step.number}: each rank makes a dataset of its own. {_OF_ALL}" if is_theirs else ""
    rows, foreign = step.calls.rows, step.calls.foreign
    if not foreign or foreign < step.calls.unknown:
        return ""
    return (
        f"step {step.number}: no loader gives the samples, and each rank makes its own: one process makes {rows} of "
        f"them, and cannot be given the ranks' {foreign} others. {_OF_ALL}"
    )


def _digits(step: StepOfJob) -> dict[str, float]:
    losses, gradients = step.losses.sums("weighted"), distance_of_gradients(step.one, step.ranks[0])
    found = {"inputs": step.calls.inputs, "outputs": step.calls.outputs, "gradients": gradients}
    if losses is not None:
        found["loss"] = abs(losses[0] - losses[1]) / max(abs(losses[0]), abs(losses[1]), 1e-30)
    return found


def _judge_counts(verdict: Verdict, ranks: Sequence[Record], one: Record) -> None:
    counts = [len(each["steps"]) for each in ranks]
    own = len(one["steps"]) + int(one["facts"]["goes_on"])
    if len({own, *counts}) == 1:
        if own == 0:
            verdict.unknown = "no optimizer took a step, on any number of processes"
        return
    more, text = " or more" if one["facts"]["goes_on"] else "", ", ".join(map(str, counts))
    measured = f"steps of optimizers: one process {own}{more}, the ranks {text}"
    verdict.differences.append(difference(min([own, *counts]) + 1, "steps", "number-of-steps", measured))


def _unseen(ranks: Sequence[Record]) -> list[str]:
    """What the run did not reach."""
    facts = ranks[0]["facts"]
    if facts["end"]:
        return [f"end: {facts['end']}"]
    for number, loader in enumerate(facts["loaders"]):
        passes = [each for each in facts["passes"] if each["loader"] == number and each["keys"]]
        if loader["shuffles"] and len(passes) == 1 and passes[0]["trains"]:
            return [
                "epochs: one was seen. A sampler that shuffles needs set_epoch(epoch) before each further one; to have "
                "that compared, let the script begin a second epoch"
            ]
    return []


def _note(verdict: Verdict, ranks: Sequence[Record], one: Record) -> None:
    steps = one["steps"]
    given = sum(step["given"] for step in steps)
    if given:
        verdict.notes.append(
            f"random numbers drawn within the steps (dropout, noise), {given} times, were given to the one process as "
            "the ranks drew them: that N ranks draw other numbers than one is set aside"
        )
    if ranks[0]["facts"]["scales"]:
        verdict.notes.append(
            "float16: the scale of losses began at 1024 at most, by which those that are told are larger, and did not "
            "grow; how a dynamic scale skips steps is set aside"
        )
    begun = one["facts"]["begun"]
    if begun:
        verdict.notes.append(
            f"begin: before the first step, {len(begun)} parameters of one process ({', '.join(begun[:3])}) were not "
            "those of the ranks, and it was given theirs. If they are drawn without a seed, that is chance; if they "
            "are computed from samples, compute them from those of all ranks"
        )
    verdict.notes.extend(_unseen(ranks))
    if verdict.differences:
        return
    if _work_alike(ranks):
        verdict.notes.append(
            "samples: all ranks were given the same ones, so that N ranks do the work of one. If that is not "
            "meant, split the data: a DistributedSampler, or lockstep.DataLoader"
        )


def _work_alike(ranks: Sequence[Record]) -> bool:
    """Whether all ranks train on the same samples in their first steps, of a loader or without one."""
    first = [each["steps"][0] for each in ranks if each["steps"]]
    if len(first) < len(ranks):
        return False
    if any(each["batches"] for each in first):
        return measure_samples(first, first[0]).is_alike
    keys = [[call["keys"] for call in each["calls"]] for each in first]
    return any(keys[0]) and all(each == keys[0] for each in keys[1:])
