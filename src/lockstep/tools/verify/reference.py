"""Input of the one process, so that it repeats the ranks' steps: their batches, their order, other arguments.

[Note: orders that are given] Some libraries draw the order of an epoch differently on one process than on several, such
as Accelerate, and Trainers that insert a splitting sampler. One process then trains on other samples in each step,
which is not a mistake if the ranks' parts are parts of one order, so that no sample comes twice in an epoch. Then one
process is given that order, batch by batch, and later stages can be compared. Samples that pad the last batch are left
out, so that they are reported.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from lockstep.tools.verify.samples import Record, Samples, batches_of, calls_of, entered, passes_are_shared_out, rows_of
from lockstep.tools.verify.script import Script, said_number
from lockstep.tools.verify.settings import IN_TURN, JOINED, OF_RANK_0, ONE, Changes, Number, Orders
from lockstep.tools.verify.step import Runs
from lockstep.tools.verify.verdict import Verdict, first_steps

__all__ = [
    "OTHER_ORDER",
    "InScript",
    "evaluation_of_first",
    "gives_others",
    "has_begun",
    "order_of_ranks",
    "reads_streams_of_ranks",
    "run_one",
    "run_one_by_option",
    "streams_of_ranks",
    "why_not_given",
]

# Causes if ranks and one process merely draw different orders; see [Note: orders that are given].
OTHER_ORDER = (("samples", "order"), ("samples", "padded"), ("samples", "no-sampler"))
_MOST_OPTIONS = 3  # number of options that are tried, and of numbers in the script that may be a batch size
_MOST_NUMBERS = 6  # of numbers in the script that may be that of ranks: a wrong one is soon noticed
_OF_BATCHES, _OF_RANKS = ("batch",), ("world", "proc", "rank", "gpu", "device", "size", "node", "worker")
_NO_SIZE = (
    "a loader has no batch size to multiply for one process (batch_size=None, or a batch_sampler without "
    "batch_size), so one process reads other samples than the ranks"
)
_OF_STREAMS = (
    "each rank reads its own stream (an IterableDataset) for its part of a step's passes, of which one process reads "
    "one, or others"
)


class InScript(Enum):
    """Which numbers in a script are tried as its batch size."""

    NOWHERE = "none"
    IN_BATCH_LINES = "those in lines with the word"
    ANYWHERE = "all"


def _run_alone(script: Script, sizes: tuple[int | None, ...], ranks: Sequence[Record]) -> tuple[int, list[Record]]:
    """Run on one process, even a script that sets the number of ranks itself, or fails alone before it has begun.

    See [Note: ranks in place] in `starts.py`.
    """
    code, one = script.run(ONE, sizes, {})
    devices = script.devices_of_one
    if script.devices and said_number(one) is None and not has_begun(one):
        # For a script that requires two GPUs; others may use all that they see.
        script.devices_of_one = script.devices
        code, one = script.run(ONE, sizes, {})
    if said_number(one) is None and (not code or has_begun(one) or not has_begun(ranks)):
        return code, one
    before = script.changes
    for changes in _ways_alone(script, said_number(one)):
        script.changes = changes
        code_of_way, found = script.run(ONE, sizes, {})
        if said_number(found) is None and has_begun(found):
            return code_of_way, found
    script.changes = before
    if script.devices_of_one != devices:  # so that its own error is reported
        script.devices_of_one = devices
        code, one = script.run(ONE, sizes, {})
    return code, one


def _ways_alone(script: Script, number: int | None) -> Iterator[Changes]:
    """Changes with which a script may start a single rank.

    Args:
        script: the script.
        number: the number of ranks that it started; None if it failed, perhaps because it requires several.
    """
    ones = {str(number or script.world_size): "1"}
    yield from map(Changes, _with_another(script.what.args, ones))
    if number:
        yield from (Changes(script.what.args, (), number, argument) for argument in range(_MOST_OPTIONS))
    for each in _numbers_in(script, ones, _OF_RANKS)[:_MOST_NUMBERS]:
        yield Changes(script.what.args, (each,), number or 0)


def has_begun(records: Sequence[Record]) -> bool:
    """Whether a process has reached its data or a step, and did not exit earlier because it requires several ranks."""
    return any(each["steps"] or each["facts"]["passes"] for each in records)


def _with_another(args: tuple[str, ...], values: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Arguments of a script with one value replaced, or all, in the ways to try."""
    parts = [argument.rpartition("=") for argument in args]
    places = [place for place, (*_, value) in enumerate(parts) if value in values][:_MOST_OPTIONS]
    others = ["".join([*before, values.get(value, value)]) for *before, value in parts]
    ways = [*({place} for place in places), *[{*places}] * (len(places) > 1)]
    return [tuple((others if place in way else args)[place] for place in range(len(args))) for way in ways]


def run_one(script: Script, ranks: Sequence[Record]) -> tuple[int, list[Record], tuple[int | None, ...]]:
    """Run on one process with the batches of all ranks; returns exit code, record if it left one, and batch sizes."""
    sizes = _needed_batch_sizes(ranks, [])
    code, one = _run_alone(script, sizes, ranks)
    corrected = _needed_batch_sizes(ranks, one)
    if any(each["stream"] and each["trains"] for each in ranks[0]["facts"]["passes"]) and _has_others(ranks, one):
        # It may divide the batch of all ranks by their number, and join the samples of a stream by itself.
        unchanged = tuple(ranks[0]["facts"]["made"])
        code_of_own, own = script.run(ONE, unchanged, {})
        if not code_of_own and own and not _has_others(ranks, own):
            return code_of_own, own, unchanged
    if code or corrected == sizes or _is_cut_before(ranks, one):
        return code, one, sizes
    return *script.run(ONE, corrected, {}), corrected


def _has_others(ranks: Sequence[Record], one: Sequence[Record]) -> bool:
    """Whether the first step of one process has other samples than the ranks'."""
    first, own = first_steps(ranks), first_steps(one)
    return not (first and own) or Samples(first, own[0]).differ


def _is_cut_before(ranks: Sequence[Record], one: Sequence[Record]) -> bool:
    """Whether one process has batches as small as a rank's, as from a sampler that cut them when it was created."""
    first, own = ([batch["rows"] for batch in batches_of(*first_steps(each)[:1])] for each in (ranks, one))
    return bool(own) and own[:1] == first[:1] and len(own) == len(first)


def run_one_by_option(
    script: Script, ranks: Sequence[Record], one: Sequence[Record], sizes: tuple[int | None, ...], where: InScript
) -> list[Record]:
    """`run_one` with the sizes set by the script's arguments, and so also everything else computed from them.

    The argument is found by trial: its value is the ranks' batch size, and changing it gives loaders the size that one
    process needs; or without loaders, the rows that enter models in the first step. Returns an empty list if there is
    none.

    Args:
        where: which numbers in the script to try, too.
    """
    before, first = script.changes, first_steps(ranks)
    needed = _sizes_to_try(ranks, one, sizes)
    for changes in _ways(script, needed, ranks[0]["facts"]["options"], where):
        script.changes = changes
        code, found = script.run(ONE, (), {})
        if not code and first_steps(found) and _has_sizes(found[0], ranks[0], sizes) and _has_rows(found[0], first):
            return found
    script.changes = before
    return []


def _sizes_to_try(ranks: Sequence[Record], one: Sequence[Record], sizes: tuple[int | None, ...]) -> dict[str, str]:
    """Number in the arguments -> its replacement; empty if one process has other loaders, or these sizes by itself."""
    asked = ranks[0]["facts"]["made"]
    pairs = list(zip(asked, sizes, strict=True))
    own = one[0]["facts"]["asked"] if one else ()
    # A library may recreate a loader with the size that the first one was given.
    if not all(map(operator.contains, pairs, own)):
        return {}
    trained = {asked[place] for place in _loaders_that_train(ranks[0])} - {None}
    places = [place for place, size in enumerate(asked) if size in trained]
    if places and own and all(own[place : place + 1] == [sizes[place]] for place in places):
        return {}  # the script divides a batch size by the number of ranks
    needed = {str(asked[place]): str(sizes[place]) for place in places}
    return needed | {str(count): str(count * len(ranks)) for count in _rows_of_first(ranks[0])}


def _rows_of_first(rank: Record) -> list[int]:
    """Numbers of rows in the first step that no loader's batch size tells."""
    facts, first = rank["facts"], rank["steps"][:1]
    rows = [] if facts["loaders"] else [each["count"] for step in first for each in calls_of(step)]
    if None in facts["made"]:  # a sampler of batches that does not tell its size
        rows += [int(each["rows"]) for each in batches_of(*first)]
    return rows


def _has_sizes(one: Record, rank: Record, sizes: tuple[int | None, ...]) -> bool:
    """Whether the loaders that train have these batch sizes; others may have a fixed one, as for an evaluation."""
    made, trains = one["facts"]["made"], _loaders_that_train(rank)
    pairs = enumerate(zip(made, sizes, strict=False))
    return len(made) == len(sizes) and all(size == other for place, (size, other) in pairs if place in trains)


def _loaders_that_train(rank: Record) -> set[int]:
    """Numbers of torch's loaders whose batches are trained on."""
    return {each["made"] for each in rank["facts"]["passes"] if each["trains"] and each["made"] is not None}


def _has_rows(one: Record, first: Sequence[Record]) -> bool:
    """Whether the first step of one process has the rows of all ranks: without a loader, the same ones."""
    own = one["steps"][0]
    if own["batches"]:
        return rows_of(own) == sum(map(rows_of, first))
    return not calls_of(own) or entered(own) == entered(*first)


def _ways(script: Script, values: Mapping[str, str], options: Mapping[str, str], where: InScript) -> list[Changes]:
    """Changes with which one process may get the batches of all ranks.

    Args:
        script: the script.
        values: number -> replacement.
        options: the script's options that were not passed -> their default values.
        where: which numbers in the script to try, too.
    """
    now = script.changes
    ways = [dataclasses.replace(now, args=args) for args in _with_another(now.args, values)]
    left_out = sorted((name for name in options if options[name] in values), key=lambda name: "batch" not in name)
    ways += [dataclasses.replace(now, args=(*now.args, f"{name}={values[options[name]]}")) for name in left_out]
    ways = ways[: 2 * _MOST_OPTIONS]
    numbers = [] if where is InScript.NOWHERE else _numbers_in(script, values, _OF_BATCHES, where is InScript.ANYWHERE)
    return ways + [dataclasses.replace(now, numbers=(*now.numbers, each)) for each in numbers[:_MOST_OPTIONS]]


def _numbers_in(script: Script, values: Mapping[str, str], words: Sequence[str], anywhere: bool = True) -> list[Number]:
    """Numbers in the source of the script that have replacements, to try one after the other.

    Args:
        script: the script.
        values: number -> replacement.
        words: words in the lines of the numbers to try first.
        anywhere: whether to try numbers in other lines, too.
    """
    try:
        with tokenize.open(script.what.target) as file:
            found = [each for each in tokenize.generate_tokens(file.readline) if each.string.strip("\"'") in values]
    except (OSError, SyntaxError, UnicodeError, tokenize.TokenError):  # a module's name, a folder, another program
        return []
    found.sort(key=lambda each: not any(word in each.line.lower() for word in words))
    found = [each for each in found if anywhere or any(word in each.line.lower() for word in words)]
    numbers = [(each, each.string.strip("\"'")) for each in found]
    return [(*each.start, each.string, each.string.replace(number, values[number])) for each, number in numbers]


def _needed_batch_sizes(ranks: Sequence[Record], one: Sequence[Record]) -> tuple[int | None, ...]:
    """The batch size that each loader of torch needs in one process to yield the batches of all ranks.

    Args:
        ranks: the ranks' records.
        one: record of one process with such sizes, to correct them; empty for the first try.
    """
    first, facts = first_steps(ranks), ranks[0]["facts"]
    parts, factor = first, float(len(ranks))
    draws_order = any(facts["loaders"][batch["loader"]]["draws_order"] for batch in batches_of(*first[:1]))
    if first and not draws_order and Samples(first, first[0]).is_alike:
        # All ranks iterate over the same samples in the order of the data, as one process does.
        parts, factor = first[:1], 1.0
    factor *= _times_rows(parts, *first_steps(one)) if first and first_steps(one) else 1.0
    return tuple(None if size is None else max(1, round(size * factor)) for size in facts["made"])


def _times_rows(ranks: Sequence[Record], one: Record) -> float:
    """Ratio of the ranks' samples in a step to those of one process.

    Computed from the first batch and the number of batches, because padded or prefetched ones come last.
    """
    own, *theirs = (batches_of(each) for each in (one, *ranks))
    if not own or not all(theirs):
        return 1.0
    counts = {len(each) for each in theirs}
    times = counts.pop() / len(own) if len(counts) == 1 else 1.0
    return times * sum(int(each[0]["rows"]) for each in theirs) / max(1, int(own[0]["rows"]))


def streams_of_ranks(runs: Runs, verdict: Verdict) -> str:
    """How to give one process the batches of the ranks' streams; empty if it has them, or there are none."""
    passes = [one for each in runs.ranks for one in each["facts"]["passes"] if one["stream"] and one["trains"]]
    if verdict.first != ("samples", "order") or not passes or not all(one["kept"] for one in passes):
        return ""
    own, *ranks = (each["steps"][0] for each in (runs.one, *runs.ranks))
    return IN_TURN if passes_are_shared_out(own, ranks) else JOINED


def reads_streams_of_ranks(runs: Runs) -> bool:
    """Whether one process by itself reads the ranks' batches in their order, one rank after the other."""
    for passes in zip(*(each["facts"]["passes"] for each in (runs.one, *runs.ranks)), strict=False):
        own, *ranks = (one["keys"] for one in passes)
        of_ranks = (key for batches in zip(*ranks, strict=False) for batch in batches for key in batch)
        of_one = (key for batch in own for key in batch)
        if passes[0]["trains"] and any(map(operator.ne, of_ranks, of_one)):
            return False
    return True


def why_not_given(runs: Runs) -> str:
    """Why one process by itself does not get as many samples as the ranks in its first step; empty if it does."""
    own, *ranks = (each["steps"][0] for each in (runs.one, *runs.ranks))
    facts = runs.ranks[0]["facts"]
    if None in facts["made"] and rows_of(own) < sum(map(rows_of, ranks)):
        return _NO_SIZE
    is_stream = any(one["stream"] and one["trains"] for one in facts["passes"])
    return _OF_STREAMS if is_stream and passes_are_shared_out(own, ranks) else ""


def _has_other_batches(runs: Runs, verdict: Verdict) -> bool:
    """Whether steps differ, and one process had samples in other batches, as when a step takes a whole epoch."""
    for steps in zip(runs.one["steps"], *(each["steps"] for each in runs.ranks), strict=False):
        for own, *ranks in zip(*(each["batches"] for each in steps), strict=False):
            if Samples([{"batches": [each]} for each in ranks], {"batches": [own]}).differ:
                return verdict.code == 1
    return False


def order_of_ranks(runs: Runs, verdict: Verdict) -> Orders:
    """Number of a training pass -> the indices of all ranks' batches; empty if one process already has them.

    Also empty if a sample comes twice in any pass: only one batch of a further epoch may have been seen.
    """
    found = dict[int, list[list[int]]]()
    joins = verdict.code == 1 and _draws_for_parts(runs)
    is_other = verdict.first in OTHER_ORDER or _has_other_batches(runs, verdict) or _ends_early(runs, verdict)
    if not joins and not is_other:
        return found
    firsts = first_steps([runs.one, *runs.ranks])
    is_cut = bool(firsts) and passes_are_shared_out(firsts[0], firsts[1:])
    # Evaluations may be rank 0's alone.
    trains = [[each for each in enumerate(rank["facts"]["passes"]) if each[1]["trains"]] for rank in runs.ranks]
    for (number, first), *others in zip(*trains, strict=False):
        asked = [first["asked"], *(one["asked"] for _, one in others)]
        own = [*runs.one["facts"]["passes"][number : number + 1], {"asked": (), "finished": False}][0]
        joined = _one_order(asked, own["asked"] if joins else ())
        if joined is None:
            return {}
        is_short = own["finished"] and len(own["asked"]) < len(joined)
        given = _in_sizes_of(own["asked"], joined, is_short, joins, is_cut)
        found |= {number: given} if given else {}
    return found


def _draws_for_parts(runs: Runs) -> bool:
    """Whether draws may be for parts of samples, such as nodes: they can only be given in the ranks' order."""
    has_parts = any(batch["joins"] for batch in batches_of(*runs.one["steps"][:1]))
    return has_parts or bool(runs.one["facts"]["unplaced"])


def gives_others(runs: Runs, orders: Orders) -> bool:
    """Whether one process by itself has other samples in its batches than those given, not only another order."""
    passes = dict(enumerate(each["asked"] for each in runs.one["facts"]["passes"]))
    pairs = ((passes.get(number, ()), given) for number, given in orders.items())
    return any(sorted(a or ()) != sorted(b) for asked, given in pairs for a, b in zip(asked, given, strict=False))


def _ends_early(runs: Runs, verdict: Verdict) -> bool:
    """Whether one process takes fewer steps than the ranks, because it drops a last batch that is padded for them."""
    return verdict.first == ("steps", "number-of-steps") and len({len(each["steps"]) for each in runs.ranks}) == 1


def _in_sizes_of(
    own: Sequence[list[int] | None], joined: list[list[int]], is_short: bool, in_order: bool, is_cut: bool
) -> list[list[int]]:
    """The ranks' joined batches, `is_cut` if one process accumulates over more; empty if it already has them."""
    has_them, sort = own and not is_short, list if in_order else sorted
    if not joined or (has_them and all(sort(a) == sort(b or ()) for a, b in zip(joined, own, strict=False))):
        return []
    size = len(own[0] or ()) if own and is_cut else 0
    if not size or len(joined[0]) % size:
        return joined
    return [each[at : at + size] for each in joined for at in range(0, len(each), size)]


def _one_order(
    asked: Sequence[Sequence[list[int] | None]], own: Sequence[list[int] | None] = ()
) -> list[list[int]] | None:
    """The batches of all ranks; None if a sample comes twice, unless these are the samples of the `own` batches."""
    seen: set[int] = set()
    batches: list[list[int]] = []
    last = max(map(len, asked)) - 1
    for number, parts in enumerate(itertools.zip_longest(*asked, fillvalue=[])):
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        indices = [index for part in known for index in part]
        new = [index for index in dict.fromkeys(indices) if index not in seen]
        if number < len(own) and sorted(own[number] or ()) == sorted(indices):
            new = indices
        elif len(new) < len(indices) and number < last:
            return None
        seen.update(new)
        batches.append(new)
    return batches


def evaluation_of_first(runs: Runs) -> Orders:
    """Number of an evaluation pass -> the batches of rank 0, if one process has others."""
    facts = runs.ranks[0]["facts"]
    found, of_own_loaders = dict[int, list[list[int]]](), list[int]()
    for number, (first, own) in enumerate(zip(facts["passes"], runs.one["facts"]["passes"], strict=False)):
        if first["trains"]:
            continue
        if first["asked"] and None not in first["asked"] and first["asked"] != own["asked"]:
            found[number] = first["asked"]
        if facts["loaders"][first["loader"]]["own"]:
            of_own_loaders.append(number)
    return {**found, OF_RANK_0: [of_own_loaders]}
