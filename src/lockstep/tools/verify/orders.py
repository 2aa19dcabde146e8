"""Orders of samples: the ranks', for one process to walk in.

[Note: orders that are given] Some libraries draw the order of an epoch otherwise on one process than on several, as
Accelerate does, and Trainers that put in a sampler which splits. One process then trains on other samples in each step,
which is no mistake where the ranks' parts are parts of one order, so that no sample comes twice in an epoch. One
process is given that order, batch by batch, and what follows can be compared. What fills up the last batch is left out,
so that it is found.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lockstep.tools.verify.step import Runs

__all__ = ["OF_RANK_0", "Orders", "evaluation_of_first", "order_of_ranks"]

# In the place of a pass: those in which Lockstep's loaders hand out what is rank 0's.
OF_RANK_0 = -1

Orders = dict[int, list[list[int]]]


def order_of_ranks(runs: Runs) -> Orders:
    """For each pass that trains, by its number, the indices of each batch of all ranks; no pass that has none."""
    found = {}
    for number, passes in enumerate(zip(*(each["facts"]["passes"] for each in runs.ranks), strict=False)):
        joined = _joined([one["asked"] for one in passes]) if passes[0]["trains"] else None
        if joined:
            found[number] = joined
    return found


def _joined(asked: Sequence[Sequence[list[int] | None]]) -> list[list[int]] | None:
    seen: set[int] = set()
    batches: list[list[int]] = []
    last = max(map(len, asked)) - 1
    for number, parts in enumerate(itertools.zip_longest(*asked, fillvalue=[])):
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        indices = [index for part in known for index in part]
        new = [index for index in dict.fromkeys(indices) if index not in seen]
        if len(new) < len(indices) and number < last:
            return None
        seen.update(new)
        batches.append(new)
    return batches


def evaluation_of_first(runs: Runs) -> Orders:
    """For each pass that evaluates, the batches of rank 0 alone, where one process has others."""
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
