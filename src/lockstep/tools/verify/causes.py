"""What a measurement means, and what to write: the first stage of a step at which N ranks part from one process.

Each function reads one stage, and answers with a `Difference` if that is where they part. The numbers decide; names of
classes (a batch normalization, LBFGS) only word the advice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.tools.verify.compare import (
    TIMES_NOISE,
    Calls,
    Gradients,
    Losses,
    distances,
    far,
    measure_values,
)
from lockstep.tools.verify.draws import PERMUTATIONS
from lockstep.tools.verify.samples import Samples

__all__ = [
    "DECIDE",
    "Difference",
    "StepOfJob",
    "VerifiedJob",
    "counted",
    "describe_draws",
    "read_buffers",
    "read_inputs",
    "read_moved",
    "read_outputs",
    "read_parameters",
    "read_passes",
    "read_ranks",
    "read_settings",
    "read_unaveraged",
    "unlike_draws",
]

_SINGLE = 2.0**-23  # the eps of float32


@dataclass(frozen=True)
class Difference:
    """Where N ranks part from one process, and why.

    Attributes:
        step: number of the optimizer step, from 1; 0 for what belongs to none.
        stage: as in the table of docs/verify.md.
        cause: a short name, the same in every report.
        measured: what was measured, with numbers.
        meaning: what follows from it.
        advice: what to write.
        lines: of the script, where what differs was fetched, called, computed or written.
    """

    step: int
    stage: str
    cause: str
    measured: str
    meaning: str
    advice: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerifiedJob:
    """What is known of the whole run.

    Attributes:
        facts: of each rank's run.
        one: of the one process.
    """

    facts: tuple[Mapping[str, Any], ...]
    one: Mapping[str, Any]


@dataclass(frozen=True)
class StepOfJob:
    """One step, of the ranks and of one process.

    Attributes:
        number: from 1.
        job: to which it belongs.
        ranks: what each rank recorded.
        one: what one process did.
        again: the same with halved sums, or None.
        noise: what rounding does to outputs.
    """

    number: int
    job: VerifiedJob
    ranks: tuple[Mapping[str, Any], ...]
    one: Mapping[str, Any]
    again: Mapping[str, Any] | None
    noise: float

    @property
    def precision(self) -> float:
        """Of the arithmetic; what numbers of 16 bits take from it is noise."""
        return _SINGLE if self.one["single"] else min(float(self.one["precision"]), _SINGLE)

    @property
    def rounding(self) -> float:
        """The relative difference up to which outputs, and what is made of them, count as the same."""
        return TIMES_NOISE * self.noise

    def found(self, stage: str, cause: str, measured: str, meaning: str, advice: str) -> Difference:
        """A difference of this step."""
        lines = self.ranks[0]["lines"].get(_EVENTS.get(stage, ""), ())
        return Difference(self.number, stage, cause, measured, meaning, advice, tuple(lines))


# ---- words -------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    return f"{value:.6g}"


def _each(values: Sequence[float | None]) -> str:
    return ", ".join("none" if value is None else _number(value) for value in values)


def _names(names: Sequence[str], most: int = 3) -> str:
    plain = [name.split(":", 1)[-1] or "?" for name in names]
    more = f" and {len(plain) - most} more" if len(plain) > most else ""
    return ", ".join(plain[:most]) + more


def counted(count: int, word: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


# What the script does at each stage, whose lines are told.
_EVENTS = {
    "samples": "batch",
    "inputs": "call",
    "outputs": "call",
    "buffers": "call",
    "loss": "backward",
    "gradients": "backward",
    "parameters": "step",
}
DECIDE = "decide what is skipped, and when to step, by what all ranks have (lockstep.mean, lockstep.sum)"
_WRAP = "wrap the model that holds them in DistributedDataParallel, and call that"


# ---- the stages --------------------------------------------------------------------------------------


def _parameters_of(step: Mapping[str, Any], when: str) -> dict[str, Any]:
    return {f"{place}:{name}": value for place, (name, value) in enumerate(zip(step["names"], step[when], strict=True))}


def read_ranks(step: StepOfJob) -> Difference | None:
    """Ranks that begin with other parameters than each other."""
    first = _parameters_of(step.ranks[0], "begin")
    for rank, other in enumerate(step.ranks[1:], 1):
        found = measure_values(first, _parameters_of(other, "begin"), step.precision)
        if found.names:
            return _ranks_differ(
                step,
                f"{len(found.names)} of {found.count} parameters of rank {rank} are not those of rank 0 "
                f"({_names(found.names)}), by up to {found.worst:.1e}",
            )
    return None


def _ranks_differ(step: StepOfJob, measured: str) -> Difference:
    when = "before the first step" if step.number == 1 else "between the steps"
    return step.found(
        "parameters",
        "ranks-differ",
        measured,
        f"the ranks have other parameters {when}: each has drawn, loaded or changed its own, or they were averaged by "
        "nobody",
        "draw what changes parameters from a generator that all ranks seed alike, let all of them load the same file, "
        "and " + _WRAP,
    )


def read_passes(step: StepOfJob, losses: Losses) -> Difference | None:
    """Backward passes that are more or fewer than in one process."""
    counts = [len(each) for each in losses.ranks]
    if max(each["closure"] for each in (step.one, *step.ranks)) > 1:  # Trainers give a closure to any optimizer
        return _by_closure(step, losses, counts)
    if len(set(counts)) == 1 and counts[0] == len(losses.one):
        return None
    return step.found(
        "loss",
        "passes",
        f"backward passes in this step: one process {len(losses.one)}, the ranks "
        f"{_each([float(each) for each in counts])}",
        "ranks skip batches, or accumulate over another number of them, than one process",
        DECIDE,
    )


def _by_closure(step: StepOfJob, losses: Losses, counts: Sequence[int]) -> Difference:
    kind = step.ranks[0]["kind"]
    return step.found(
        "loss",
        "closure",
        f"{kind} called its closure {len(losses.one)} times in one process and {', '.join(map(str, counts))} times on "
        f"the ranks; it first returned {_each(losses.one[:1])} there, and "
        f"{_each([each[0] for each in losses.ranks if each])} here",
        f"{kind} decides by the loss that the closure returns, which is that of each rank's own samples",
        "return lockstep.mean(loss * len(y), len(y)) from the closure, after loss.backward()",
    )


def read_inputs(step: StepOfJob, calls: Calls) -> Difference | None:
    """Rows that enter a model, made of the same samples, and are others."""
    if not calls.unknown and not far(calls.inputs, step.noise, step.precision):
        return None
    drawn, permuted = unlike_draws(step)
    measured = (
        f"the samples are the same, but {calls.unknown or 'some'} rows that enter {calls.kind} are not "
        f"(one process has {calls.rows})"
    )
    if calls.inputs and not calls.unknown:
        measured = (
            f"the samples are the same, but what is made of them and enters {calls.kind} differs by {calls.inputs:.1e}"
        )
    if drawn:
        return step.found(
            "inputs",
            "drawn",
            f"{measured}; {describe_draws(drawn)}",
            "each rank draws its own numbers, where one process draws once for all samples",
            "draw a row for each sample (randn(len(x), …)), or once per step from a generator that all ranks "
            "seed alike",
        )
    return step.found(
        "inputs",
        "batch",
        f"{measured}; {describe_draws(permuted)}" if permuted else measured,
        "they are computed from the other rows of a rank's batch (mixed with them, or normalised by their mean or "
        "maximum), or cut by a constant number of rows",
        "compute it from the batch of all ranks (lockstep.all_gather, lockstep.mean), or for each sample in the "
        "dataset",
    )


def unlike_draws(step: StepOfJob) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Numbers that one process has drawn otherwise, and permutations: of a rank's rows, whoever seeds them."""
    unlike = [*step.one["unlike_draws"], *_of_own_generators(step)]
    permuted = [each for each in unlike if each["name"].endswith(PERMUTATIONS)]
    return [each for each in unlike if each not in permuted], permuted


def _of_own_generators(step: StepOfJob) -> list[Mapping[str, Any]]:
    """What generators of the script's own drew that is neither the same everywhere nor of one process's samples."""
    own, *ranks = ([tuple(each) for each in one["generated"]] for one in (step.one, *step.ranks))
    if all(each == own for each in ranks) or Counter(own) == sum(map(Counter, ranks), Counter()):
        return []
    return [{"name": name, "shape": [], "ranks": [[] for _ in ranks]} for name in {name for name, _ in own}]


def describe_draws(drawn: Sequence[Mapping[str, Any]]) -> str:
    """The first of some draws, on one process and on the ranks, in words."""
    first = drawn[0]
    ranks = " and ".join(str(each or "one number") for each in first["ranks"][:3]) or "nothing of the kind"
    return f"one process drew {first['name']} of {first['shape'] or 'one number'} where the ranks drew {ranks}"


def read_moved(step: StepOfJob, calls: Calls) -> Difference | None:
    """Parameters that differ when a model is called, though the step began with the same."""
    if not far(calls.parameters, step.noise, step.precision):
        return None
    measured = f"when {calls.kind} is called, its parameters are not those of one process, by {calls.parameters:.1e}"
    if calls.begins and far(calls.apart, step.noise, step.precision):
        return _ranks_differ(step, f"{measured}, and of one rank not those of another, by {calls.apart:.1e}")
    if calls.begins:
        return step.found(
            "parameters",
            "moved",
            f"{measured}, before the first backward pass of the step; the step before ended with the same",
            "they are changed between the steps by what a rank has itself, such as weights that are put back or "
            "replaced by its own samples",
            "make the change of what all ranks have: lockstep.mean(total, count), lockstep.all_gather(rows)",
        )
    return step.found(
        "parameters",
        "moved",
        f"{measured}, though the step began with the same",
        "they are changed within the step by what each rank has itself, such as its own gradients (sharpness-aware "
        "steps, perturbations, inner loops)",
        "make the change of what all ranks have: gradients that are averaged, so outside of no_sync",
    )


def read_outputs(step: StepOfJob, calls: Calls, samples: Samples) -> Difference | None:
    """Outputs that differ though the inputs do not."""
    if not far(calls.outputs, step.noise, step.precision):
        return None
    name, kind = calls.culprit
    measured = f"the inputs are the same; what {calls.kind} returns for the same rows differs by {calls.outputs:.1e}."
    if math.isinf(calls.outputs):
        measured = f"the inputs are the same; {calls.kind} returns no row for each of them, and its modules do."
    if kind:
        measured += f" The first module that returns something else is {name} ({kind})."
    if "BatchNorm" in kind:
        return step.found(
            "outputs",
            "batch-norm",
            measured,
            "it normalizes over this rank's rows, and one process over all",
            "lockstep.convert_sync_batchnorm(model) before the model is wrapped (torch.nn.SyncBatchNorm on GPUs)",
        )
    if samples.padded:
        return step.found(
            "outputs",
            "padding",
            f"{measured} {counted(samples.padded, 'sample')} were padded to another length",
            "the model sees the padding, which a rank makes as long as the longest of its own samples",
            "pad to one length, or mask the padding",
        )
    modes = [[call["resting"] for call in each["calls"]] for each in (step.one, *step.ranks)]
    if any(each != modes[0] for each in modes):
        counts = [each[0] if each else 0 for each in modes]
        return step.found(
            "outputs",
            "mode",
            f"{measured} Modules in eval mode: one process {counts[0]}, the ranks {', '.join(map(str, counts[1:]))}.",
            "parts of the model are in eval() on some ranks alone, where dropout and batch normalization are off",
            "call model.train() on all ranks, after an evaluation by one of them too",
        )
    drawn, permuted = unlike_draws(step)
    if drawn:
        return step.found(
            "outputs",
            "drawn",
            f"{measured} {describe_draws(drawn)}",
            "each rank draws its own numbers, within forward() or handed to it",
            "draw them from a generator that all ranks seed alike",
        )
    return step.found(
        "outputs",
        "batch",
        f"{measured} {describe_draws(permuted)}" if permuted else measured,
        "rows are compared with each other or mixed within forward(), or a statistic of this rank's rows is "
        "taken there",
        "lockstep.all_gather(x) where the rows meet, or lockstep.mean(total, count) for a statistic",
    )


def read_unaveraged(step: StepOfJob, gradients: Gradients) -> Difference | None:
    """Gradients that differ between ranks when the optimizer takes them."""
    between = gradients.between
    if not between.names:
        return None
    facts = step.job.facts[0]
    measured = (
        f"the gradients of {len(between.names)} of {between.count} parameters differ between the ranks when "
        f"{step.ranks[0]['kind']} takes them, by up to {between.worst:.1e} ({_names(between.names)})"
    )
    held = step.ranks[0]["held"]
    outside = [name for name in between.names if not held[int(name.split(":", 1)[0])]]
    after = [each["after"] for each in step.ranks]
    if after[0] and not any(measure_values(after[0], each, step.precision).names for each in after[1:]):
        drawn = f"; {describe_draws(step.one['unlike_draws'])}" if step.one["unlike_draws"] else ""
        return step.found(
            "gradients",
            "changed",
            f"{measured}, and did not after backward(){drawn}",
            "gradients were averaged, and then each rank changed its own (noise, a limit or a factor of its own)",
            "change them by what all ranks have (lockstep.mean), and draw from a generator that all ranks seed alike",
        )
    if not facts["engines"]:
        return step.found("gradients", "unwrapped", measured, "gradients are not averaged: no engine was made", _WRAP)
    if outside:  # and others, where an engine waits for what the script has put another module for
        return step.found(
            "gradients",
            "unwrapped",
            measured,
            f"no engine holds {_names(outside)}, and so nobody averages their gradients",
            "let one module hold the model and the criterion, and wrap that once requires_grad is set",
        )
    return step.found("gradients", *_past_engine(step, gradients, measured))


def _past_engine(step: StepOfJob, gradients: Gradients, measured: str) -> tuple[str, str, str, str]:
    if not any(step.ranks[0]["engine_calls"]):
        return (
            "inner-model",
            measured,
            "the model within the engine was called, and the engine was not: it averages what its own forward() leads "
            "to",
            "call the wrapped model, not model.module",
        )
    factors, passes = gradients.taken.factors, len(step.ranks[0]["backwards"])
    averaged = {any(abs(each) > 1e-3 for each in factors[passes + number :: passes]) for number in range(passes)}
    if len(gradients.between.names) < gradients.between.count or (gradients.taken.is_good and len(averaged) > 1):
        return (
            "past-engine",
            measured,
            "a part of these gradients came past the engine: by another backward pass, by hand, or under no_sync",
            "compute it with the wrapped model, and add up all losses before one backward() that averages; or leave "
            "no_sync() before the last backward() of each window",
        )
    return (
        "not-averaged",
        measured,
        "the engine was called, and averaged nothing: under no_sync up to the step, by gradients taken by hand "
        "(torch.autograd.grad), or in a group of one rank",
        "let the last backward pass before each step average (outside of no_sync), and take gradients by backward()",
    )


# ---- after the gradients -----------------------------------------------------------------------------


def read_settings(step: StepOfJob) -> Difference | None:
    """Settings of an optimizer that are not those of one process."""
    own = step.one["settings"]
    for rank, other in enumerate(step.ranks):
        for number, (mine, theirs) in enumerate(zip(own, other["settings"], strict=False)):
            for name in mine:
                if name in theirs and _is_far(step, mine[name], theirs[name]):
                    if rank:
                        return _on_some_ranks(step, name, number, rank)
                    return step.found(
                        "parameters",
                        "settings",
                        f"{name} of group {number} is {mine[name]} with one process, and {theirs[name]} on rank "
                        f"{rank} of {len(step.ranks)}",
                        f"{name} depends on the number of ranks (a schedule that steps once for each, as one that "
                        "Accelerate has prepared), or on what one rank has seen (a schedule by its own loss)",
                        f"set {name} without the number of ranks, and let schedules go by what all ranks have "
                        "(lockstep.mean)",
                    )
    return None


def _on_some_ranks(step: StepOfJob, name: str, number: int, rank: int) -> Difference:
    values = [each["settings"][number][name] for each in (step.ranks[0], step.ranks[rank])]
    return step.found(
        "parameters",
        "settings",
        f"{name} of group {number} is {values[0]} with one process and on rank 0, and {values[1]} on rank {rank}",
        f"{name} is set or scheduled on some ranks alone (if rank == 0: scheduler.step()), or by what one has seen",
        f"set {name} on all ranks alike, by what all of them have (lockstep.mean)",
    )


def _is_far(step: StepOfJob, a: Any, b: Any) -> bool:
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return bool(a != b)
    return far(abs(a - b) / max(abs(a), abs(b), 1e-30), step.noise, step.precision)  # a loss's rounding may be in it


def read_parameters(step: StepOfJob) -> Difference | None:
    """Parameters after the step, against how far it moved them."""
    for rank, ranks in enumerate(step.ranks):
        wrong, worst = _stepped_apart(step, ranks)
        if wrong:
            kind, whose = ranks["kind"], f" of rank {rank}" if rank else ""
            return step.found(
                "parameters",
                "optimizer",
                f"{len(wrong)} of {len(step.one['names'])} parameters{whose} differ after the step ({_names(wrong)}), "
                f"by up to {worst:.1e} of what it moved them",
                f"the same gradients make other steps: {kind} goes by something that each rank has of its own, such as "
                "a state that one rank alone has loaded",
                "give the optimizer what all ranks have; a closure returns lockstep.mean(loss * len(y), len(y))",
            )
    return None


def _stepped_apart(step: StepOfJob, ranks: Mapping[str, Any]) -> tuple[list[str], float]:
    """Parameters of a rank that are not those of one process, and by how much of what the step moved them."""
    own, theirs = (_parameters_of(each, "end") for each in (step.one, ranks))
    begin = _parameters_of(step.one, "begin")
    again = None if step.again is None else _parameters_of(step.again, "end")
    wrong, worst, unsure = list[str](), 0.0, _rounded_only(step, ranks)
    for name, value in own.items():
        other = theirs.get(name)
        if other is None or other.shape != value.shape or name in unsure:
            continue
        moved = float((value - begin[name]).abs().max())
        off = float((value - other).abs().max())
        noise = 0.0 if again is None else float((value - again[name]).abs().max())
        least = max(1e3 * step.precision, float(step.one["precision"])) * float(value.abs().max()) + TIMES_NOISE * noise
        if off > least and far(off / moved if moved else float("inf"), step.noise, step.precision):
            wrong.append(name)
            worst = max(worst, off / moved if moved else float("inf"))
    return wrong, worst


def _rounded_only(step: StepOfJob, ranks: Mapping[str, Any]) -> set[str]:
    """Parameters whose gradients are rounding alone, and another one: optimizers that normalize make steps of it."""
    own, theirs = (_parameters_of(each, "used") for each in (step.one, ranks))
    most = max((float(each.abs().max()) for each in own.values() if each is not None), default=0.0)
    pairs = {
        name: (each, theirs[name]) for name, each in own.items() if each is not None and theirs.get(name) is not None
    }
    return {
        name
        for name, (one, other) in pairs.items()
        if max(float(each.abs().max()) for each in (one, other)) <= 100 * step.precision * most and not one.equal(other)
    }


def read_buffers(step: StepOfJob) -> Difference | None:
    """Buffers that differ after the step."""
    own, theirs = step.one["buffers"], step.ranks[0]["buffers"]
    noise = {} if step.again is None else distances(own, step.again["buffers"])
    found = measure_values(
        theirs, {name: value for name, value in own.items() if name in theirs}, step.precision, noise
    )
    names = [name for name in found.names if name in own and name in theirs]
    if not names:
        return None
    return step.found(
        "buffers",
        "buffers",
        f"{len(names)} of {len(own)} buffers differ after the step ({_names(names)}), by up to {found.worst:.1e}",
        "they follow the samples of one rank, where one process takes those of the whole batch",
        "update them by the samples of all ranks (lockstep.all_gather within forward()); for BatchNorm "
        "lockstep.convert_sync_batchnorm",
    )
