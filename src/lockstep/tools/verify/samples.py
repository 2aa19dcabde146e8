"""Which samples a step was made of, and how far what enters its models and comes out of them is from one process.

Samples are known by content, else by their index in the dataset; rows of models by content, else by their sample.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.tools.verify.compare import far, relative

__all__ = [
    "Calls",
    "Record",
    "Samples",
    "batches_of",
    "calls_of",
    "contents",
    "entered",
    "have_same_indices",
    "measure_calls",
    "passes_are_shared_out",
    "rows_of",
]

# What a process recorded of a step, of a forward pass, or of all.
Record = Mapping[str, Any]
_Pair = tuple[int, int, int]  # a row of one process, a rank, and its row


def batches_of(*steps: Record) -> list[Record]:
    """What loaders gave to some steps, without fillers."""
    return [batch for step in steps for batch in step["batches"] if not batch["filler"]]


def calls_of(step: Record) -> list[Record]:
    """Forward passes that were for samples."""
    return [call for call in step["calls"] if not call["filler"]]


def entered(*steps: Record, by: str = "keys") -> Counter[int]:
    """The rows that entered models, by content; `by="unpadded"` leaves padding out."""
    return Counter(key for step in steps for call in step["calls"] for key in call[by])


def rows_of(step: Record) -> int:
    """Samples of a step; those that went into its models where no loader gave them."""
    if step["batches"]:
        return sum(batch["rows"] for batch in batches_of(step))
    return sum(call["count"] for call in calls_of(step))


def passes_are_shared_out(one: Record, ranks: Sequence[Record]) -> bool:
    """Whether the backward passes of all ranks together are as many as those of one process, in a step."""
    return len(one["backwards"]) == sum(len(each["backwards"]) for each in ranks)


# ---- samples -----------------------------------------------------------------------------------------


class Samples:
    """Which samples a step was made of, by content, whatever their order.

    Attributes:
        one: how many one process had.
        ranks: how many each rank had, fillers apart.
        missing: that one process had, and no rank.
        extra: that ranks had more often than one process.
        padded: that are the same but for padding at their ends.
        is_alike: all ranks had the same samples.
        by_index: the content of their batches is not to be compared, and their indices are the same.
    """

    def __init__(self, ranks: Sequence[Record], one: Record) -> None:
        exact, own = [_keys(step) for step in ranks], _keys(one)
        total: Counter[int] = sum(exact, Counter())
        missing, extra = own - total, total - own
        self.padded, self.by_index = 0, bool(missing or extra) and _are_the_same_by_index(ranks, one)
        if self.by_index:
            missing, extra = Counter(), Counter()
        elif missing or extra:
            unpadded: Counter[int] = sum((_keys(step, 1) for step in ranks), Counter())
            rest, more = _keys(one, 1) - unpadded, unpadded - _keys(one, 1)
            if rest.total() + more.total() < missing.total() + extra.total():
                self.padded = missing.total() - rest.total()
                missing, extra = rest, more
        self.one, self.ranks = own.total(), [each.total() for each in exact]
        self.missing, self.extra = missing.total(), extra.total()
        self.is_alike = len(ranks) > 1 and bool(exact[0]) and all(each == exact[0] for each in exact[1:])

    @property
    def differ(self) -> bool:
        """Whether they are not the same samples."""
        return self.missing > 0 or self.extra > 0


def _keys(step: Record, which: int = 0) -> Counter[int]:
    return Counter(key[which] for batch in batches_of(step) for key in batch["keys"])


def _are_the_same_by_index(ranks: Sequence[Record], one: Record) -> bool:
    """Whether indices say so, of batches whose tensors hold parts of samples and do not say where each begins."""
    return all(batch["joins"] for batch in batches_of(one, *ranks)) and have_same_indices(ranks, one)


def have_same_indices(ranks: Sequence[Record], one: Record) -> bool:
    """Whether the loaders of the ranks fetched in a step what one process fetched, by index."""
    own, theirs = (
        sorted((batch["loader"], index) for batch in batches_of(*steps) for index in batch["indices"] or ())
        for steps in ([one], ranks)
    )
    return bool(own) and own == theirs


def contents(record: Record) -> dict[tuple[int, int], int]:
    """What each index of each loader's dataset was found to be, in all steps of a process."""
    return {
        (batch["loader"], index): key
        for step in record["steps"]
        for batch in step["batches"]
        for index, (key, _) in zip(batch["indices"] or (), batch["keys"], strict=False)
    }


# ---- forward passes ----------------------------------------------------------------------------------


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
        padded: rows that are the same but for padding at their ends.
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
    padded: int = 0


def measure_calls(ranks: Sequence[Record], one: Record, limit: float, padded: bool = False) -> Calls:
    """Compare forward passes one after the other, rows by what is in them; the first that differs is told.

    Of samples that are `padded` to other lengths, inputs differ, and outputs of one shape should not.
    """
    each, told = [calls_of(step) for step in ranks], Calls()
    for number, call in enumerate(calls_of(one)):
        others = [calls[number] for calls in each if number < len(calls)]
        if others and call["count"]:
            told = _measure_call(call, others, limit, padded)
            if told.unknown or any(far(each, limit) for each in (told.inputs, told.outputs, told.parameters)):
                break
    return told


def _measure_call(one: Record, ranks: Sequence[Record], limit: float, padded: bool) -> Calls:
    exact, by_sample, rest = _match(one, ranks)
    near = _near(one, ranks, rest, limit)
    filled = [pair for pair in by_sample if ranks[pair[1]]["unpadded"][pair[2]] == one["unpadded"][pair[0]]]
    padded |= bool(filled)
    foreign = max(0, _count_foreign(one, ranks) - len(near))
    inputs = 0.0 if padded else _rows_differ(one, ranks, "inputs", by_sample)
    paired = [*exact, *near, *(() if far(inputs, limit) else by_sample)]
    # Outputs for samples that are padded to other lengths may have other lengths, too, which are not compared.
    alike = [pair for pair in paired if not padded or ranks[pair[1]]["widths"] == one["widths"]]
    outputs = _sides_differ(one, ranks, "outputs", alike)
    is_unseen = one["outputs"] is None and all(each["outputs"] is None for each in ranks)
    culprit = _culprit(one, ranks, paired, limit) if is_unseen or far(outputs, limit) else ("", "")
    own = one["parameters"]
    held = [each["parameters"] for each in ranks if each["parameters"].shape == own.shape]
    return Calls(
        rows=one["count"],
        unknown=len(rest) - len(near) + foreign,
        inputs=inputs,
        outputs=math.inf if is_unseen and culprit[1] else outputs,
        culprit=culprit,
        kind=one["name"],
        foreign=foreign,
        parameters=_furthest(own, held),
        apart=_furthest(held[0], held[1:]) if held else 0.0,
        begins=not one["after"],
        padded=len(filled),
    )


def _furthest(first: Tensor, others: Sequence[Tensor]) -> float:
    return max((relative(first, each) for each in others), default=0.0)


def _match(one: Record, ranks: Sequence[Record]) -> tuple[list[_Pair], list[_Pair], list[int]]:
    """Rows of one process of which a rank has the content, those of which it has the sample, and the others."""
    places, samples = defaultdict[int, list[tuple[int, int]]](list), defaultdict[int, list[tuple[int, int]]](list)
    for rank, call in enumerate(ranks):
        for found, keys in ((places, call["keys"]), (samples, call["samples"])):
            for row, key in enumerate(keys):
                found[key].append((rank, row))
    exact, by_sample, rest = list[_Pair](), list[_Pair](), list[int]()
    for row, key in enumerate(one["keys"]):
        same, of_sample = places.get(key), samples.get(one["samples"][row])
        if same:
            exact.append((row, *(same.pop(0) if len(same) > 1 else same[0])))
        elif of_sample:
            by_sample.append((row, *of_sample[0]))
        else:
            rest.append(row)
    return exact, by_sample, rest


def _count_foreign(one: Record, ranks: Sequence[Record]) -> int:
    """Rows of ranks of which one process has neither the content nor the sample."""
    known = {*one["keys"], *one["samples"]}
    pairs = (pair for call in ranks for pair in zip(call["keys"], call["samples"], strict=True))
    return sum(map(known.isdisjoint, pairs))


def _near(one: Record, ranks: Sequence[Record], rows: Sequence[int], limit: float) -> list[_Pair]:
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


def _rows_differ(one: Record, ranks: Sequence[Record], what: str, pairs: Sequence[_Pair]) -> float:
    """Largest difference of paired rows; nothing where there are none to compare."""
    if one[what] is None or not pairs:
        return 0.0
    rows = list[Tensor]()
    for _, rank, row in pairs:
        other = ranks[rank][what]
        if other is None or other.shape[1:] != one[what].shape[1:]:
            return math.inf
        rows.append(other[row])
    return relative(one[what][[row for row, _, _ in pairs]], torch.stack(rows))


def _sides_differ(one: Record, ranks: Sequence[Record], what: str, pairs: Sequence[_Pair]) -> float:
    """The same: the smaller of two ways to find the rows of each sample in a tensor with several."""
    return min(_rows_differ(one, ranks, way, pairs) for way in (what, f"{what} across"))


def _culprit(one: Record, ranks: Sequence[Record], pairs: Sequence[_Pair], limit: float) -> tuple[str, str]:
    """The first module, by the order in which they return, whose rows differ."""
    for place, inner in enumerate(one["inner"]):
        others = [call["inner"][place] for call in ranks if place < len(call["inner"])]
        if [each["name"] for each in others] != [inner["name"]] * len(ranks):
            break
        is_seen = all(each["outputs"] is not None for each in (inner, *others))
        if is_seen and far(_sides_differ(inner, others, "outputs", pairs), limit):
            if far(_sides_differ(inner, others, "inputs", pairs), limit):
                break
            return inner["name"], inner["kind"]
    return ("", "")
