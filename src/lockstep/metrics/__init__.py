"""Metrics that count every sample once, on any number of ranks.

A metric consists of a few float64 sums, which add up over batches and ranks, and a function from the sums to a value.
`update` adds a batch on this rank and never waits for a device; `synchronize` adds up all metrics of all ranks in one
collective::

    loss, accuracy = Mean(), Accuracy()
    for images, labels in lockstep.DataLoader(test_set, batch_size=256, evaluation=True):
        logits = model(images)
        loss.update(cross_entropy(logits, labels))
        accuracy.update(logits, labels)
    results = synchronize({"loss": loss, "accuracy": accuracy})

Inside a `lockstep.DataLoader` loop, metrics know the rank's share of the batch (`lockstep.batch`): a scalar, which is a
mean over the rank's samples, is weighted by their number, and a filler batch, which repeats a sample of another rank,
is not counted. If a loop fetches batches ahead, so that the batch of a scalar is unknown, `update` requires a `weight`.

Counts are exact below 2**53. Sums of values are float64 sums; their last bits depend on how the samples were grouped
into batches and ranks, and are reproducible on a group that adds in a fixed order, as Lockstep's does.

To write your own metric, subclass `Metric` and say how many sums it keeps::

    class Recall(Metric):
        num_sums = 2

        def update(self, found, relevant):             # bool [N] each
            self.accumulate((found & relevant).sum(), relevant.sum())

        def from_sums(self, sums):
            return sums[0] / sums[1] if sums[1] else math.nan

General layout:

* `metric`: the base class, with its float64 sums.
* `standard`: `Mean`, `Sum` and `Accuracy`.
* `reduction`: `synchronize`, the collective that adds up the sums of all ranks.
"""

from lockstep.metrics.metric import Metric
from lockstep.metrics.reduction import synchronize
from lockstep.metrics.standard import Accuracy, Mean, Sum

__all__ = ["Accuracy", "Mean", "Metric", "Sum", "synchronize"]
