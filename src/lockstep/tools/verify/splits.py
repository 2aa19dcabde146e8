"""Why the samples of a step are not those of one process: read from which are missing, too many, or others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.tools.verify.samples import contents, have_same_indices
from lockstep.tools.verify.step import StepOfJob, counted
from lockstep.tools.verify.words import Difference

__all__ = ["read_samples"]


def read_samples(step: StepOfJob) -> Difference | None:
    """Samples that are not those of one process."""
    samples = step.samples
    if not samples.differ:
        return _filled_late(step)
    key, more = _cause(step)
    measured = (
        f"one process had {counted(samples.one, 'sample')}, the ranks {_joined(samples.ranks)}; {samples.missing} of "
        f"one process's are missing, {samples.extra} are too many{more}"
    )
    return step.found("samples", key, measured, extra=counted(samples.extra, "sample"))


def _joined(numbers: Iterable[Any]) -> str:
    return ", ".join(map(str, numbers))


def _cause(step: StepOfJob) -> tuple[str, str]:
    """Which cause, and what else was measured."""
    samples = step.samples
    loaders = [step.facts[0]["loaders"][each["loader"]] for each in step.ranks[0]["batches"]]
    own, *ranks = (len(each["batches"]) for each in (step.one, *step.ranks))
    if {*ranks} != {own}:
        return "skips", f"; batches before this step: one process {own}, the ranks {_joined(ranks)}"
    is_filled = samples.repeated == samples.extra or any(each["padding"] for each in loaders)
    if samples.missing == 0 and is_filled:
        return "no-sampler" if samples.is_alike else "padded", ""
    if samples.is_alike or any(not each["splits"] and not each["own"] and _walks_all(step, each) for each in loaders):
        return "no-sampler", ""
    return _cause_of_others(step, loaders)


def _cause_of_others(step: StepOfJob, loaders: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Of samples that are split, and are others."""
    ones = [step.own_facts["loaders"][each["loader"]]["batch_size"] for each in step.one["batches"]]
    sizes = ((one, each["batch_size"]) for one, each in zip(ones, loaders, strict=False) if each["own"])
    size, here = next(sizes, (0, 0))
    if size != here:
        return "batch-size", f"; the batch_size of lockstep.DataLoader is {size} on one process, and {here} here"
    told = zip(*([each["epoch"] for each in facts["passes"]] for facts in step.facts), strict=False)
    apart = next((each for each in told if len(set(each)) > 1), None)
    if apart is not None:
        return "set-epoch", f"; the ranks' samplers were told epochs {_joined(apart)}"
    if any(each["own"] for each in loaders):
        return "collate", ""
    if have_same_indices(step.ranks, step.one):
        key = "split" if _are_elsewhere(step) else "drawn samples"
        return key, ", though the loaders fetched the same indices of the dataset"
    return "order", ""


def _are_elsewhere(step: StepOfJob) -> bool:
    """Whether what a rank has at an index is what one process has at another, and not there."""
    own, *ranks = map(contents, (step.own_facts, *step.facts))
    known = {*own.values()}
    return any(key in known and own.get(index, key) != key for found in ranks for index, key in found.items())


def _walks_all(step: StepOfJob, loader: Mapping[str, Any]) -> bool:
    """Whether a rank walks as many samples as there are in one process."""
    if loader["samples"] not in {each["samples"] for each in step.own_facts["loaders"]}:
        return False
    size, samples, batches = loader["batch_size"], loader["samples"], loader["batches"]
    return bool(size and samples and batches and batches * size >= samples - size)


def _filled_late(step: StepOfJob) -> Difference | None:
    """A batch that was filled up, and fetched in the step before, as Accelerate does."""
    own, *ranks = (_entered(each) for each in (step.one, *step.ranks))
    more = [key for each in ranks for key in each]
    rows = [sum(len(batch["keys"]) for batch in each["batches"]) for each in (step.one, *step.ranks)]
    is_late = step.own_facts["loaders"] and rows[0] != len(own) and rows[1:] != list(map(len, ranks))
    seen = {key for each in step.own_facts["steps"] for key in _entered(each)}
    if not is_late or not set(own) <= set(more) <= seen or len(more) <= len(own):
        return None
    measured = f"one process had {counted(len(own), 'sample')}, the ranks {_joined(map(len, ranks))}"
    return step.found("samples", "padded", measured, extra=counted(len(more) - len(own), "sample"))


def _entered(step: Mapping[str, Any]) -> list[int]:
    """The rows that entered models."""
    return [key for call in step["calls"] for key in call["keys"]]
