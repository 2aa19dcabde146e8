"""Judges the aftermath of the steps: the order of epochs, evaluations, printed numbers, and checkpoints.

Parameters are equal to those of one process here, since the caller has found no step that differs. Numbers in lines
printed by rank 0 are compared with those in the same lines of one process; numbers that vary between runs of one
process, such as seconds, are ignored.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.tools.verify.compare import distances
from lockstep.tools.verify.step import Runs, counted
from lockstep.tools.verify.words import Difference, difference

__all__ = ["LOGGED", "judge_aftermath"]

LOGGED = "logged: "
"""The beginning of a note on printed numbers."""

_DRAWN_THERE = (
    "evaluation: it draws random numbers, and one process draws others than the ranks, so what it prints was not "
    "compared"
)
_OF_RANK_0S_SAMPLES = (
    "The training is the same. If this number covers only the rank's samples, lockstep.mean(loss * len(y), len(y)) "
    "covers all"
)
_ALIKE_IN_ONE = (
    "samples: the loader ({line}) is recreated for each epoch, so all epochs have the order of the first, on one "
    "process, too. Create it once, before the epochs"
)

# A unit may follow, as in 0.20s/it, but no more digits, as in versions.
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\.?\d)")
# Times such as 12:59:07,123, whose parts may be equal in two runs of one process, but differ on the ranks.
_CLOCK = re.compile(r"\d+(?::\d+)+(?:[.,]\d+)?")
# What a number of seconds, or a speed, follows and is followed by: two runs may print the same one by chance.
_BEFORE_TIME = re.compile(r"(?:time|elapsed|eta|duration|speed|throughput|fps)[^a-z]*$", re.IGNORECASE)
_AFTER_TIME = re.compile(r"\s?(?:[mun]?s|secs?|seconds?|minutes?|hours?|h)\b|\s?\w*/(?:s|sec|it|iter|step|batch)\b")
# Largest effect of rounding on a number that one process prints in two runs; seconds rarely differ by so little.
_REPEATED = 1e-5
# Largest effect of rounding between the ranks and one process, if there is no reason for another difference.
_CLOSE = 5e-4
Facts = Mapping[str, Any]


class _Line(NamedTuple):
    """A printed line: whether it follows an evaluation, its numbers and text, where it is printed, and its times."""

    is_evaluation: bool
    numbers: list[str]
    text: str
    where: tuple[str, ...]
    times: frozenset[int] = frozenset()


# (text of a line without its numbers, how often it was printed before) -> the line.
_Lines = Mapping[tuple[str, int], _Line]


def judge_aftermath(runs: Runs) -> tuple[list[Difference], list[str]]:
    """Differences, and notes on what differs without affecting training."""
    ranks, one = [each["facts"] for each in runs.ranks], runs.one["facts"]
    again, moved = (None if each is None else each["facts"] for each in (runs.again, runs.moved))
    alike, notes = _same_epochs(ranks[0], one)
    found = [
        *alike,
        *_saved_by_all(ranks),
        *(_saved_at_other_times(ranks[0], one, again or one) if not ranks[0]["end"] else ()),
        *_saved_in_part(ranks, one),
        *_other_models(ranks[0], one, again or one),
    ]
    is_rounded = any(step["rounded"] for step in runs.one["steps"])
    most = _CLOSE if is_rounded or not _evaluates_unevenly(ranks, one) else _REPEATED
    evaluated, logged = _printed(ranks, one, again, moved, most, _counts_of_passes(runs))
    return found + evaluated, notes + logged


def _same_epochs(facts: Facts, one: Facts) -> tuple[list[Difference], list[str]]:
    """Epochs that all begin like the first, though the sampler shuffles, or one process draws each anew.

    A note if `lockstep.DataLoader` shuffles one process's epochs alike, too: then the answer is that of one process.
    """
    notes = list[str]()
    for number, loader in enumerate(facts["loaders"]):
        epochs, own = _epochs_of(facts, number), _epochs_of(one, number)
        was_told = len({each.get("epoch") for each in epochs}) > 1  # a few samples come in the same order by chance
        if was_told or not _begin_alike(epochs):
            continue
        line, anew = epochs[0]["line"], all(each["anew"] for each in epochs)
        if loader["own"] and _begin_alike(own):
            notes += [_ALIKE_IN_ONE.format(line=line)] * (loader["shuffles"] and anew)
        elif loader["shuffles"] or any(each["drawn"] != own[0]["drawn"] for each in own):
            but = "though the sampler shuffles" if loader["shuffles"] else "but not on one process"
            measured = f"the second epoch began with the same {counted(len(epochs[0]['keys'][0]), 'sample')} as the "
            measured += f"first, in the same order, {but}"
            cause = "set-epoch anew" if anew else "set-epoch never" if loader["shuffles"] else "set-epoch alone"
            return [difference(0, "samples", cause, measured, _some(line))], notes
    return [], notes


def _begin_alike(epochs: Sequence[Facts]) -> bool:
    """Whether there are several epochs, which all begin with the samples of the first, in its order."""
    keys = [each["keys"] for each in epochs]
    return len(keys) > 1 and not any(a != b for each in keys for a, b in zip(each, keys[0], strict=False))


def _epochs_of(facts: Facts, loader: int) -> list[Facts]:
    """The passes over a loader that one training took its samples from."""
    passes = [each for each in facts["passes"] if each["loader"] == loader and each["keys"]]
    passes = [each for each in passes if each["trains"] or not each["finished"]]  # no statistics or evaluations
    passes = list(itertools.dropwhile(lambda each: not each["trains"], passes))  # a look at a batch before it
    # A further training begins with its own loader and optimizer.
    return [each for each in passes if not each["anew"] or each["optimizer"] == passes[0]["optimizer"]]


def _other_models(facts: Facts, one: Facts, again: Facts) -> list[Difference]:
    """A model that is not trained by an optimizer, or is saved, and differs from one process's."""
    ranks, own, second = ({name: each[0] for name, each in of["untrained"].items()} for of in (facts, one, again))
    # A rank may write other parts of a file than one process.
    own = {name: each for name, each in own.items() if name in ranks and ranks[name].shape == each.shape}
    moved, noise = distances(own, ranks), distances(own, second)
    name = next((name for name in own if moved[name] > _CLOSE and noise[name] < _CLOSE / 10), None)
    if name is None or one["begun"]:
        return []
    measured = f"the parameters of {name} differ from one process's by {moved[name]:.1e}"
    return [difference(0, "evaluated", "other-weights", measured, _some(facts["untrained"][name][1]))]


def _some(line: str) -> tuple[str, ...]:
    return (line,) if line else ()


def _saved_by_all(ranks: Sequence[Facts]) -> list[Difference]:
    """Files that several ranks write."""
    writers: dict[str, set[int]] = {}
    lines: dict[str, str] = {}
    for rank, facts in enumerate(ranks):
        for path, line, _, is_by_all in facts["saves"]:
            if is_by_all and path and not path.startswith("/dev/"):
                writers.setdefault(path, set()).add(rank)
                lines[path] = line
    shared = {path: ", ".join(map(str, sorted(who))) for path, who in writers.items() if len(who) > 1}
    return [
        difference(0, "saved", "all-ranks-save", f"ranks {who} write {path}", _some(lines[path]))
        for path, who in shared.items()
    ]


def _saved_at_other_times(*runs: Facts) -> Iterator[Difference]:
    """Files that rank 0 writes after other steps than one process, in either of its runs."""
    lines = {path: line for path, line, _, is_by_all in runs[0]["saves"] if is_by_all}
    for path, line in lines.items():
        ranks, own, again = ([steps for name, _, steps, _ in facts["saves"] if name == path] for facts in runs)
        if own and own == again != ranks:
            texts = (", ".join(map(str, each)) for each in (ranks, own))
            measured = "rank 0 writes {} after {} steps, one process after {}".format(path, *texts)
            yield difference(0, "saved", "other-steps", measured, _some(line))


def _saved_in_part(ranks: Sequence[Facts], one: Facts) -> Iterator[Difference]:
    """Files in which rank 0 saves fewer numbers than one process, and no other rank the rest."""
    facts, *others = ranks
    batches = {*zip(facts["made"], one["made"], strict=False)}  # as of the pictures of a batch
    shared = {line for each in others for _, line, _, _ in each["saves"]}
    for key, (shapes, line) in facts["shapes"].items():
        if line in shared:
            continue
        own, _ = one["shapes"].get(key, ({}, ""))
        both = [name for name in shapes.keys() & own.keys() if (shapes[name][0], own[name][0]) not in batches]
        names = [name for name in both if math.prod(shapes[name]) < math.prod(own[name])]
        if names:
            name = min(names)
            path, _, steps = key.rpartition(" after ")
            measured = (
                f"rank 0 writes {path} with {name or 'a tensor'} of shape {shapes[name]}, one process {own[name]}"
            )
            yield difference(0, "saved", "part", f"{measured} (after {steps})", _some(line))
            return


# ---- printed numbers ---------------------------------------------------------------------------------


def _lines(facts: Facts | None) -> _Lines:
    counts: Counter[str] = Counter()
    found = {}
    for is_evaluation, line, where in () if facts is None else facts["texts"]:
        timeless = _CLOCK.sub(":", line)
        form = " ".join(_NUMBER.sub("#", timeless).split())  # numbers may be padded to a width
        times = frozenset(at for at, each in enumerate(_NUMBER.finditer(timeless)) if _is_time(timeless, each))
        numbers, text = _NUMBER.findall(timeless), line.strip()[:100]
        found[form, counts[form]] = _Line(is_evaluation, numbers, text, _some(where), times)
        counts[form] += 1
    return found


def _is_time(text: str, number: re.Match[str]) -> bool:
    return bool(_BEFORE_TIME.search(text[: number.start()]) or _AFTER_TIME.match(text, number.end()))


def _printed(
    ranks: Sequence[Facts],
    one: Facts,
    again: Facts | None,
    moved: Facts | None,
    most: float,
    counts: set[tuple[str, str]],
) -> tuple[list[Difference], list[str]]:
    """Differences in numbers that rank 0 prints, and notes.

    Args:
        ranks, one, again, moved: facts of the runs.
        most: the largest effect of rounding on a number.
        counts: numbers of rank 0 and of one process that are different counts of the same.
    """
    first, own, second, third = map(_lines, (ranks[0], one, again, moved))
    evaluates_all, notes = _evaluation_keys(ranks[0]) == _evaluation_keys(one), list[str]()
    is_tried = not evaluates_all or (one["by_hand"] and bool(third))
    found: dict[str, list[tuple[str, tuple[str, ...], bool]]] = {}  # by form: of each epoch, as few samples may agree
    # Counts that depend on the rank: of ranks, and of samples in an epoch and a batch.
    counts |= {(str(len(ranks)), "1"), *zip(_counts(ranks[0]), _counts(one), strict=False)}
    for key, wrong in _unlike_lines(first, own, second, counts, most):
        line, theirs, measured = first[key], own[key].numbers, _in_words(first[key], own[key], wrong[0])
        tried = (third if is_tried else own).get(key, _Line(False, [], "", ())).numbers
        here, own_here, tried = ([each[place] for place in wrong if each] for each in (line.numbers, theirs, tried))
        is_drawn = line.is_evaluation and one["draws_in_evaluation"]
        if line.is_evaluation and not is_drawn and _is_of_evaluation(here, own_here, tried, len(ranks)):
            found.setdefault(key[0], []).append((measured, line.where, _are_close(here, tried)))
        elif not [*found, *notes]:
            notes = [f"{_DRAWN_THERE}: {measured}" if is_drawn else f"{LOGGED}{measured}. {_OF_RANK_0S_SAMPLES}"]
    if not found:
        return [], notes
    texts, places, are_own = map(list, zip(*next(iter(found.values())), strict=True))
    return [_evaluated(ranks, one, texts[0], places[0], evaluates_all, all(are_own))], notes


def _unlike_lines(
    first: _Lines, own: _Lines, again: _Lines, counts: set[tuple[str, str]], most: float
) -> Iterator[tuple[tuple[str, int], list[int]]]:
    """The key of each line with other numbers than in one process, and their positions."""
    unsure = _unsure_places(own, again)
    for key in [key for key in first if key in own]:
        places = _unlike_places(first[key].numbers, own[key].numbers, counts, most)
        places = [place for place in places if (key[0], place) not in unsure and place not in first[key].times]
        if places:
            yield key, places


def _in_words(line: _Line, own: _Line, place: int) -> str:
    measured = f"rank 0 writes {line.text!r}, one process {own.text!r}"
    return measured if len(own.numbers) == 1 else f"{measured}: {line.numbers[place]} is not {own.numbers[place]}"


def _unsure_places(own: _Lines, again: _Lines) -> set[tuple[str, int]]:
    """Positions in lines where one process writes another number in its second run, such as seconds."""
    return {
        (key[0], place)
        for key in own.keys() & again.keys()
        for place, (a, b) in enumerate(zip(own[key].numbers, again[key].numbers, strict=True))
        if abs(float(a) - float(b)) > _REPEATED * abs(float(a))
    }


def _unlike_places(
    numbers: Sequence[str], others: Sequence[str], counts: set[tuple[str, str]], most: float
) -> list[int]:
    """Positions of numbers that differ by more than rounding, and not as `counts` do."""
    pairs = enumerate(zip(numbers, others, strict=True))
    return [place for place, each in pairs if each not in counts and not _is_close(*each, most)]


def _is_of_evaluation(numbers: list[str], own: list[str], tried: list[str], world_size: int) -> bool:
    """Whether numbers depend on the samples evaluated, unlike a training loss, or are counts."""
    return tried != own or any(_is_times(a, b, world_size) for a, b in zip(numbers, own, strict=True))


def _counts(facts: Facts) -> list[str]:
    """Numbers of samples in batches of torch's loaders, and in each epoch, as printed."""
    epochs = (sum(map(len, each["keys"])) for each in facts["passes"] if each["trains"])
    return list(map(str, [*facts["made"], *epochs]))


def _counts_of_passes(runs: Runs) -> set[tuple[str, str]]:
    """How many backward passes rank 0 and one process may have counted so far, if the latter runs a multiple."""
    own, theirs = (sum(len(each["backwards"]) for each in run["steps"]) for run in (runs.one, runs.ranks[0]))
    times = own // theirs if theirs and own % theirs == 0 else 1
    return {(str(number), str(number * times)) for number in range(theirs + 1)} if times > 1 else set()


def _decimals(text: str) -> float:
    """The value of one unit in a number's last digit."""
    digits, _, power = text.lower().partition("e")
    return 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def _is_close(a: str, b: str, most: float = _CLOSE) -> bool:
    x, y = float(a), float(b)
    return abs(x - y) <= max(most * max(abs(x), abs(y)), 0.0 if a.isdigit() and b.isdigit() else 1.5 * _decimals(a))


def _are_close(numbers: list[str], others: list[str]) -> bool:
    return len(numbers) == len(others) and all(map(_is_close, numbers, others))


def _is_times(a: str, b: str, factor: int) -> bool:
    """Whether a number was summed over ranks, or divided by their number."""
    x, y, digit = float(a), float(b), 1.5 * factor * _decimals(b)
    return y != 0 and any(abs(x - y * each) <= max(_CLOSE * abs(y * each), digit) for each in (factor, 1 / factor))


def _evaluation_keys(facts: Facts) -> list[Counter[int]]:
    """The samples of each pass without training."""
    return [
        Counter(key[0] for keys in each["keys"] for key in keys)
        for each in facts["passes"]
        if not each["trains"] and each["finished"]
    ]


def _evaluates_unevenly(ranks: Sequence[Facts], one: Facts) -> bool:
    """Whether ranks evaluate different numbers of samples, or together not those of one process."""
    passes = zip(*map(_evaluation_keys, (one, *ranks)), strict=False)
    return any(len({each.total() for each in parts}) > 1 or sum(parts, Counter()) != own for own, *parts in passes)


def _evaluated(
    ranks: Sequence[Facts], one: Facts, measured: str, lines: tuple[str, ...], evaluates_all: bool, is_own: bool
) -> Difference:
    """The difference in an evaluation; `is_own` if one process prints the same when given only rank 0's samples."""
    own, *each = (_evaluation_keys(facts)[-1:] for facts in (one, *ranks))
    if own and all(each) and not is_own:
        counts = [keys.total() for (keys,) in each]
        total = sum((keys for (keys,) in each), Counter[int]())
        extra, missing = (total - own[0]).total(), (own[0] - total).total()
        if bool(extra) != bool(missing) and extra + missing < own[0].total():
            text = ", ".join(map(str, counts))
            measured += f"; one process evaluated {own[0].total()} samples, the ranks {text}"
            cause = "padded-evaluation" if extra else "left-out-evaluation"
            number = counted(extra or missing, "sample")
            return difference(0, "evaluated", cause, measured, lines, extra=number, missing=number)
    more = "; or the model that rank 0 evaluates keeps statistics of its own samples" if evaluates_all else ""
    return difference(0, "evaluated", "metric", measured, lines, more=more)
