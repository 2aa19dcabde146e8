"""Learning rate, schedule and gradient clipping of an optimizer step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.findings.finding import Finding, Kind
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.source import argument_at, assigned_values

__all__ = ["KINDS"]

_MIN_GAPS = 2


def _is_bare_option(file: str, value: ast.expr | None) -> bool:
    """Whether an expression is an unchanged command line option, such as `args.lr`, never assigned anew."""
    if not (isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name)):
        return False
    if not any(word in value.value.id.lower() for word in ("arg", "opt", "flag", "cfg", "config")):
        return False
    return not assigned_values(file, ast.unparse(value))


def _unscaled_lr(job: RehearsedJob) -> Iterator[Finding]:
    """Learning rate and batch size per rank are unchanged options, so only the global batch grows with the ranks."""
    if job.world_size < 2:
        return
    for process, event in job.each("optimizer"):
        site, data = event.site, event.data
        if site is None or not process.joined or not data["steps"] or data["lr"] != data["first_lr"]:
            continue
        rate = argument_at(site.file, site.line, "", "lr", 1)
        if rate is None or not _is_bare_option(site.file, rate):
            continue
        for one in process.of("pass"):
            if not (one.data["has_sampler"] and one.data["trained"] and one.data["loader"]):
                continue
            made = Site.load(one.data["loader"][0])
            batch = argument_at(made.file, made.line, "DataLoader", "batch_size", 1)
            if _is_bare_option(made.file, batch):
                assert batch is not None
                size = one.data["batch_size"]
                what = (
                    f"the learning rate is {ast.unparse(rate)} = {data['lr']:g} on any number of ranks, but every "
                    f"rank takes {ast.unparse(batch)} = {size} samples: {size * job.world_size} a step on "
                    f"{job.world_size} ranks"
                )
                yield Finding("lr-not-scaled", (site,), what)
                break


def _repeated_schedule(job: RehearsedJob) -> Iterator[Finding]:
    """A scheduler is stepped `world_size` times for each step of its optimizer."""
    for process, event in job.each("scheduler"):
        gaps = [*event.data["gaps"], *([event.data["rest"]] if event.data["rest"] else [])]
        if process.world_size > 1 and len(gaps) >= _MIN_GAPS and set(gaps) == {process.world_size}:
            what = f"the scheduler is stepped {gaps[0]} times, once per rank, between two steps of the optimizer"
            yield Finding("scheduler-steps-per-rank", event.sites, what)


def _clipped_scaled(job: RehearsedJob) -> Iterator[Finding]:
    """Gradients were clipped while they were still multiplied by the loss scale."""
    for _, event in job.each("clip"):
        what = f"gradients were clipped {event.data['count']} time(s) before scaler.unscale_(optimizer)"
        yield Finding("clip-before-unscale", event.sites, what)


KINDS = (
    Kind(
        "lr-not-scaled",
        "the batch grows with the ranks, the learning rate does not",
        "N ranks take N times the samples per step and N times fewer steps per epoch: training is slower than on one "
        "GPU per sample seen",
        "multiply the learning rate by the number of ranks (with a warm-up), or divide the batch size by it to keep "
        "the global batch",
        _unscaled_lr,
    ),
    Kind(
        "scheduler-steps-per-rank",
        "the schedule runs N times too fast",
        "every rank has its own scheduler, to be stepped once per optimizer step as on one GPU: stepped once per "
        "rank, the learning rate decays N times too early",
        "call scheduler.step() once per optimizer.step(), or once per epoch",
        _repeated_schedule,
    ),
    Kind(
        "clip-before-unscale",
        "gradients are clipped before they are unscaled",
        "they are multiplied by the loss scale (initially 65536), so nearly every norm exceeds the limit and the "
        "step shrinks to almost nothing",
        "call scaler.unscale_(optimizer) before clipping",
        _clipped_scaled,
    ),
)
