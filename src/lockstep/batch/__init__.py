"""What this rank holds of a global batch: the fact that loader, engine and metrics share.

General layout, from the bottom up:

* `share`: `BatchShare`, how many samples of one global batch this rank holds.
* `tags`: which batch a tensor came with; the loader tags what it yields.
* `plans`: how the loaders in use split their batches, for tensors without a tag.
* `graph`: which forward passes of an engine a tensor comes from, by its graph.
* `hand`: which batch a thread works on, for metrics and for layers inside a model.

[Note: the share belongs to the batch] `lockstep.DataLoader` tags the memory of every tensor it yields with the
batch's share. So a batch is weighted as what it is, whenever and in whichever order it goes through a model: fetched
ahead, kept in a list, replayed, zipped with another loader's. A tensor computed from it has memory of its own and no
tag. Then its size says which batch it is, as long as the batches that the loaders in use make have different sizes
on this rank; where they do not, the ranks add up what they hold, and the sum says it.
"""

from lockstep.batch import graph, hand, plans, tags
from lockstep.batch.graph import (
    find_marks,
    mark,
    marks_tell_shares,
    names_behind,
)
from lockstep.batch.hand import (
    Iteration,
    active,
    active_forward,
    active_share,
    current,
    held,
    hold,
    in_hand,
    latest_evaluation,
    latest_forward,
    latest_iteration,
    latest_of_each,
    note_evaluation,
    note_forward,
    of_a_value,
    since_now,
)
from lockstep.batch.plans import (
    Division,
    LoaderToken,
    divisions,
    must_ask,
    register,
    was_yielded,
)
from lockstep.batch.share import BatchShare, share_bounds
from lockstep.batch.tags import Tag, find_tag, is_filler, purge

__all__ = [
    "BatchShare",
    "Division",
    "Iteration",
    "LoaderToken",
    "Tag",
    "active",
    "active_forward",
    "active_share",
    "current",
    "divisions",
    "find_marks",
    "find_tag",
    "held",
    "hold",
    "in_hand",
    "is_filler",
    "knows_none",
    "latest_evaluation",
    "latest_forward",
    "latest_iteration",
    "latest_of_each",
    "mark",
    "marks_tell_shares",
    "must_ask",
    "names_behind",
    "note_evaluation",
    "note_forward",
    "of_a_value",
    "purge",
    "register",
    "reset",
    "share_bounds",
    "since_now",
    "was_yielded",
]


def knows_none() -> bool:
    """Whether no batch and no loader of ours is known, and nobody has said what this thread works on. Local."""
    return not tags.are_any() and plans.are_none() and hand.held() is None


def reset() -> None:
    """Forget every batch, loader and iteration. Local; for processes that are used again for something else."""
    for module in (graph, hand, plans, tags):
        module.reset()
