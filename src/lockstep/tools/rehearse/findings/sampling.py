"""Which samples each rank gets, and how they are augmented."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lockstep.tools.rehearse.events import RehearsedJob, TraceEvent
from lockstep.tools.rehearse.findings.finding import Finding, Kind
from lockstep.tools.rehearse.line import Site

__all__ = ["KINDS"]


def _sites(event: TraceEvent, name: str) -> tuple[Site, ...]:
    return tuple(Site.load(values) for values in event.data[name])


def _forgotten_epochs(job: RehearsedJob) -> Iterator[Finding]:
    """Training passes repeat the same shuffled order, because the sampler's `set_epoch` was never called."""
    for process in job.processes:
        trained: dict[object, list[TraceEvent]] = defaultdict(list)
        for event in process.of("pass"):
            if event.data["has_sampler"] and event.data["shuffles"] and event.data["trained"]:
                trained[_sites(event, "sampler")].append(event)
        for events in trained.values():
            repeats = [event for event in events if event.data["number"] > 0 and not event.data["was_told"]]
            if repeats and len({event.data["epoch"] for event in events}) == 1:
                what = f"{len(events)} passes over the data were in exactly the same order"
                yield Finding("set-epoch-forgotten", repeats[0].sites, what)


def _is_evaluation(event: TraceEvent) -> bool:
    """Whether it is a complete pass without backward passes or optimizer steps."""
    data = event.data
    return data["finished"] and not data["trained"] and not data["backwards"]


def _padded_evaluation(job: RehearsedJob) -> Iterator[Finding]:
    """A complete pass without training reads more samples than the data set has."""
    for process, event in job.each("pass"):
        data = event.data
        if _is_evaluation(event) and data["padding"] > 0 and process.world_size > 1:
            total = data["length"] + data["padding"]
            what = (
                f"{total} samples are evaluated, but the data set has {data['length']}: {data['padding']} are used "
                f"twice, so that each of {process.world_size} ranks has the same number"
            )
            yield Finding("padded-evaluation", _sites(event, "sampler") or event.sites, what)


def _same_draws(job: RehearsedJob) -> Iterator[Finding]:
    """All ranks create a batch of a training loader from the same state of a random generator."""
    training = {
        _sites(event, "loader") for _, event in job.each("pass") if event.data["trained"] or event.data["backwards"]
    }
    states: dict[tuple[tuple[Site, ...], str, int, int], dict[int, str]] = defaultdict(dict)
    for process, event in job.each("draw"):
        if process.rank is not None and event.sites in training:
            key = (event.sites, event.data["library"], event.data["worker"], event.data["number"])
            states[key].setdefault(process.rank, event.data["state"])
    for (sites, library, worker, _), by_rank in states.items():
        if len(by_rank) == job.world_size > 1 and len(set(by_rank.values())) == 1:
            where = "" if worker < 0 else f" (in worker {worker} of its loader)"
            what = f"every rank draws the same numbers from {library}'s generator for its batches{where}"
            yield Finding("same-augmentation-seed", sites, what)


def _whole_set_on_each(job: RehearsedJob) -> Iterator[Finding]:
    """A complete pass without training reads the same samples on every rank."""
    passes: dict[tuple[tuple[Site, ...], tuple[Site, ...], int], dict[int, TraceEvent]] = defaultdict(dict)
    for process, event in job.each("pass"):
        if _is_evaluation(event) and event.data["content"] and process.rank is not None and process.joined:
            passes[_sites(event, "loader"), event.sites, event.data["number"]].setdefault(process.rank, event)
    for (loader, sites, _), by_rank in passes.items():
        if len(by_rank) == job.world_size > 1 and len({event.data["content"] for event in by_rank.values()}) == 1:
            samples = next(iter(by_rank.values())).data["samples"]
            what = f"each of {job.world_size} ranks evaluated the same {samples} samples"
            yield Finding("evaluation-on-every-rank", loader or sites, what)


KINDS = (
    Kind(
        "set-epoch-forgotten",
        "set_epoch is never called",
        "a DistributedSampler shuffles by its epoch, which stays 0: every epoch shows the samples in the same order, "
        "and each rank always the same ones",
        "call sampler.set_epoch(epoch) at the start of every epoch",
        _forgotten_epochs,
    ),
    Kind(
        "padded-evaluation",
        "evaluation sees samples twice",
        "DistributedSampler repeats samples until all ranks have the same number, so averages over them change with "
        "the number of ranks; an evaluator that knows its samples and counts each once is right",
        "use lockstep.DataLoader(…, evaluation=True), which yields every sample once, and reduce sums and counts "
        "together; or leave the repeated ones out of the count",
        _padded_evaluation,
    ),
    Kind(
        "same-augmentation-seed",
        "all ranks augment equally",
        "the ranks have the same seed, so they draw the same crops and flips: the global batch has less variety than "
        "it seems to have, and N times the same noise",
        "seed the model equally and the data differently: after creating the model, seed with seed + "
        "rank (torch, numpy, random), or give the DataLoader its own generator; lockstep.DataLoader draws per sample",
        _same_draws,
    ),
    Kind(
        "evaluation-on-every-rank",
        "every rank evaluates the whole dataset",
        "evaluation takes as long on N GPUs as on one, and counts that are summed over ranks are N times too large",
        "give each rank a share (lockstep.DataLoader with evaluation=True yields every sample once) and reduce sums "
        "and counts together",
        _whole_set_on_each,
    ),
)
