"""Which samples a step was made of, on N ranks and on one process: by content, else by index in the dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Samples", "calls_of", "contents", "have_same_indices", "measure_samples", "rows_of"]

_Step = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """Which samples a step was made of.

    Attributes:
        one: how many one process had.
        ranks: how many each rank had, fillers apart.
        missing: that one process had, and no rank.
        extra: that ranks had more often than one process.
        repeated: of these, those that another rank (or the same one) had, too.
        padded: that are the same but for padding at their ends.
        is_alike: all ranks had the same samples.
        by_index: the content of their batches is not to be compared, and their indices are the same.
    """

    one: int
    ranks: tuple[int, ...]
    missing: int
    extra: int
    repeated: int
    padded: int
    is_alike: bool
    by_index: bool = False

    @property
    def differ(self) -> bool:
        """Whether they are not the same samples."""
        return self.missing > 0 or self.extra > 0


def rows_of(step: _Step) -> int:
    """Samples of a step, without fillers; those that went into its models where no loader gave them."""
    if step["batches"]:
        return sum(batch["rows"] for batch in step["batches"] if not batch["filler"])
    return sum(call["count"] for call in calls_of(step))


def calls_of(step: _Step) -> list[Mapping[str, Any]]:
    """Forward passes that were for samples."""
    return [call for call in step["calls"] if not call["filler"]]


def _keys(step: _Step, which: int) -> Counter[int]:
    return Counter(key[which] for batch in step["batches"] if not batch["filler"] for key in batch["keys"])


def measure_samples(ranks: Sequence[_Step], one: _Step) -> Samples:
    """Compare samples by content, whatever their order."""
    exact, unpadded = [[_keys(step, which) for step in ranks] for which in (0, 1)]
    own, own_unpadded = _keys(one, 0), _keys(one, 1)
    total, total_unpadded = sum(exact, Counter()), sum(unpadded, Counter())
    missing, extra = own - total, total - own
    padded, by_index = 0, bool(missing or extra) and _are_the_same_by_index(ranks, one)
    if by_index:
        missing, extra = Counter(), Counter()
    elif missing or extra:
        rest, more = own_unpadded - total_unpadded, total_unpadded - own_unpadded
        if sum(rest.values()) + sum(more.values()) < sum(missing.values()) + sum(extra.values()):
            padded = sum(missing.values()) - sum(rest.values())
            missing, extra, total = rest, more, total_unpadded
    repeated = sum(count for key, count in extra.items() if total[key] > 1)
    alike = len(ranks) > 1 and bool(exact[0]) and all(each == exact[0] for each in exact[1:])
    sizes = tuple(sum(each.values()) for each in exact)
    counts = sum(missing.values()), sum(extra.values()), repeated, padded
    return Samples(sum(own.values()), sizes, *counts, alike, by_index)


def _are_the_same_by_index(ranks: Sequence[_Step], one: _Step) -> bool:
    """Whether indices of the dataset say so, of batches whose tensors hold parts of samples and where each begins."""
    joins = all(batch["joins"] for step in (one, *ranks) for batch in step["batches"] if not batch["filler"])
    return joins and have_same_indices(ranks, one)


def have_same_indices(ranks: Sequence[_Step], one: _Step) -> bool:
    """Whether the loaders of the ranks fetched in a step what one process fetched, by index."""
    own, theirs = _indices([one]), _indices(ranks)
    return bool(own) and own == theirs


def contents(record: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    """What each index of each loader's dataset was found to be, in all steps of a process."""
    batches = [batch for step in record["steps"] for batch in step["batches"]]
    return {
        (batch["loader"], index): key
        for batch in batches
        for index, (key, _) in zip(batch["indices"] or (), batch["keys"], strict=False)
    }


def _indices(steps: Sequence[_Step]) -> list[tuple[int, int]]:
    """Numbers of loaders, and the indices that each was asked for."""
    batches = (batch for step in steps for batch in step["batches"] if not batch["filler"])
    return sorted((batch["loader"], index) for batch in batches for index in batch["indices"] or ())
