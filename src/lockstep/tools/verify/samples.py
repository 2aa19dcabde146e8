"""The samples of a step, and the distance of its models' inputs and outputs from those of one process.

Samples are identified by content, else by their index in the dataset; rows of models by content, else by their sample.
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
    "indices_of",
    "measure_calls",
    "passes_are_shared_out",
    "rows_of",
]

# A process's record of a step, of a forward pass, or of the whole run.
Record = Mapping[str, Any]
_Pair = tuple[int, int, int]  # a row of one process, a rank, and its row


def batches_of(*steps: Record) -> list[Record]:
    """The batches of some steps, without fillers."""
    return [batch for step in steps for batch in step["batches"] if not batch["filler"]]


def calls_of(step: Record) -> list[Record]:
    """Forward passes without those of fillers."""
    return [call for call in step["calls"] if not call["filler"]]


def entered(*steps: Record, by: str = "keys") -> Counter[int]:
    """The rows that entered models, by content; `by="unpadded"` ignores padding."""
    return Counter(key for step in steps for call in step["calls"] for key in call[by])


def rows_of(step: Record) -> int:
    """Number of samples in a step; without a loader, that of rows that entered its models."""
    if step["batches"]:
        return sum(batch["rows"] for batch in batches_of(step))
    return sum(call["count"] for call in calls_of(step))


def passes_are_shared_out(one: Record, ranks: Sequence[Record]) -> bool:
    """Whether all ranks together ran as many backward passes in a step as one process."""
    return len(one["backwards"]) == sum(len(each["backwards"]) for each in ranks)


# ---- samples -----------------------------------------------------------------------------------------


class Samples:
    """The samples of a step, by content, in any order.

    Attributes:
        one: number of samples in one process.
        ranks: number of samples on each rank, without fillers.
        missing: samples of one process that no rank had.
        extra: samples that ranks had more often than one process.
        padded: samples that differ only in padding at the end.
        is_alike: whether all ranks had the same samples.
        by_index: whether the contents of batches cannot be compared, and indices are the same.
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
        """Whether the samples of ranks and one process differ."""
        return self.missing > 0 or self.extra > 0


def _keys(step: Record, which: int = 0) -> Counter[int]:
    return Counter(key[which] for batch in batches_of(step) for key in batch["keys"])


def _are_the_same_by_index(ranks: Sequence[Record], one: Record) -> bool:
    """Whether indices match, for batches of parts of samples without boundaries."""
    fetched = indices_of(one)
    return bool(fetched) and fetched == indices_of(*ranks) and all(each["joins"] for each in batches_of(one, *ranks))


def indices_of(*steps: Record) -> Counter[tuple[int, int]]:
    """How often each (number of a loader, index of its dataset) was fetched in these steps."""
    return Counter((batch["loader"], index) for batch in batches_of(*steps) for index in batch["indices"] or ())


def contents(steps: Sequence[Record]) -> dict[tuple[int, int], int]:
    """The content of each index of each loader's dataset, as seen in these steps of a process."""
    return {
        (batch["loader"], index): key
        for step in steps
        for batch in step["batches"]
        for index, (key, _) in zip(batch["indices"] or (), batch["keys"], strict=False)
    }


# ---- forward passes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """Comparison of the models' inputs and outputs.

    Attributes:
        rows: number of rows in one process.
        unknown: number of rows that only one process, or only a rank, had.
        inputs: largest difference between inputs for the same samples.
        outputs: largest difference between outputs for the same inputs; infinite if only inner modules have any.
        culprit: name and class of the first inner module whose output differs although its input does not.
        kind: class of the model.
        foreign: number of rows in `unknown` that a rank had.
        parameters: largest difference between the model's parameters when it was called.
        apart: the same between ranks.
        buffers: largest difference between the buffers of rank 0 and those of one process after the call.
        entered: whether `apart` was so before the model was called.
        buffers_apart: largest difference between the buffers of ranks after the call.
        buffers_moved: difference between the buffers of rank 0 and those of one process at the model's first call.
        begins: whether no backward pass of the step came before.
        padded: number of rows that differ only in padding at the end.
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
    buffers: float = 0.0
    entered: float = 0.0
    buffers_apart: float = 0.0
    buffers_moved: float = 0.0
    begins: bool = False
    padded: int = 0


def measure_calls(ranks: Sequence[Record], one: Record, limit: float, padded: bool = False) -> Calls:
    """Compare forward passes in order, matching rows by content; returns the first that differs.

    For samples `padded` to other lengths, inputs differ, but outputs of the same shape should not.
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
    # Outputs for samples padded to other lengths may also differ in length; these are not compared.
    alike = [pair for pair in paired if not padded or ranks[pair[1]]["widths"] == one["widths"]]
    outputs = _sides_differ(one, ranks, "outputs", alike)
    is_unseen = one["outputs"] is None and all(each["outputs"] is None for each in ranks)
    culprit = _culprit(one, ranks, paired, limit) if is_unseen or far(outputs, limit) else ("", "")
    return Calls(
        rows=one["count"],
        unknown=len(rest) - len(near) + foreign,
        inputs=inputs,
        outputs=math.inf if is_unseen and culprit[1] else outputs,
        culprit=culprit,
        kind=one["name"],
        foreign=foreign,
        begins=not one["after"],
        padded=len(filled),
        **_distances_of_state(one, ranks),
    )


def _distances_of_state(one: Record, ranks: Sequence[Record]) -> dict[str, float]:
    """The fields of `Calls` for parameters, if these are whole on the ranks, and buffers."""
    own = one["parameters"]
    held = [each for each in ranks if each["parameters"].shape == own.shape]
    buffers = [each["buffers"] for each in ranks if each["buffers"].shape == one["buffers"].shape]
    found = {"buffers": _furthest(one["buffers"], [ranks[0]["buffers"]])}
    found["buffers_apart"] = _furthest(buffers[0], buffers[1:]) if buffers else 0.0
    if one["is_first"]:
        found["buffers_moved"] = _furthest(one["buffers before"], [ranks[0]["buffers before"]])
    if held:
        found["parameters"] = _furthest(own, [each["parameters"] for each in held])
        found["apart"] = _furthest(held[0]["parameters"], [each["parameters"] for each in held[1:]])
        found["entered"] = _furthest(held[0]["entered"], [each["entered"] for each in held[1:]])
    return found


def _furthest(first: Tensor, others: Sequence[Tensor]) -> float:
    return max((relative(first, each) for each in others), default=0.0)


def _match(one: Record, ranks: Sequence[Record]) -> tuple[list[_Pair], list[_Pair], list[int]]:
    """Rows of one process whose content a rank has, those whose sample it has, and the others."""
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
    """Number of ranks' rows whose content and sample one process does not have."""
    known = {*one["keys"], *one["samples"]}
    pairs = (pair for call in ranks for pair in zip(call["keys"], call["samples"], strict=True))
    return sum(map(known.isdisjoint, pairs))


def _near(one: Record, ranks: Sequence[Record], rows: Sequence[int], limit: float) -> list[_Pair]:
    """Rows that a rank has up to rounding, such as products computed in a batch of another size."""
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
    """Largest difference of paired rows; 0 if there are none to compare."""
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
    """The same, minimised over two layouts of a tensor with several rows per sample."""
    return min(_rows_differ(one, ranks, way, pairs) for way in (what, f"{what} across"))


def _culprit(one: Record, ranks: Sequence[Record], pairs: Sequence[_Pair], limit: float) -> tuple[str, str]:
    """The first module, in order of return, whose rows differ; none that is called for each sample."""
    own, *theirs = (Counter(inner["name"] for inner in call["inner"]) for call in (one, *ranks))
    for place, inner in enumerate(one["inner"]):
        others = [call["inner"][place] for call in ranks if place < len(call["inner"])]
        if [each["name"] for each in others] != [inner["name"]] * len(ranks):
            break
        is_once = all(each[inner["name"]] == own[inner["name"]] for each in theirs)
        is_seen = is_once and all(each["outputs"] is not None for each in (inner, *others))
        if is_seen and far(_sides_differ(inner, others, "outputs", pairs), limit):
            if far(_sides_differ(inner, others, "inputs", pairs), limit):
                break
            return inner["name"], inner["kind"]
    return ("", "")
