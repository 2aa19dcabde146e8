"""What follows the steps: epochs in one order, evaluations, numbers that are printed, and checkpoints.

Parameters are those of one process here: whoever calls this has seen that no step differs. Numbers in the lines that
rank 0 printed are compared with those in the same lines of one process; a number that one process prints otherwise
the second time, such as seconds, is none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

from lockstep.tools.verify.compare import distances
from lockstep.tools.verify.step import counted
from lockstep.tools.verify.words import Difference, difference

__all__ = ["LOGGED", "judge_aftermath"]

LOGGED = "logged: "
"""With which a note on printed numbers begins."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")
# 12:59:07,123, whose parts may be the same twice in one process, and others on the ranks.
_CLOCK = re.compile(r"\d+(?::\d+)+(?:[.,]\d+)?")
_CLOSE = 5e-4
Facts = Mapping[str, Any]
# By form and number: whether an evaluation came before, the numbers, the text, and the line of the script.
Lines = Mapping[tuple[str, int], tuple[bool, list[str], str, str]]


def judge_aftermath(
    ranks: Sequence[Facts], one: Facts, again: Facts | None, moved: Facts | None
) -> tuple[list[Difference], list[str]]:
    """Differences, and notes on what is no difference of the training.

    Args:
        ranks: the facts of each rank.
        one: of one process.
        again: of one process once more, or None.
        moved: of one process that evaluated what rank 0 evaluates, or None.
    """
    found = [*_same_epochs(ranks[0]), *_saved_by_all(ranks), *_other_models(ranks[0], one, again)]
    evaluated, notes = _printed(ranks, one, again, moved)
    return found + evaluated, notes


def _same_epochs(facts: Facts) -> list[Difference]:
    """A sampler that shuffles, and a second epoch that begins as the first did."""
    for number, loader in enumerate(facts["loaders"]):
        passes = [each for each in facts["passes"] if each["loader"] == number and each["keys"]]
        passes = [each for each in passes if each["trains"] or not each["finished"]]  # nor a statistic or an evaluation
        while passes and not passes[0]["trains"]:  # a look at a batch before the training
            del passes[0]
        if loader["shuffles"] and len(passes) > 1 and all(each["keys"][0] == passes[0]["keys"][0] for each in passes):
            count = len(passes[0]["keys"][0])
            measured = (
                f"the second epoch began with the same {count} samples as the first, in the same order, though the "
                "sampler shuffles"
            )
            return [difference(0, "samples", "set-epoch never", measured)]
    return []


def _other_models(facts: Facts, one: Facts, again: Facts | None) -> list[Difference]:
    """A model that no optimizer steps, and that is another than in one process."""
    ranks, own, second = (
        {name: value for name, (value, _) in each["untrained"].items()} for each in (facts, one, again or one)
    )
    moved, noise = distances(own, ranks), distances(own, second)
    name = next((name for name, value in moved.items() if value > _CLOSE and noise.get(name, 1.0) < _CLOSE / 10), None)
    if name is None or one["begun"]:
        return []
    measured = f"the parameters of {name} are not those of one process, by {moved[name]:.1e}"
    lines = tuple(filter(None, [facts["untrained"][name][1]]))
    return [difference(0, "evaluated", "other-weights", measured, lines)]


def _saved_by_all(ranks: Sequence[Facts]) -> list[Difference]:
    writers: dict[str, set[int]] = {}
    lines: dict[str, str] = {}
    for rank, facts in enumerate(ranks):
        for path, line in facts["saves"]:
            if path and not path.startswith("/dev/"):
                writers.setdefault(path, set()).add(rank)
                lines[path] = line
    return [
        difference(
            0,
            "saved",
            "all-ranks-save",
            f"ranks {', '.join(map(str, sorted(who)))} write {path}",
            (lines[path],) if lines[path] else (),
        )
        for path, who in writers.items()
        if len(who) > 1
    ]


def _lines(facts: Facts | None) -> Lines:
    """Lines by what they say besides numbers, and how often it was said before."""
    counts: Counter[str] = Counter()
    found = {}
    for is_evaluation, line, where in () if facts is None else facts["texts"]:
        timeless = _CLOCK.sub(":", line)
        form = _NUMBER.sub("#", timeless)
        found[form, counts[form]] = (is_evaluation, _NUMBER.findall(timeless), line, where)
        counts[form] += 1
    return found


def _decimals(text: str) -> float:
    """How much the last digit of a number stands for."""
    digits, _, power = text.lower().partition("e")
    return 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def _is_close(a: str, b: str) -> bool:
    x, y = float(a), float(b)
    return abs(x - y) <= max(_CLOSE * max(abs(x), abs(y)), 0.0 if a.isdigit() and b.isdigit() else 1.5 * _decimals(a))


def _printed(
    ranks: Sequence[Facts], one: Facts, again: Facts | None, moved: Facts | None
) -> tuple[list[Difference], list[str]]:
    own, second, third, notes = _lines(one), _lines(again), _lines(moved), list[str]()
    evaluates_all = _evaluation_keys(ranks[0]) == _evaluation_keys(one)
    counts = {(str(len(ranks)), "1"), *_trained_counts(ranks[0], one)}
    for key, (is_evaluation, numbers, line, where) in _lines(ranks[0]).items():
        theirs = _numbers_of(own, key, [])
        wrong = _wrong_places(numbers, theirs, _numbers_of(second, key, theirs), counts)
        if not wrong:
            continue
        first = wrong[0]
        measured = f"rank 0 prints {line.strip()[:100]!r}, one process {own[key][2].strip()[:100]!r}"
        if len(numbers) > 1:
            measured += f": {numbers[first]} is not {theirs[first]}"
        # A number of an evaluation moves with the samples that are evaluated; a loss of the training does not.
        tried = theirs if evaluates_all else _numbers_of(third, key, [])
        stays = tried and all(tried[place] == theirs[place] for place in wrong)
        if is_evaluation and (not stays or any(_is_times(numbers[each], theirs[each], len(ranks)) for each in wrong)):
            return [_evaluated(ranks, one, measured, (where,) if where else (), evaluates_all)], notes
        if not notes:
            notes.append(
                f"{LOGGED}{measured}. The training is the same. If it is a number of this rank's samples, "
                "lockstep.mean(loss * len(y), len(y)) makes it that of all"
            )
    return [], notes


def _trained_counts(facts: Facts, one: Facts) -> set[tuple[str, str]]:
    """How many samples rank 0 and one process trained on in an epoch."""
    ranks, own = (
        [str(sum(map(len, each["keys"]))) for each in run["passes"] if each["trains"]] for run in (facts, one)
    )
    return set(zip(ranks, own, strict=False))


def _wrong_places(
    numbers: list[str], theirs: list[str], repeated: list[str], counts: Container[tuple[str, str]]
) -> list[int]:
    """Which numbers of a line are not those of one process; but for counts that a rank has of its own, and seconds."""
    return [
        place
        for place, (a, b, c) in enumerate(zip(numbers, theirs, repeated, strict=False))
        if (a, b) not in counts and not _is_close(a, b) and _is_close(b, c)
    ]


def _is_times(a: str, b: str, factor: int) -> bool:
    """Whether a number was added up over the ranks, or divided by their number."""
    x, y, digit = float(a), float(b), 1.5 * factor * _decimals(b)
    return y != 0 and any(abs(x - y * each) <= max(_CLOSE * abs(y * each), digit) for each in (factor, 1 / factor))


def _numbers_of(lines: Lines, key: tuple[str, int], default: list[str]) -> list[str]:
    return lines[key][1] if key in lines else default


def _evaluation_keys(facts: Facts) -> list[Counter[int]]:
    """The samples of each pass that did not train."""
    return [
        Counter(key[0] for keys in each["keys"] for key in keys)
        for each in facts["passes"]
        if not each["trains"] and each["finished"]
    ]


def _evaluated(
    ranks: Sequence[Facts], one: Facts, measured: str, lines: tuple[str, ...], evaluates_all: bool
) -> Difference:
    each = [_evaluation_keys(facts) for facts in ranks]
    own = _evaluation_keys(one)
    if own and all(each):
        mine = own[-1]
        total = sum((passes[-1] for passes in each), Counter[int]())
        extra = sum((total - mine).values())
        counts = [sum(passes[-1].values()) for passes in each]
        if extra and extra < sum(mine.values()) and not mine - total:
            measured += f"; one process evaluated {sum(mine.values())} samples, the ranks {', '.join(map(str, counts))}"
            return difference(0, "evaluated", "padded-evaluation", measured, lines, extra=counted(extra, "sample"))
    more = "; or the model that rank 0 evaluates keeps statistics of its own samples" if evaluates_all else ""
    return difference(0, "evaluated", "metric", measured, lines, more=more)
