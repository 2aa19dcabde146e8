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

__all__ = ["knows_none", "reset"]


def knows_none() -> bool:
    """Whether no batch and no loader of ours is known, and nobody has said what this thread works on. Local."""
    return not tags.are_any() and plans.are_none() and hand.held() is None


def reset() -> None:
    """Forget every batch, loader and iteration. Local; for processes that are used again for something else."""
    for module in (graph, hand, plans, tags):
        module.reset()
