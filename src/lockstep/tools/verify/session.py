"""The runs for one number of ranks, and the verdict from all of them."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lockstep.tools.verify.aftermath import LOGGED
from lockstep.tools.verify.reference import (
    OTHER_ORDER,
    InScript,
    evaluation_of_first,
    gives_others,
    has_begun,
    order_of_ranks,
    reads_streams_of_ranks,
    run_one,
    run_one_by_option,
    streams_of_ranks,
    why_not_given,
)
from lockstep.tools.verify.samples import Record
from lockstep.tools.verify.script import Script, said_number
from lockstep.tools.verify.settings import HALVES, ONE, RANKS, Number, Orders, Verification
from lockstep.tools.verify.step import Runs, counted
from lockstep.tools.verify.verdict import Verdict, first_steps, judge
from lockstep.tools.verify.words import Difference, difference

__all__ = ["verify_at"]

_WIDE = "precision: {}, so the script was compared in float64, which autocast does not change"
_DRAWN = ("samples", "drawn")
_BY_SAMPLE = (
    "samples: all steps were repeated, on the ranks and on one process, with each sample's draws (torch, numpy, "
    "random) depending on its index alone"
)
_ALIKE = ": this gave the answer of one process, so only the samples' draws differ"
# Causes that may come from a number computed from the batch size; numbers in the script are tried, not only arguments.
_COMPUTED = ("number-of-steps", "sum", "factor", "after-averaging", "settings", "other-weights")
_DRAWN_BY_SIZE = (("inputs", "drawn"), ("outputs", "drawn"))  # as by torch.randn(BATCH, 8)
# Those, and others for which arguments are tried; "" if one process fails because of the batch size.
_SIZED = ("", "order", "drawn", "batch", "passes", "not-linear", *_COMPUTED)
# Stages at which only such a number differs, as samples and outputs are equal.
_STAGES_OF_SIZE = ("loss", "gradients", "parameters")
_SAME_RATE = 1e-5  # relative difference of learning rates that are equal up to rounding
_STAGES = ("steps", "samples", "inputs", "outputs", "loss", "gradients", "parameters", "buffers", "evaluated", "saved")
_BY_OPTION = "options: one process got the batches of all ranks through its arguments, which were"
_BY_NUMBER = "numbers: one process got the batches of all ranks through the script's"
_OTHER_NUMBER = "the script asks for {ranks}, but verify started another number: pass it the argument that sets this"
_OF_MPI = (
    "the ranks meet through mpi4py, in which each is alone here: verify starts them without mpirun. Let the script "
    "take rank and size from torch.distributed, or from RANK and WORLD_SIZE"
)
_ALONE = "numbers: to start one process instead of several, one in the script was replaced: the"
_NEVER_ONE = (
    "the script starts {number} ranks, and no argument or number in it makes it start one: take the number from an "
    "argument, torch.cuda.device_count() or WORLD_SIZE"
)
_GIVEN = (
    "order: on its own, one process draws a different order of samples from the ranks, which used no sample twice; "
    "it was given theirs"
)


def verify_at(what: Verification, world_size: int, folder: Path) -> Verdict:
    """The verdict at one number of ranks.

    If each rank draws its samples, later stages are compared in runs whose samples draw by index; if rounding hides or
    causes too much, in float64.
    """
    script, drawn, why_wide = Script(what, world_size, folder), None, ""
    verdict = _compared(script)
    while True:
        if drawn is None and verdict.first == _DRAWN:
            drawn, verdict = verdict, _compared(_again(script, what, by_sample=True))
        elif verdict.wants_double and not what.double:
            what = dataclasses.replace(what, double=True)
            second = _compared(_again(script, what, drawn is not None))
            if not second.unknown and not second.wants_double:
                why_wide, verdict = verdict.wants_double, second
        else:
            break
    verdict = verdict if drawn is None else _beside_drawn(drawn, verdict)
    verdict.notes.extend([_WIDE.format(why_wide)] if why_wide else [])
    verdict.notes.extend([*script.notes, *script.words_on_files()])
    return verdict


def _again(script: Script, what: Verification, by_sample: bool) -> Script:
    """A copy for new runs, with simulated GPUs if the earlier runs had some."""
    what = dataclasses.replace(what, devices="gpu" if script.devices else what.devices)
    return Script(what, script.world_size, Path(tempfile.mkdtemp(dir=script.folder)), by_sample)


def _beside_drawn(drawn: Verdict, verdict: Verdict) -> Verdict:
    """Combine the verdict on a script whose ranks draw their samples with the verdict for draws by index."""
    if verdict.unknown or verdict.first == _DRAWN:
        why = verdict.unknown.partition("\n")[0] or "samples still differ, through collate_fn or their own generator"
        drawn.notes.append(f"{_BY_SAMPLE}, without a result: {why}")
        return drawn
    verdict.notes.append(f"{_BY_SAMPLE}{_ALIKE if not verdict.differences else ''}")
    verdict.differences = [*drawn.differences, *verdict.differences]
    return verdict


def _compared(script: Script) -> Verdict:
    code, ranks = script.run_ranks()
    world_size, number = script.world_size, said_number(ranks)
    refused = _why_refused(ranks)
    if refused or number is not None:
        return Verdict(world_size, unknown=refused or _OTHER_NUMBER.format(ranks=counted(number or 0, "rank")))
    if len(ranks) < world_size:
        return script.ended(RANKS, code, f"{world_size} ranks")
    if script.learns_layout(ranks):
        return _compared(script)
    script.failure_of_ranks = script.failure(RANKS) + script.place_of_failure(RANKS) if code else ""
    code_of_ranks, (code, one, sizes) = code, run_one(script, ranks)
    if said_number(one) is not None:
        return _never_on_one(script, code_of_ranks, ranks)
    if script.learns_layout([*ranks, *one]):
        return _compared(script)
    alone = [f"{_ALONE} {_in_words(each)}" for each in script.changes.numbers]
    verdict = _on_one(script, code, ranks, one, sizes)
    verdict.notes.extend(alone)
    if verdict.differences and script.turns_draws(one):
        second = _compared(script)
        return second if _comes_further(second, verdict) else verdict
    return verdict


def _why_refused(ranks: Sequence[Record]) -> str:
    """Why there can be no verdict on these ranks; empty if there can."""
    meet_by_mpi = len(ranks) > 1 and all(each["facts"]["mpi"] and not each["facts"]["joined"] for each in ranks)
    return next((each["facts"]["refused"] for each in ranks if each["facts"]["refused"]), _OF_MPI * meet_by_mpi)


def _never_on_one(script: Script, code: int, ranks: Sequence[Record]) -> Verdict:
    """The verdict on a script that started several ranks when it was to start one; `code` is that of all ranks."""
    if code and not has_begun(ranks):
        return script.ended(RANKS, code, f"{script.world_size} ranks")
    return Verdict(script.world_size, unknown=_NEVER_ONE.format(number=script.world_size))


def _on_one(
    script: Script,
    code: int,
    ranks: Sequence[Record],
    one: Sequence[Record],
    sizes: tuple[int | None, ...],
) -> Verdict:
    """The verdict from one process, or if values computed from batch sizes may explain it, from another one.

    Args:
        code: exit code of the one process.
        ranks: records of the ranks.
        one: records of the one process; empty if it left none.
        sizes: batch sizes that it was given.
    """
    one = one if has_begun(one) or not first_steps(ranks) else []
    verdict = _judged(script, Runs(ranks, *one), sizes) if one else None
    if verdict is None or (code and not any(0 < each.step <= len(one[0]["steps"]) for each in verdict.differences)):
        is_alike = bool(script.failure_of_ranks) and script.failure(RANKS) == script.failure(ONE)
        where = f"{len(ranks)} ranks and also on one process" if is_alike else "one process started as a rank"
        verdict = script.ended(ONE, code, where)
        code = 0 if is_alike else code
    if verdict.code == 0:
        return _by_size(script, verdict, ranks, one, sizes)
    if verdict.unknown and not code and ranks[0]["facts"]["loaders"]:
        return verdict
    return _by_option(script, verdict, ranks, one, sizes)


def _by_size(
    script: Script, verdict: Verdict, ranks: Sequence[Record], one: Sequence[Record], sizes: tuple[int | None, ...]
) -> Verdict:
    """The verdict, with a difference if the script computes numbers from the batch size of a rank.

    One process that got the batches of all ranks by arguments, or by a number in the script, then has another schedule,
    learning rate, or with arguments coefficient.
    """
    before, where = script.changes, InScript.ANYWHERE if len({*_rates(ranks[0])}) > 1 else InScript.IN_BATCH_LINES
    if not _multiplied(ranks[0]["facts"]["made"], sizes) and None not in ranks[0]["facts"]["made"]:
        return verdict
    found = run_one_by_option(script, ranks, one, sizes, where)
    if found:
        is_number = script.changes.numbers != before.numbers
        by = _in_words(script.changes.numbers[-1]) if is_number else " ".join(script.changes.args)
        how = f"with one process that gets the ranks' batches by {by}"
        other = _other_schedule(ranks[0], found[0], how, is_number)
        if other is None and not is_number:
            other = _other_numbers(_judged(script, Runs(ranks, *found), ()), how)
        verdict.differences += [] if other is None else [other]
    script.changes = before
    return verdict


def _other_schedule(rank: Record, one: Record, how: str, with_scaled: bool) -> Difference | None:
    """A difference if learning rates change otherwise than in one process, or if `with_scaled` are just others."""
    rates = _rates(rank)
    ratios = [b / a for a, b in zip(rates, _rates(one), strict=False) if a]
    places = [at for at, each in enumerate(ratios) if abs(each / ratios[0] - 1) > _SAME_RATE]
    is_scaled = bool(ratios) and with_scaled and abs(ratios[0] - 1) > _SAME_RATE
    if not places and not is_scaled:
        return None
    place, key = (0, "size") if is_scaled else (places[0], "settings by size")
    measured = f"lr is {rates[place]:.4g}; {how}, it is {rates[place] * ratios[place]:.4g}"
    lines = tuple(rank["steps"][place]["lines"].get("step", ()))
    return difference(place + 1, "parameters", key, measured, lines)


def _other_numbers(second: Verdict, how: str) -> Difference | None:
    """A difference if one process that got the ranks' samples by its arguments trains otherwise."""
    first = next(iter(second.differences), None)
    if first is None or (first.stage not in _STAGES_OF_SIZE and first.cause != "other-weights"):
        return None
    return difference(first.step, first.stage, "size", f"{how}: {first.measured}", first.lines)


def _rates(record: Record) -> list[float]:
    """The learning rate of the first group in each step of the first optimizer."""
    return [float(each["settings"][0].get("lr", 0.0)) for each in record["steps"] if each["optimizer"] == 0]


def _by_option(
    script: Script,
    verdict: Verdict,
    ranks: Sequence[Record],
    one: Sequence[Record],
    sizes: tuple[int | None, ...],
) -> Verdict:
    """The verdict from a process that gets the batches of all ranks by its arguments, if that may matter; else this."""
    words = _words_on_sizes(verdict, ranks[0]["facts"]["made"], sizes)
    lacks_rows = bool(verdict.unknown) and not ranks[0]["facts"]["loaders"]
    may_be_in_script = bool(verdict.unknown) or verdict.first[1] in _COMPUTED or verdict.first in _DRAWN_BY_SIZE
    before = script.changes
    is_sized = bool(words) or lacks_rows
    may_be = is_sized or verdict.first[0] in (*_STAGES_OF_SIZE, "inputs", "outputs")
    where = InScript.ANYWHERE if may_be_in_script else InScript.NOWHERE
    by_option = run_one_by_option(script, ranks, one, sizes, where) if may_be else []
    if by_option:
        second = _with_size(_judged(script, Runs(ranks, *by_option), ()), ranks, one)
        is_number, is_order = script.changes.numbers != before.numbers, verdict.first == ("samples", "order")
        # Otherwise that number was not the cause.
        if (is_number or is_order or not is_sized) and not _comes_further(second, verdict):
            script.changes = before
        elif is_number:
            verdict, words = second, [f"{_BY_NUMBER} {_in_words(script.changes.numbers[-1])}"]
        else:
            verdict, words = second, [f"{_BY_OPTION} {' '.join(script.changes.args)}"]
    verdict.notes.extend(words)
    return verdict


def _with_size(verdict: Verdict, ranks: Sequence[Record], one: Sequence[Record]) -> Verdict:
    """The verdict; if one process had other settings only with another batch size, they are computed from that."""
    if verdict.first != ("parameters", "settings"):
        return verdict
    found, *more = verdict.differences
    own, theirs = (each[0]["steps"][found.step - 1 :] if each else [] for each in (one, ranks))
    if own and own[0]["settings"] == theirs[0]["settings"]:
        verdict.differences = [difference(found.step, found.stage, "size", found.measured, found.lines), *more]
    return verdict


def _in_words(number: Number) -> str:
    line, _, old, new = number
    return f"{old} in line {line}, which became {new}"


def _comes_further(second: Verdict, first: Verdict) -> bool:
    """Whether the second verdict's finding comes later than the first's, or it has none."""
    ways = [
        (each.steps, _STAGES.index(each.first[0]) if each.differences else len(_STAGES)) for each in (second, first)
    ]
    return not second.unknown and ways[0] > ways[1]


def _judged(script: Script, runs: Runs, sizes: tuple[int | None, ...]) -> Verdict:
    """The verdict on these runs; if one process reads other samples than the ranks, on one that is given theirs."""
    by_itself = judge(runs, script.failure_of_ranks)
    orders = order_of_ranks(runs, by_itself)
    script.streams = "" if orders else streams_of_ranks(runs, by_itself)
    code, given = script.run(ONE, sizes, orders) if orders or script.streams else (0, [])
    fails_with_them = code and given and len(given[0]["steps"]) < len(runs.one["steps"])
    if has_begun(given) and not fails_with_them:
        theirs = Runs(runs.ranks, *given)
        verdict = _judged_again(script, theirs, judge(theirs, script.failure_of_ranks), sizes, orders)
    else:
        script.streams = ""
        verdict = _judged_again(script, runs, by_itself, sizes, orders)
    streams, script.streams = script.streams, ""
    if streams:
        return _beside_streams(runs, by_itself, verdict)
    why = why_not_given(runs) if verdict.first == ("samples", "order") else ""
    if why:
        return Verdict(script.world_size, unknown=why)
    if orders and verdict.first not in OTHER_ORDER and gives_others(runs, orders):
        verdict.notes.append(_GIVEN)
    return verdict


def _judged_again(
    script: Script, runs: Runs, verdict: Verdict, sizes: tuple[int | None, ...], orders: Orders
) -> Verdict:
    """The verdict on these runs, or if something differs, on further ones that measure rounding and evaluation."""
    failure = script.failure_of_ranks
    if verdict.code != 0 or any(each.startswith(LOGGED) for each in verdict.notes):
        _, again = script.run(HALVES, sizes, orders)
        runs = Runs(runs.ranks, runs.one, *again)
        second = judge(runs, failure)
        # If the answer is that of one process, a second run only has to find printed numbers that vary (seconds).
        verdict = second if verdict.code != 0 or second.code == 0 else verdict
        by_hand = runs.one["facts"]["by_hand"] and any(each.startswith(LOGGED) for each in verdict.notes)
        if verdict.first[0] == "evaluated" or by_hand:
            _, moved = script.run(ONE, sizes, {**orders, **evaluation_of_first(runs)}, moves=True)
            verdict = judge(dataclasses.replace(runs, moved=moved[0] if moved else None), failure)
    return verdict


def _beside_streams(runs: Runs, by_itself: Verdict, verdict: Verdict) -> Verdict:
    """Combine the verdict on one process that read streams by itself with the verdict on one given the ranks' batches.

    Args:
        runs: the runs with the process that read by itself.
        by_itself: its verdict.
        verdict: the other verdict.
    """
    if verdict.unknown:
        return verdict
    if not reads_streams_of_ranks(runs):
        why = why_not_given(runs)
        if not why:
            verdict.differences = [*by_itself.differences[:1], *verdict.differences]
        elif not verdict.differences:
            verdict.unknown = f"{why}. One process that was given the ranks' batches gave their answer"
            return verdict
    verdict.notes.append("streams: one process was given the ranks' batches")
    return verdict


def _multiplied(asked: Sequence[int | None], given: Sequence[int | None]) -> list[tuple[int | None, int]]:
    """Batch sizes that a script asks for, and those that one process was given instead."""
    return [(one, other) for one, other in zip(asked, given, strict=False) if other is not None and one != other]


def _words_on_sizes(verdict: Verdict, asked: Sequence[int | None], given: Sequence[int | None]) -> list[str]:
    """A note that a script may compute something from a batch size that one process did not have."""
    pairs = _multiplied(asked, given)
    if not pairs or verdict.first[1] not in _SIZED or (not verdict.differences and not verdict.unknown):
        return []
    return [
        f"sizes: one process got batches of {pairs[0][1]} where the script asks for {pairs[0][0]}. Whatever the "
        "script computes from its batch size (a divisor, a mask, a learning rate, noise) then differs: use the "
        "batch's len(x)"
    ]
