"""How far what enters models and comes out of them is from one process, row by row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.tools.verify.compare import far, relative
from lockstep.tools.verify.samples import calls_of

__all__ = ["Calls", "measure_calls"]

_Call = Mapping[str, Any]
_Pair = tuple[int, int, int]  # a row of one process, a rank, and its row


@dataclass(frozen=True)
class Calls:
    """What entered the models and came out of them.

    Attributes:
        rows: rows that one process had.
        unknown: rows that one process had and no rank, or a rank and not one process.
        inputs: largest difference between inputs of the same samples.
        outputs: largest difference between outputs for the same inputs; infinite where only a module inside has some.
        culprit: name and class of the first module inside whose output differs though its input does not.
        kind: class of the model in question.
        foreign: those of `unknown` that a rank had.
        parameters: largest difference between the parameters that the model has when it is called.
        apart: the same between the ranks.
        begins: no backward pass of the step came before.
    """

    rows: int = 0
    unknown: int = 0
    inputs: float = 0.0
    outputs: float = 0.0
    culprit: tuple[str, str] = ("", "")
    kind: str = ""
    foreign: int = 0
    parameters: float = 0.0
    apart: float = 0.0
    begins: bool = False


def measure_calls(
    ranks: Sequence[Mapping[str, Any]], one: Mapping[str, Any], limit: float, padded: bool = False
) -> Calls:
    """Compare forward passes one after the other, rows by what is in them; the first that differs is told.

    Args:
        ranks: the step on each rank.
        one: the same of one process.
        limit: what rounding makes.
        padded: samples are padded to other lengths, so that inputs differ, and outputs of one shape should not.
    """
    each, told = [calls_of(step) for step in ranks], Calls()
    for number, call in enumerate(calls_of(one)):
        others = [calls[number] for calls in each if number < len(calls)]
        if others and call["count"]:
            told = _measure_call(call, others, limit, padded)
            if told.unknown or any(far(each, limit) for each in (told.inputs, told.outputs, told.parameters)):
                break
    return told


def _measure_call(one: _Call, ranks: Sequence[_Call], limit: float, padded: bool) -> Calls:
    exact, by_sample, rest = _match(one, ranks)
    near = _near(one, ranks, rest, limit)
    foreign = max(0, _count_foreign(one, ranks) - len(near))
    inputs = 0.0 if padded else _rows_differ(one["inputs"], [each["inputs"] for each in ranks], by_sample)
    known = [*exact, *near, *(() if far(inputs, limit) else by_sample)]
    # Outputs for samples that are padded to other lengths may have other lengths, too, which are not compared.
    alike = [pair for pair in known if not padded or ranks[pair[1]]["widths"] == one["widths"]]
    outputs = _least(one, ranks, ("outputs", "across"), alike)
    is_unseen = one["outputs"] is None and all(each["outputs"] is None for each in ranks)
    culprit = _culprit(one, ranks, known, limit) if is_unseen or far(outputs, limit) else ("", "")
    held = [each["parameters"] for each in ranks if each["parameters"].shape == one["parameters"].shape]
    return Calls(
        rows=one["count"],
        unknown=len(rest) - len(near) + foreign,
        inputs=inputs,
        outputs=float("inf") if is_unseen and culprit[1] else outputs,
        culprit=culprit,
        kind=one["name"],
        foreign=foreign,
        parameters=max((relative(one["parameters"], each) for each in held), default=0.0),
        apart=max((relative(held[0], each) for each in held[1:]), default=0.0),
        begins=not one["after"],
    )


def _match(one: _Call, ranks: Sequence[_Call]) -> tuple[list[_Pair], list[_Pair], list[int]]:
    """Rows of one process of which a rank has the content, those of which it has the sample, and the others."""
    places, samples = defaultdict[int, list[tuple[int, int]]](list), defaultdict[int, list[tuple[int, int]]](list)
    for rank, call in enumerate(ranks):
        for found, keys in ((places, call["keys"]), (samples, call["samples"] or ())):
            for row, key in enumerate(keys):
                found[key].append((rank, row))
    exact, by_sample, rest = list[_Pair](), list[_Pair](), list[int]()
    for row, key in enumerate(one["keys"]):
        same, of_sample = places.get(key), samples.get(one["samples"][row]) if one["samples"] else None
        if same:
            exact.append((row, *(same.pop(0) if len(same) > 1 else same[0])))
        elif of_sample:
            by_sample.append((row, *of_sample[0]))
        else:
            rest.append(row)
    return exact, by_sample, rest


def _count_foreign(one: _Call, ranks: Sequence[_Call]) -> int:
    """Rows of ranks of which one process has neither the content nor the sample."""
    known = {*one["keys"], *(one["samples"] or ())}
    pairs = (pair for call in ranks for pair in zip(call["keys"], call["samples"] or call["keys"], strict=True))
    return sum(known.isdisjoint(pair) for pair in pairs)


def _near(one: _Call, ranks: Sequence[_Call], rows: Sequence[int], limit: float) -> list[_Pair]:
    """Rows that a rank has but for rounding, as a product over a batch of another size leaves them."""
    found: dict[int, _Pair] = {}
    for rank, call in enumerate(ranks):
        own, theirs = one["inputs"], call["inputs"]
        if own is None or theirs is None or own.shape[1:] != theirs.shape[1:]:
            continue
        for row in rows:
            place = int((theirs - own[row]).abs().amax(1).argmin())
            if not far(relative(own[row], theirs[place]), limit):
                found.setdefault(row, (row, rank, place))
    return list(found.values())


def _rows_differ(one: Tensor | None, ranks: Sequence[Tensor | None], pairs: Sequence[_Pair]) -> float:
    """Largest difference of paired rows; nothing where there are none to compare."""
    if one is None or not pairs:
        return 0.0
    worst = 0.0
    for rank in sorted({rank for _, rank, _ in pairs}):
        other = ranks[rank]
        if other is None or other.shape[1:] != one.shape[1:]:
            return float("inf")
        own = [row for row, at, _ in pairs if at == rank]
        theirs = [row for _, at, row in pairs if at == rank]
        worst = max(worst, relative(one[own], other[theirs]))
    return worst


def _least(one: _Call, ranks: Sequence[_Call], ways: Sequence[str], pairs: Sequence[_Pair]) -> float:
    """The smaller difference of two ways to find the rows of each sample in a tensor with several."""
    return min(_rows_differ(one[way], [each[way] for each in ranks], pairs) for way in ways)


def _culprit(one: _Call, ranks: Sequence[_Call], pairs: Sequence[_Pair], limit: float) -> tuple[str, str]:
    """The first module, by the order in which they return, whose rows differ."""
    for place, inner in enumerate(one["inner"]):
        others = [call["inner"][place] for call in ranks if place < len(call["inner"])]
        if [each["name"] for each in others] != [inner["name"]] * len(ranks):
            break
        if any(each["output"] is None for each in (inner, *others)):
            continue
        if far(_least(inner, others, ("output", "across"), pairs), limit):
            inputs = [each["input"] for each in others]
            if inner["input"] is not None and far(_rows_differ(inner["input"], inputs, pairs), limit):
                break
            return inner["name"], inner["kind"]
    return ("", "")
