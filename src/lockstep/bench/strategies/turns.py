"""The run: starts every way, and then they take turns, an epoch each, until the time is up.

    start       each way in turn; all ranks create the same task and wait for orders
    round 0     A, A alone, B, B alone, …     warm-up: only losses and memory count
    round 1     the same, in reverse order …  an epoch each; "alone" is the same epoch without communication
    …

Rounds go through the epochs 0 … E-1 of a training and then start again with the initial weights. A noisy second affects
all ways of a round alike, and sample i of every way is from round i.

[Note: short epochs] A run ends in time, however large the data. So the very first epoch, of one process, ends when
it has used its part of the remaining time; all other epochs have the same number of steps. Likewise the evaluation.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import env
from lockstep.bench.results import Series
from lockstep.bench.session import Session
from lockstep.bench.strategies.jobs import Orders, WayFailed, WayJob
from lockstep.bench.strategies.task import LISTINGS, WHOLE, Limit
from lockstep.bench.strategies.ways import ALL_THREADS, PARTS, SINGLE, WAYS, Way, why_not
from lockstep.launch.environment import visible_cores, visible_gpus

__all__ = ["run"]

_SHAPES = "shapes"
# Order of starting, in case there is not time for all: peers before other forms of Lockstep's DDP.
_FIRST = (SINGLE, "ddp", "torch_ddp", "accelerate", "fabric", ALL_THREADS)
_START_S = 600.0
_TURN_S = 1800.0
_SHARE_TO_START = 0.6  # of the budget; a way that has not started by then is left out
_MIN_ROUNDS = 2  # including the warm-up
_ROUNDS_IN_TIME = 4  # planned rounds per budget; other ways may be slower
_SHARE_TO_EVALUATE = 0.1  # of the remaining time
_SHARE_TO_END = 0.1  # of the budget, for the last evaluation and for processes to exit


@dataclass
class _Contestant:
    """The state of a way: its processes, and its measurements so far."""

    job: WayJob
    samples: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    facts: dict[str, float | str | list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.job.way.name

    def add(self, measure: str, seconds: float) -> None:
        self.samples.setdefault(measure, []).append(seconds)


def run(options: argparse.Namespace, session: Session) -> None:
    """Measure all available ways.

    Raises:
        InputError: options cannot be used.
        WayFailed: not even a single process could be started.
    """
    gpus = visible_gpus(env.snapshot())
    threads = max(1, visible_cores() // session.nproc)
    task = _task(options, session)
    session.settings |= {
        "task": {key: value for key, value in task.items() if key not in ("data", "kept_in")},
        "threads_per_rank": threads,
        "gpus": gpus,
        "epochs": _epochs(options),
    }
    chosen = _choose(options.ways, session, gpus)
    orders = Orders(task, session.folder / "logs")
    contestants: list[_Contestant] = []
    try:
        _start(chosen, threads, orders, session, contestants)
        _take_turns(contestants, _epochs(options), session)
        session.progress.show("stopping all ways")
        for one in contestants:
            one.job.ask_to_leave()
        for one in contestants:
            one.job.end()
    finally:
        for one in contestants:
            one.job.terminate()
        for one in contestants:
            one.job.kill()
            one.job.forget_log()  # keeps those of failed ways
        _tidy(session, orders.logs)


def _epochs(options: argparse.Namespace) -> int:
    return 2 if options.quick else int(options.epochs)


def _task(options: argparse.Namespace, session: Session) -> dict[str, Any]:
    """The task for all ranks; generates images if none were given."""
    task = {
        "recipe": options.recipe,
        "dtype": options.dtype,
        "batch_size": options.batch_size,
        "images": 256 if options.quick else options.images,
        "seed": 0,
        "workers": options.workers,
    }
    if options.recipe == "digits":
        return task
    from lockstep.recipes.imagenet.listing import list_part
    from lockstep.recipes.imagenet.shapes import ShapesFolder, write_shapes  # needs Pillow, unlike digits

    folder = options.data or session.folder / _SHAPES
    kept_in = session.folder / LISTINGS
    if options.data is None:
        session.progress.show("generating images")
        write_shapes(ShapesFolder(folder, images=256 if options.quick else 1024, val_images=256, size=options.size))
    for part in ("train", "val"):
        list_part(folder, part, kept_in)
    place = {"data": str(folder.resolve()), "kept_in": str(kept_in.resolve())}
    return {**task, **place, "arch": options.arch, "size": options.size}


def _choose(names: Sequence[str] | None, session: Session, gpus: int) -> list[Way]:
    """The ways to measure; notes those that cannot be measured."""
    chosen = []
    for way in WAYS.values():
        if names is not None and way.name not in (*names, SINGLE):
            continue
        reason = why_not(way, session.nproc, gpus)
        if reason is None:
            chosen.append(way)
        else:
            session.skip(way.name, reason)
    return chosen


def _start(ways: Sequence[Way], threads: int, orders: Orders, session: Session, contestants: list[_Contestant]) -> None:
    """Start every way, the most important first, and have it describe itself."""
    longest_s = 0.0
    for way in sorted(ways, key=lambda way: _FIRST.index(way.name) if way.name in _FIRST else len(_FIRST)):
        last_start_s = (1 - _SHARE_TO_START) * session.budget_s + longest_s
        if contestants and session.left_s < last_start_s and not session.quick:
            session.skip(way.name, "skipped: out of time; raise --budget or pass fewer --ways")
            continue
        session.progress.show(f"starting {way.name}")
        started = time.monotonic()
        job = WayJob(way, session.nproc, threads, orders)
        one = _Contestant(job)
        contestants.append(one)
        try:
            replies = job.ask({"do": "describe"}, _START_S)
        except WayFailed as failure:
            _give_up(one, failure, session, contestants)
            continue
        took_s = time.monotonic() - started
        longest_s = max(longest_s, took_s)
        one.facts["start_s"] = round(took_s, 3)
        one.facts["processes"] = float(len(replies))
        session.settings["parameters"] = replies[0]["parameters"]
        session.settings["device"] = replies[0]["device"]
        wrong = {reply["world_size"] for reply in replies} - {job.world_size}
        if wrong:
            _give_up(one, WayFailed(f"its ranks did not form one job: they are {wrong}"), session, contestants)


def _take_turns(contestants: list[_Contestant], epochs: int, session: Session) -> None:
    """Run rounds until the time is up."""
    is_evaluated = False
    longest_s, number = 0.0, 0
    limit = _first_limit(contestants, session)
    end_s = _SHARE_TO_END * session.budget_s
    while contestants and (number < _MIN_ROUNDS or (not session.quick and session.left_s > 1.2 * longest_s + end_s)):
        began = time.monotonic()
        for one in contestants[:: 1 if number % 2 == 0 else -1]:
            session.progress.show(f"round {number}, {one.name}")
            try:
                limit = _take_turn(one, number, number % epochs, limit)
            except WayFailed as failure:
                _give_up(one, failure, session, contestants)
        if number > 0:
            _keep(contestants, session)
        longest_s = max(longest_s, time.monotonic() - began)
        number += 1
        if number == epochs:
            is_evaluated = _evaluate(contestants, session)
    if not is_evaluated:
        _evaluate(contestants, session)
    if limit.steps is not None:
        session.settings["steps_at_most"] = limit.steps


def _first_limit(contestants: Sequence[_Contestant], session: Session) -> Limit:
    """The limit of the first epoch. See [Note: short epochs]."""
    if session.quick:
        return WHOLE
    turns = sum(2 if one.job.world_size > 1 else 1 for one in contestants)
    left_s = session.left_s - _SHARE_TO_END * session.budget_s
    return Limit(seconds=max(left_s, 1.0) / (_ROUNDS_IN_TIME * max(turns, 1)))


def _take_turn(one: _Contestant, number: int, epoch: int, limit: Limit) -> Limit:
    """Run an epoch of a way, and the same without its communication.

    Returns:
        The limit of all later epochs.
    """
    alone_s = limit.seconds if one.job.world_size == 1 else None
    order = {"epoch": epoch, "max_steps": limit.steps, "seconds": alone_s}
    replies = one.job.ask({"do": "train", **order}, _TURN_S)
    if alone_s is not None:
        limit = Limit(steps=replies[0]["steps"] if replies[0]["is_cut"] else None)
    samples = sum(reply["samples"] for reply in replies)
    if number == epoch:  # the first training
        one.losses.append(sum(reply["loss_sum"] for reply in replies) / samples)
    if number == 0:
        one.facts["samples_per_epoch"] = float(samples)
        one.facts["steps_per_epoch"] = float(replies[0]["steps"])
        for name in ("peak_bytes", "gpu_peak_bytes"):
            one.facts[name] = max(reply[name] for reply in replies)
    alone = one.job.ask({"do": "train_alone", **order}, _TURN_S) if one.job.world_size > 1 else []
    if number > 0:
        for measure, seconds in [*_seconds("", replies), *_seconds("alone_", alone)]:
            one.add(measure, seconds)
    return limit


def _seconds(prefix: str, replies: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Seconds of the epoch on the slowest rank; and of each part per step, as a mean over ranks."""
    if not replies:
        return
    yield f"{prefix}epoch", max(reply["epoch_s"] for reply in replies)
    for index, part in enumerate(PARTS):
        steps = sum(reply["steps"] for reply in replies)
        yield f"{prefix}{part}", sum(reply["parts_s"][index] for reply in replies) / steps


def _evaluate(contestants: list[_Contestant], session: Session) -> bool:
    """Evaluate all ways, after the same number of epochs."""
    seconds = _SHARE_TO_EVALUATE * max(session.left_s, 1.0) / max(len(contestants), 1)
    order: dict[str, Any] = {"do": "evaluate", "seconds": seconds}
    for one in list(contestants):
        session.progress.show(f"evaluating {one.name}")
        try:
            found = one.job.ask(order, _TURN_S)[0]
        except WayFailed as failure:
            _give_up(one, failure, session, contestants)
            continue
        order = {"do": "evaluate", "max_steps": found.pop("steps")}
        one.facts |= {f"held_out_{name}": value for name, value in found.items()}
        one.facts["held_out_after_epochs"] = float(len(one.losses))
    _keep(contestants, session)
    return True


def _keep(contestants: Sequence[_Contestant], session: Session) -> None:
    """Add samples to the session. Called after complete rounds, so that all ways have samples of the same rounds."""
    for one in contestants:
        for measure, samples in one.samples.items():
            facts = {**one.facts, "losses": list(one.losses)} if measure == "epoch" else {}
            steps = 1 if measure.endswith("epoch") else int(float(str(one.facts["steps_per_epoch"])))
            session.add(Series({"measure": measure}, one.name, steps, list(samples), facts))


def _give_up(one: _Contestant, failure: WayFailed, session: Session, contestants: list[_Contestant]) -> None:
    """Leave out a way that has failed."""
    contestants.remove(one)
    one.job.kill()
    if one.name == SINGLE:  # the reference of all others
        raise WayFailed(f"{failure}; its output is in {one.job.log}") from failure
    session.series = [series for series in session.series if series.contestant != one.name]
    session.skip(one.name, str(failure))
    session.progress.say(f"{one.name} is left out: {failure}; its output is in {one.job.log}")


def _tidy(session: Session, logs: Path) -> None:
    """Remove empty logs; and everything, if nothing was measured."""
    if not any(logs.glob("*.txt")):
        shutil.rmtree(logs, ignore_errors=True)
    if not session.series:
        for name in (_SHAPES, LISTINGS):
            shutil.rmtree(session.folder / name, ignore_errors=True)
