"""This rank's share of a global batch, which loader, engine and metrics all need to know.

General layout, from the bottom up:

* `share`: `BatchShare`, how many samples of one global batch this rank holds.
* `tags`: which batch a tensor belongs to; the loader tags the tensors that it yields.
* `plans`: how the loaders in use split their batches, for tensors without a tag.
* `graph`: which forward passes of an engine a tensor comes from, found in its autograd graph.
* `hand`: which batch a thread is working on, for metrics and for layers inside a model.

[Note: the share belongs to the batch] `lockstep.DataLoader` tags the memory of every tensor it yields with the batch's
share. So a batch is weighted correctly whenever and in any order it goes through a model: fetched ahead, kept in a
list, replayed, zipped with another loader's. A tensor computed from it has new memory and no tag. Its size then
identifies the batch, as long as the batches of the loaders in use have different sizes on this rank; if they do not,
the ranks add up their numbers of samples, and the sum identifies it.
"""

from lockstep.batch import graph, hand, plans, tags

__all__ = ["knows_none", "reset"]


def knows_none() -> bool:
    """Whether there is no known batch or loader of ours, and no share was declared for this thread. Local."""
    return not tags.are_any() and plans.are_none() and hand.held() is None


def reset() -> None:
    """Forget every batch, loader and iteration. Local; for processes that are reused."""
    for module in (graph, hand, plans, tags):
        module.reset()
