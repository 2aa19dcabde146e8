"""Finds the first stage of a step at which N ranks differ from one process.

Each function checks one stage, and returns a `Difference` if they differ there. The numbers decide; names of classes
(a batch normalization, LBFGS) only affect the advice. For gradients that are equal on all ranks, see `linear.py`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lockstep.tools.verify.compare import TIMES_NOISE, distances, measure_values
from lockstep.tools.verify.draws import PERMUTATIONS
from lockstep.tools.verify.samples import (
    Calls,
    Record,
    Samples,
    batches_of,
    contents,
    entered,
    indices_of,
    passes_are_shared_out,
)
from lockstep.tools.verify.step import StepOfJob, counted, parameters_of
from lockstep.tools.verify.words import Difference

__all__ = [
    "describe_draws",
    "read_buffers",
    "read_inputs",
    "read_moved",
    "read_others",
    "read_outputs",
    "read_parameters",
    "read_passes",
    "read_ranks",
    "read_samples",
    "read_settings",
    "read_unaveraged",
    "unlike_draws",
]


def _joined(values: Iterable[Any]) -> str:
    return ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value).lower() for value in values)


def _names(step: StepOfJob, names: Iterable[str | int], most: int = 3) -> str:
    """Names of buffers, or of parameters given by position."""
    known = dict(enumerate(step.one["names"]))
    plain = [name.split(":", 1)[-1] if isinstance(name, str) else known.get(name) or "?" for name in names]
    more = f" and {len(plain) - most} more" if len(plain) > most else ""
    return ", ".join(plain[:most]) + more


# ---- samples -----------------------------------------------------------------------------------------


def read_samples(step: StepOfJob) -> Difference | None:
    """Samples that differ from those of one process."""
    samples = step.samples
    # Samples that only one side fetched, and that no model received, were prefetched.
    is_ahead = samples.differ and 0 in (samples.missing, samples.extra) and step.has_same_rows
    if is_ahead or not samples.differ:
        return _all_walked(step) or _filled_late(step)
    begun = [_passes_begun(each, step.number) for each in step.runs.ranks]
    if len({*begun}) > 1:
        measured = f"by this step, the ranks have begun {_joined(begun)} passes over their data"
        return step.found("steps", "number-of-steps", measured)
    key, more = _cause_of_samples(step)
    measured = (
        f"one process had {counted(samples.one, 'sample')}, the ranks {_joined(samples.ranks)}; {samples.missing} of "
        f"one process's are missing, {samples.extra} are extra{more}"
    )
    return step.found("samples", key, measured, extra=counted(samples.extra, "sample"))


def _all_walked(step: StepOfJob) -> Difference | None:
    """Without a loader: all ranks have the same rows, and one process has other rows in more passes."""
    own, first, *others = (entered(each) for each in (step.one, *step.ranks))
    if step.one["batches"] or not first or any(each != first for each in others) or len(own) <= len(first):
        return None
    measured = f"one process had {counted(own.total(), 'row')}, every rank the same {first.total()}"
    return step.found("samples", "no-sampler", measured)


def _cause_of_samples(step: StepOfJob) -> tuple[str, str]:
    """The cause, and further measurements."""
    samples = step.samples
    loaders = [step.facts["loaders"][each["loader"]] for each in step.ranks[0]["batches"]]
    own, *ranks = (len(each["batches"]) for each in (step.one, *step.ranks))
    # If ranks accumulate over fewer passes, which add up to one process's, they also have fewer batches.
    is_shared_out = len({*ranks}) == 1 and passes_are_shared_out(step.one, step.ranks)
    if {*ranks} != {own} and not is_shared_out:
        return "skips", f"; batches before this step: one process {own}, the ranks {_joined(ranks)}"
    if samples.missing == 0 and _come_again(step):
        return "no-sampler" if samples.is_alike else "padded", ""
    if samples.is_alike or any(not each["splits"] and not each["own"] and _walks_all(step, each) for each in loaders):
        return "no-sampler", ""
    return _cause_of_others(step, loaders)


def _until(step: StepOfJob) -> list[Record]:
    """The batches of one process, and of each rank, up to this step."""
    runs = (step.runs.one, *step.runs.ranks)
    return [{"batches": batches_of(*each["steps"][: step.number])} for each in runs]


def _come_again(step: StepOfJob) -> bool:
    """Whether the ranks' additional samples were trained on before, because a sampler restarts."""
    own, *ranks = _until(step)
    seen = {key for batch in own["batches"] for _, key in batch["keys"]}
    return all(key in seen for batch in batches_of(*ranks) for _, key in batch["keys"])


def _walks_all(step: StepOfJob, loader: Record) -> bool:
    """Whether a rank iterates over as many samples as one process."""
    size, samples, batches = loader["batch_size"], loader["samples"], loader["batches"]
    is_there = samples in {each["samples"] for each in step.runs.one["facts"]["loaders"]}
    return is_there and bool(size and samples and batches and batches * size >= samples - size)


def _cause_of_others(step: StepOfJob, loaders: Sequence[Record]) -> tuple[str, str]:
    """The cause if samples are split, but differ."""
    one, ranks = step.runs.one, step.runs.ranks
    ones = [one["facts"]["loaders"][each["loader"]] for each in step.one["batches"]]
    sizes = ((own["batch_size"], each["batch_size"]) for own, each in zip(ones, loaders, strict=False) if each["own"])
    size, here = next(sizes, (0, 0))
    if size != here:
        return "batch-size", f"; the batch_size of lockstep.DataLoader is {size} on one process, and {here} here"
    apart = _epochs_apart(step)
    if apart:
        return "set-epoch", f"; the ranks' samplers had epochs {_joined(apart)}"
    if any(each["own"] for each in loaders):
        return "collate", ""
    fetched = indices_of(*step.ranks).keys()  # not the counts: a padded batch repeats some
    if not fetched or fetched != indices_of(step.one).keys():
        return "order", ""
    more = ", though the loaders fetched the same indices of the dataset"
    if _is_another_order(one, ranks):
        return "order", f"{more}: the ranks hold one dataset, and one process the same samples in another order"
    return "split" if any(_are_elsewhere(rank, one) for rank in ranks) else "drawn samples", more


def _epochs_apart(step: StepOfJob) -> Sequence[int | None]:
    """The first epochs of the step's samplers that differ between the ranks; empty if none do."""
    numbers = {batch["loader"] for batch in step.ranks[0]["batches"]}
    epochs = (
        [each["epoch"] for each in rank["facts"]["passes"] if each["loader"] in numbers] for rank in step.runs.ranks
    )
    return next((each for each in zip(*epochs, strict=False) if len(set(each)) > 1), ())


def _is_another_order(one: Record, ranks: Sequence[Record]) -> bool:
    """Whether the ranks together have each sample at one index, and one process has the same samples elsewhere."""
    own, found = contents(one["steps"]), contents([each for rank in ranks for each in rank["steps"]])
    clash = any(found[index] != key for rank in ranks for index, key in contents(rank["steps"]).items())
    return not clash and len({*found.values()}) == len(found) and {*found.values()} == {*own.values()}


def _are_elsewhere(rank: Record, one: Record) -> bool:
    """Whether most samples that a rank has, and one process has not in batches of their indices, it has elsewhere.

    In whole batches, because a collate_fn may sort the rows of a batch.
    """
    known, near = set[int](), defaultdict[tuple[int, int], set[int]](set)
    for indices, keys in _batches_by_index(one):
        known |= keys
        for index in indices:
            near[index] |= keys
    found = Counter(
        key in known
        for indices, keys in _batches_by_index(rank)
        for key in keys
        if all(index in near and key not in near[index] for index in indices)
    )
    return found[True] > found[False]


def _batches_by_index(run: Record) -> Iterator[tuple[list[tuple[int, int]], set[int]]]:
    """(loader and index of each sample, their contents) for each batch with known indices."""
    for batch in batches_of(*run["steps"]):
        if batch["indices"]:
            yield [(batch["loader"], index) for index in batch["indices"]], {key for key, _ in batch["keys"]}


def _filled_late(step: StepOfJob) -> Difference | None:
    """A padded batch that was fetched in an earlier step, as by Accelerate."""
    own, *ranks = _until(step)
    samples, counts = Samples(ranks, own), [entered(each).total() for each in (step.one, *step.ranks)]
    rows = [sum(batch["rows"] for batch in batches_of(each)) for each in (step.one, *step.ranks)]
    is_late = own["batches"] and rows[0] != counts[0] and rows[1:] != counts[1:]
    if not is_late or samples.missing or not samples.extra or sum(counts[1:]) <= counts[0] or not _come_again(step):
        return None
    measured = f"one process had {counted(counts[0], 'sample')}, the ranks {_joined(counts[1:])}"
    return step.found("samples", "padded", measured, extra=counted(samples.extra, "sample"))


# ---- inputs and outputs ------------------------------------------------------------------------------


def read_passes(step: StepOfJob) -> Difference | None:
    """More or fewer backward passes than in one process."""
    losses, counts = step.losses, [len(each) for each in step.losses.ranks]
    if max(each["closure"] for each in (step.one, *step.ranks)) > 1:  # Trainers pass a closure to every optimizer
        kind = step.ranks[0]["kind"]
        measured = (
            f"{kind} called its closure {len(losses.one)} times in one process, with a first loss of "
            f"{_joined(losses.one[:1])}, and {_joined(counts)} times on the ranks, with "
            f"{_joined(each[0] for each in losses.ranks if each)}"
        )
        return step.found("loss", "closure", measured, kind=kind)
    if set(counts) == {len(losses.one)} or step.is_cut_otherwise:
        return None
    measured = f"backward passes in this step: one process {len(losses.one)}, the ranks {_joined(counts)}"
    return step.found("loss", "passes", measured)


def read_inputs(step: StepOfJob) -> Difference | None:
    """Rows that enter a model and differ, although they come from the same samples."""
    calls = step.calls
    if step.samples.by_index or _joins(step) or not (calls.unknown or step.is_far(calls.inputs)):
        return None
    if calls.inputs and not calls.unknown:
        measured = f"the input of {calls.kind} differs by {calls.inputs:.1e}"
    else:
        count = calls.unknown or "some"
        measured = f"{count} input rows of {calls.kind} differ (one process has {calls.rows})"
    return _by_draws(step, "inputs", f"the samples are the same, but {measured};")


def _joins(step: StepOfJob) -> bool:
    """Whether the models' inputs do not have one row per sample: nodes of graphs, or packed tokens."""
    batches = batches_of(step.one, *step.ranks)
    return bool(batches) and all(batch["joins"] for batch in batches)


def _by_draws(step: StepOfJob, stage: str, measured: str) -> Difference:
    """Rows that differ because each rank draws them, or computes them from its other rows."""
    drawn, permuted = unlike_draws(step)
    measured = f"{measured} {describe_draws(drawn or permuted)}" if drawn or permuted else measured.rstrip(";")
    return step.found(stage, f"drawn {stage}" if drawn else f"batch {stage}", measured)


def unlike_draws(step: StepOfJob) -> tuple[Sequence[Record], Sequence[Record]]:
    """Draws of one process that differ from the ranks'; and permutations of a rank's rows, which always differ."""
    unlike = [*_unlike_draws(step), *_of_own_generators(step)]
    # Others permute something else, such as the pixels of an image.
    sizes = [*(batch["rows"] for batch in batches_of(step.one)), *(call["count"] for call in step.one["calls"])]
    permuted = [
        each
        for each in unlike
        if each["name"].endswith(PERMUTATIONS) and {*each["shape"][:1]} <= {*sizes} and not each["in_turn"]
    ]
    return [each for each in unlike if each not in permuted], permuted


def _unlike_draws(step: StepOfJob) -> Sequence[Record]:
    """Draws of the ranks that could not be given to one process."""
    is_by_pass = passes_are_shared_out(step.one, step.ranks)
    return [each for each in step.one["unlike_draws"] if not (is_by_pass and each["by_pass"])]


def _of_own_generators(step: StepOfJob) -> list[Record]:
    """Draws from the script's own generators that are neither equal everywhere nor those of one process's samples."""
    own, *ranks = ([tuple(each) for each in one["generated"]] for one in (step.one, *step.ranks))
    if all(each == own for each in ranks) or Counter(own) == sum(map(Counter, ranks), Counter()):
        return []
    return [
        {"name": name, "shape": [], "ranks": [[] for _ in ranks], "in_turn": False}
        for name in {name for name, _ in own}
    ]


def describe_draws(drawn: Sequence[Record]) -> str:
    """Describe the first of these draws, on one process and on the ranks."""
    first = drawn[0]
    ranks = " and ".join(str(each or "one number") for each in first["ranks"][:3]) or "nothing of the kind"
    name = first["name"].partition(" ")[0]
    return f"one process drew {name} of {first['shape'] or 'one number'}, the ranks {ranks}"


def read_outputs(step: StepOfJob) -> Difference | None:
    """Outputs that differ although the inputs do not."""
    return _outputs_of(step, step.calls, "calls")


def read_others(step: StepOfJob) -> Difference | None:
    """The same for models that are called but not trained, and their parameters."""
    calls = step.others
    if calls.unknown or step.is_far(calls.inputs):
        return None
    if step.is_far(calls.parameters):
        measured = f"{calls.kind} is called without being trained: its parameters differ by {calls.parameters:.1e}"
        if step.is_far(calls.apart):
            measured += f" from those in one process, and by {calls.apart:.1e} between ranks"
            return step.found("parameters", "ranks-differ untrained", measured)
        return step.found("loss", "kept-state model", f"{measured} from those in one process")
    return _outputs_of(step, calls, "others")


def _outputs_of(step: StepOfJob, calls: Calls, where: str) -> Difference | None:
    # The output for a part of a sample may depend on its other parts. If it depended on other samples, one process's
    # gradient would not be a sum of the ranks'.
    if not step.is_far(calls.outputs) or (_joins(step) and step.gradients.needed.is_good):
        return None
    name, kind = calls.culprit
    measured = f"the inputs are the same; the outputs of {calls.kind} for the same rows differ by {calls.outputs:.1e}."
    if math.isinf(calls.outputs):
        measured = f"the inputs are the same; {calls.kind} does not return a row per input, but its modules do."
    if kind:
        measured += f" The first module whose output differs is {name} ({kind})."
    if "BatchNorm" in (kind or calls.kind):
        return step.found("outputs", "batch-norm", measured)
    if step.padded:
        measured += f" {counted(step.padded, 'sample')} were padded to another length"
        return step.found("outputs", "padding outputs", measured)
    modes = [[call["resting"] for call in each[where]] for each in (step.one, *step.ranks)]
    if any(each != modes[0] for each in modes):
        own, *ranks = (each[0] if each else 0 for each in modes)
        measured += f" Modules in eval mode: one process {own}, the ranks {_joined(ranks)}."
        return step.found("outputs", "mode", measured)
    return _by_draws(step, "outputs", measured)


# ---- gradients ---------------------------------------------------------------------------------------


def read_unaveraged(step: StepOfJob) -> Difference | None:
    """Gradients that differ between ranks when the optimizer uses them."""
    between, first = step.gradients.between, step.ranks[0]
    if not between.names:
        return None
    measured = (
        f"the gradients of {len(between.names)} of {between.count} parameters differ between the ranks when "
        f"{first['kind']} uses them, by up to {between.worst:.1e} ({_names(step, between.names)})"
    )
    if any(each is not None for each in first["after"]) and not _are_apart(step, step.ranks, "after"):
        unlike = _unlike_draws(step)
        drawn = f"; {describe_draws(unlike)}" if unlike else ""
        return step.found("gradients", "changed", f"{measured}, but not after backward(){drawn}")
    if _come_together(step):
        return step.found("gradients", "own-steps", f"{measured}, but the parameters are equal again later")
    if not step.facts["engines"]:
        is_some = len(between.names) < between.count
        return step.found("gradients", "unwrapped some" if is_some else "unwrapped", measured)
    outside = [name for name in between.names if first["held"][name] is None]
    if outside:  # perhaps among others, if an engine waits for a module that the script has replaced
        return step.found("gradients", "unwrapped part", measured, names=_names(step, outside))
    if _called_engines(step).isdisjoint(first["held"][name] for name in between.names):
        return step.found("gradients", "inner-model", measured)
    is_part = len(between.names) < between.count or _is_averaged_in_part(step)
    return step.found("gradients", "past-engine" if is_part else "not-averaged", measured)


def _are_apart(step: StepOfJob, ranks: Sequence[Record], when: str) -> bool:
    """Whether the ranks' parameters differ from rank 0's; see `parameters_of`."""
    first, *others = (parameters_of(each, when) for each in ranks)
    return any(measure_values(first, each, step.precision).names for each in others)


def _come_together(step: StepOfJob) -> bool:
    """Whether parameters diverge in this or a later step of an optimizer, and a further step begins with equal ones."""
    steps = zip(*(each["steps"][step.number - 1 :] for each in step.runs.ranks), strict=False)
    own = [each for each in steps if each[0]["optimizer"] == step.one["optimizer"]]
    later = itertools.dropwhile(lambda each: not _are_apart(step, each, "end"), own)
    return any(not _are_apart(step, each, "begin") for each in itertools.islice(later, 1, None))


def _called_engines(step: StepOfJob) -> set[int]:
    """Engines that rank 0 has called since the last step of this step's optimizer."""
    steps = step.runs.ranks[0]["steps"]
    turns = len({each["optimizer"] for each in steps})
    return {engine for each in steps[max(0, step.number - turns) : step.number] for engine in each["engine_calls"]}


def _is_averaged_in_part(step: StepOfJob) -> bool:
    """Whether other ranks contribute to some of rank 0's backward passes, but not to others."""
    taken, passes = step.gradients.taken, len(step.ranks[0]["backwards"])
    averaged = {any(abs(each) > 1e-3 for each in taken.factors[passes + place :: passes]) for place in range(passes)}
    return taken.is_good and len(averaged) > 1


# ---- parameters and buffers --------------------------------------------------------------------------


def read_ranks(step: StepOfJob) -> Difference | None:
    """Ranks that begin with different parameters."""
    first, *others = (parameters_of(each, "begin") for each in step.ranks)
    for rank, other in enumerate(others, 1):
        found = measure_values(first, other, step.precision)
        if found.names:
            measured = (
                f"{len(found.names)} of {found.count} parameters of rank {rank} differ from rank 0's "
                f"({_names(step, found.names)}), by up to {found.worst:.1e}"
            )
            begun = [_passes_begun(each, step.number) for each in step.runs.ranks]
            if len({*begun}) == 1 and step.is_far(step.calls.apart) and not step.is_far(step.calls.entered):
                measured += f", though equal when {step.calls.kind} was called"
                return step.found("parameters", "moved called", measured)
            if len({*begun}) == 1:
                return _ranks_differ(step, measured)
            measured += f"; by this step, the ranks have begun {_joined(begun)} passes over their data"
            return step.found("steps", "number-of-steps", measured)
    return None


def _passes_begun(rank: Record, number: int) -> int:
    """How often a rank has begun to train on its data, up to a step."""
    batches = (batch for each in rank["steps"][:number] for batch in each["batches"])
    return len({(batch["loader"], batch["pass"]) for batch in batches})


def _ranks_differ(step: StepOfJob, measured: str) -> Difference:
    when = "before the first step" if step.number == 1 else "between the steps"
    if not step.facts["joined"]:
        return step.found("parameters", "ranks-differ alone", measured)
    return step.found("parameters", "ranks-differ", measured, when=when)


def read_moved(step: StepOfJob) -> Difference | None:
    """Parameters that differ when a model is called, although the step began with equal ones."""
    calls = step.calls
    if not step.is_far(calls.parameters):
        return _read_moved_buffers(step)
    measured = f"when {calls.kind} is called, its parameters differ from one process's by {calls.parameters:.1e}"
    if not calls.begins:
        return step.found("parameters", "moved", f"{measured}, though equal when the step began")
    if step.is_far(calls.apart):
        return _ranks_differ(step, f"{measured}, and between the ranks by {calls.apart:.1e}")
    measured += ", before the first backward pass of the step; they were equal after the previous step"
    return step.found("parameters", "moved between", measured)


def _read_moved_buffers(step: StepOfJob) -> Difference | None:
    """Buffers that differ when a model is called, although the step began with equal ones."""
    calls = step.calls
    if step.number == 1 or not step.is_far(calls.buffers_moved):
        return None
    measured = (
        f"when {calls.kind} is called, its buffers differ from one process's by {calls.buffers_moved:.1e}; they were "
        "equal after the previous step"
    )
    return step.found("buffers", "buffers between", measured)


def read_settings(step: StepOfJob) -> Difference | None:
    """Settings of an optimizer that differ from those of one process."""
    for rank, other in enumerate(step.ranks):
        groups = zip(step.one["settings"], step.ranks[0]["settings"], other["settings"], strict=False)
        for number, (own, first, theirs) in enumerate(groups):
            name = next((name for name in own if name in theirs and _is_set_apart(step, own[name], theirs[name])), None)
            if name is None:
                continue
            measured = f"{name} of group {number} is {own[name]} with one process"
            if rank:
                measured += f" and on rank 0, but {theirs[name]} on rank {rank}"
                return step.found("parameters", "settings on some", measured, name=name)
            measured += f", but {first[name]} on rank 0 of {len(step.ranks)}"
            return step.found("parameters", "settings", measured, name=name)
    return None


def _is_set_apart(step: StepOfJob, a: Any, b: Any) -> bool:
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return bool(a != b)
    return step.is_far(abs(a - b) / max(abs(a), abs(b), 1e-30))  # a setting may be computed from a loss, with rounding


def read_parameters(step: StepOfJob) -> Difference | None:
    """Parameters after the step, relative to how far it moved them."""
    for rank, ranks in enumerate(step.ranks):
        wrong = _stepped_apart(step, ranks)
        if wrong:
            measured = (
                f"{len(wrong)} of {len(step.one['names'])} parameters{f' of rank {rank}' if rank else ''} differ "
                f"after the step ({_names(step, wrong)}), by up to {max(wrong.values()):.1e} of their change"
            )
            return step.found("parameters", "optimizer", measured, kind=ranks["kind"])
    return None


def _stepped_apart(step: StepOfJob, ranks: Record) -> dict[int, float]:
    """Parameters of a rank that differ from one process's, with the difference relative to the step's change."""
    own, theirs = (parameters_of(each, "end") for each in (step.one, ranks))
    begin = parameters_of(step.one, "begin")
    again = own if step.again is None else parameters_of(step.again, "end")
    wrong, unsure = dict[int, float](), _rounded_only(step, ranks)
    for name, value in own.items():
        other = theirs.get(name)
        if other is None or other.shape != value.shape or name in unsure:
            continue
        moved, off, noise = (float((value - each).abs().max()) for each in (begin[name], other, again[name]))
        least = max(1e3 * step.precision, float(step.one["precision"])) * float(value.abs().max()) + TIMES_NOISE * noise
        part = off / moved if moved else math.inf
        if off > least and step.is_far(part):
            wrong[name] = part
    return wrong


def _rounded_only(step: StepOfJob, ranks: Record) -> set[int]:
    """Parameters whose gradients are only rounding, and differ: optimizers that normalize turn it into steps."""
    own, theirs = (parameters_of(each, "used") for each in (step.one, ranks))
    sizes = {name: float(each.abs().max()) for name, each in own.items() if each is not None}
    least = 100 * step.precision * max(sizes.values(), default=0.0)
    both = {name: theirs[name] for name in sizes if theirs.get(name) is not None}
    return {
        name
        for name, other in both.items()
        if max(sizes[name], float(other.abs().max())) <= least and not own[name].equal(other)
    }


def read_buffers(step: StepOfJob) -> Difference | None:
    """Buffers that differ after the step."""
    own, theirs = step.one["buffers"], step.ranks[0]["buffers"]
    names = [name for name in theirs if name in own]
    noise = {} if step.again is None else distances(own, step.again["buffers"])
    a, b = ({name: each[name] for name in names} for each in (theirs, own))
    found = measure_values(a, b, step.precision, noise)
    if not found.names and step.is_far(step.others.buffers):
        measured = f"the buffers of {step.others.kind}, which is not trained, differ by {step.others.buffers:.1e}"
        key = "buffers" if step.is_far(step.others.buffers_apart) else "buffers combined"
        return step.found("buffers", key, f"{measured} after it was called")
    if not found.names:
        return None
    measured = (
        f"{len(found.names)} of {len(own)} buffers differ after the step ({_names(step, found.names)}), by up to "
    )
    return step.found("buffers", "buffers", f"{measured}{found.worst:.1e}")
