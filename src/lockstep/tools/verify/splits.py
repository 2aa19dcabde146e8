"""Why the samples of a step are not those of one process: read from which are missing, too many, or others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.tools.verify.causes import DECIDE, Difference, StepOfJob, counted
from lockstep.tools.verify.samples import Samples, have_same_indices

__all__ = ["read_samples"]


def read_samples(step: StepOfJob, samples: Samples) -> Difference | None:
    """Samples that are not those of one process."""
    if not samples.differ:
        return _filled_late(step)
    ranks = ", ".join(map(str, samples.ranks))
    measured = (
        f"one process had {counted(samples.one, 'sample')}, the ranks {ranks}; {samples.missing} of one process's are "
        f"missing, {samples.extra} are too many"
    )
    loaders = [step.job.facts[0]["loaders"][each["loader"]] for each in step.ranks[0]["batches"]]
    batches = [len(each["batches"]) for each in (step.one, *step.ranks)]
    if len(set(batches)) > 1:
        return _skipped(step, batches, measured)
    is_filled = samples.repeated == samples.extra or any(each["padding"] for each in loaders)
    if samples.missing == 0 and is_filled:
        return _unsplit(step, measured) if samples.is_alike else _filled(step, samples.extra, measured)
    return _other_samples(step, samples, loaders, measured)


def _filled_late(step: StepOfJob) -> Difference | None:
    """A batch that was filled up, and fetched in the step before, as Accelerate does."""
    own, *ranks = (_entered(each) for each in (step.one, *step.ranks))
    more = [key for each in ranks for key in each]
    rows = [sum(len(batch["keys"]) for batch in each["batches"]) for each in (step.one, *step.ranks)]
    is_late = step.job.one["loaders"] and rows[0] != len(own) and rows[1:] != list(map(len, ranks))
    seen = {key for each in step.job.one["steps"] for key in _entered(each)}
    if not is_late or not set(own) <= set(more) <= seen or len(more) <= len(own):
        return None
    measured = f"one process had {counted(len(own), 'sample')}, the ranks {', '.join(str(len(each)) for each in ranks)}"
    return _filled(step, len(more) - len(own), measured)


def _entered(step: Mapping[str, Any]) -> list[int]:
    """The rows that entered models."""
    return [key for call in step["calls"] for key in call["keys"]]


def _other_samples(
    step: StepOfJob, samples: Samples, loaders: Sequence[Mapping[str, Any]], measured: str
) -> Difference:
    if samples.is_alike or any(not each["splits"] and not each["own"] and _walks_all(step, each) for each in loaders):
        return _unsplit(step, measured)
    told = _other_sizes(step, loaders, measured) or _other_epochs(step, measured)
    if told is not None:
        return told
    if any(each["own"] for each in loaders):
        return step.found(
            "samples",
            "collate",
            measured,
            "lockstep.DataLoader fetches the samples of one process, so what is made of them differs: collate_fn "
            "mixes the rows that a rank holds, or leaves some out, or something is drawn that no sample owns",
            "let collate_fn join samples and nothing else; mix after lockstep.all_gather, or draw in __getitem__",
        )
    if have_same_indices(step.ranks, step.one):
        return step.found(
            "samples",
            "drawn",
            f"{measured}, though the loaders fetched the same indices of the dataset",
            "what the dataset makes of an index differs: it draws from each rank's own stream (augmentation), or "
            "collate_fn computes it from the rank's rows",
            "draw by sample (lockstep.DataLoader seeds each sample's draws by its index), and let collate_fn join only",
        )
    return step.found(
        "samples",
        "order",
        measured,
        "the ranks were given other samples in this step than one process: another order, a part of the data for each "
        "rank by itself, or what collate_fn makes of other rows",
        "let one order be split batch by batch: lockstep.DataLoader, or a DistributedSampler with one seed",
    )


def _other_sizes(step: StepOfJob, loaders: Sequence[Mapping[str, Any]], measured: str) -> Difference | None:
    """Global batches whose size depends on the number of ranks."""
    ones = [step.job.one["loaders"][each["loader"]]["batch_size"] for each in step.one["batches"]]
    sizes = next(((one, each["batch_size"]) for one, each in zip(ones, loaders, strict=False) if each["own"]), None)
    if sizes is not None and sizes[0] != sizes[1]:
        return step.found(
            "samples",
            "batch-size",
            f"{measured}; the batch_size of lockstep.DataLoader is {sizes[0]} on one process, and {sizes[1]} here",
            "that is the size of the batch of all ranks together, and it depends on the number of ranks",
            "lockstep.DataLoader(dataset, batch_size=GLOBAL), neither divided nor multiplied by the number of ranks",
        )
    return None


def _other_epochs(step: StepOfJob, measured: str) -> Difference | None:
    """Samplers that were told other epochs on other ranks."""
    told = [[each["epoch"] for each in facts["passes"]] for facts in step.job.facts]
    apart = next((each for each in zip(*told, strict=False) if len(set(each)) > 1), None)
    if apart is not None:
        return step.found(
            "samples",
            "set-epoch",
            f"{measured}; the ranks' samplers were told epochs {', '.join(map(str, apart))}",
            "set_epoch is called on some ranks alone, so that their orders differ",
            "sampler.set_epoch(epoch) at the beginning of each epoch, on all ranks",
        )
    return None


def _filled(step: StepOfJob, extra: int, measured: str) -> Difference:
    return step.found(
        "samples",
        "padded",
        measured,
        f"{counted(extra, 'sample')} came twice: the last batch was filled up so that all ranks get equally many",
        "leave the last batch out (drop_last=True), or use lockstep.DataLoader, which splits it without filling it up",
    )


def _skipped(step: StepOfJob, batches: Sequence[int], measured: str) -> Difference:
    own, *ranks = batches
    return step.found(
        "samples",
        "skips",
        f"{measured}; batches before this step: one process {own}, the ranks {', '.join(map(str, ranks))}",
        "ranks skip batches, or accumulate over another number of them, by what they have themselves",
        DECIDE,
    )


def _walks_all(step: StepOfJob, loader: Mapping[str, Any]) -> bool:
    """Whether a rank walks as many samples as there are in one process."""
    if loader["samples"] not in {each["samples"] for each in step.job.one["loaders"]}:
        return False
    size, samples, batches = loader["batch_size"], loader["samples"], loader["batches"]
    return bool(size and samples and batches and batches * size >= samples - size)


def _unsplit(step: StepOfJob, measured: str) -> Difference:
    return step.found(
        "samples",
        "no-sampler",
        measured,
        "nobody splits the data: each rank walks all of it",
        "give the loader a DistributedSampler, or use lockstep.DataLoader(dataset, batch_size=GLOBAL), which takes a "
        "sampler of your own, too; a stream of samples takes each world_size-th one, from that of its rank on",
    )
