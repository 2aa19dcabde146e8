"""Metrics on one process: what they count, what they refuse, how their sums travel."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from lockstep import batch
from lockstep.batch.share import BatchShare
from lockstep.data import DataLoader
from lockstep.errors import InputError, InputTypeError
from lockstep.metrics import Accuracy, Mean, Metric, Sum, synchronize


@pytest.fixture(autouse=True)
def no_iteration_is_left_open():
    yield
    batch.reset()


FILLER = BatchShare(local_samples=0, global_samples=3, world_size=4)


@pytest.fixture(params=["mean", "sum", "accuracy", "top-2"])
def filled(request):
    """A metric that has seen something."""
    if request.param == "mean":
        metric = Mean()
        metric.update(2.5, weight=3)
    elif request.param == "sum":
        metric = Sum()
        metric.update(4)
    else:
        metric = Accuracy(top_k=2 if request.param == "top-2" else 1)
        metric.update(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 2]))
    return metric


class TestMean:
    def test_scalar_counts_as_often_as_the_rank_holds_samples(self):
        mean = Mean()
        for share, value in ((BatchShare(4, 8, 2), 1.0), (BatchShare(1, 3, 2), torch.tensor(6.0))):
            with batch.hand.hold(share):
                mean.update(value)
        assert mean.compute() == pytest.approx((4 * 1.0 + 6.0) / 5)

    def test_scalar_counts_once_outside_a_loader(self):
        mean = Mean()
        mean.update(1.0)
        mean.update(2)
        assert mean.compute() == 1.5

    def test_values_count_one_each_whatever_the_batch(self):
        mean = Mean()
        with batch.hand.hold(BatchShare(7, 7, 1)):
            mean.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            mean.update(torch.tensor([5.0]))
        assert mean.compute() == 3.0
        assert mean.state().tolist() == [15.0, 5.0]

    def test_explicit_weight_wins(self):
        mean = Mean()
        with batch.hand.hold(BatchShare(7, 7, 1)):
            mean.update(1.0, weight=2)
            mean.update(4.0, weight=torch.tensor(1))
            mean.update(torch.tensor([1.0, 2.0]), weight=torch.tensor([0.0, 0.5]))
            mean.update(torch.tensor([1.0, 2.0]), weight=0.5)
        assert mean.state().tolist() == [2 + 4 + 1 + 1.5, 2 + 1 + 0.5 + 1]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
    def test_sums_in_float64(self, dtype):
        mean = Mean()
        mean.update(torch.ones(70_000, dtype=dtype))  # more than float16 can count, and bfloat16 by ones
        assert mean.state().dtype == torch.float64
        assert mean.state().tolist() == [70_000, 70_000]

    def test_keeps_no_graph(self):
        loss = torch.ones((), requires_grad=True) * 2
        mean = Mean()
        mean.update(loss, weight=torch.ones((), requires_grad=True))
        assert not mean.state().requires_grad

    def test_nan_is_not_hidden(self):
        mean = Mean()
        mean.update(math.nan)
        mean.update(1.0)
        assert math.isnan(mean.compute())

    def test_refuses_what_it_cannot_average(self):
        with pytest.raises(InputError, match=r"weight of shape \[3\] does not broadcast to value of shape \[2\]"):
            Mean().update(torch.ones(2), torch.ones(3))
        with pytest.raises(InputError, match="does not broadcast"):
            Mean().update(1.0, torch.ones(3))
        with pytest.raises(InputTypeError, match="complex64"):
            Mean().update(torch.ones(2, dtype=torch.complex64))
        for wrong in ("1", None, ["a"]):
            with pytest.raises(InputTypeError, match="expected a number, or several, got"):
                Mean().update(wrong)

    def test_a_list_counts_each_number_once(self):
        mean = Mean()
        mean.update([1.0, 2.0, 6.0])
        assert mean.state().tolist() == [9, 3]


def test_sum_adds_everything():
    total = Sum()
    total.update(2)
    total.update(torch.tensor([1.5, 2.5]))
    assert total.compute() == 6.0


class TestAccuracy:
    def test_counts_the_highest_score(self):
        accuracy = Accuracy()
        scores = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5]], dtype=torch.float16)
        accuracy.update(scores, torch.tensor([1, 2, 2]))
        assert accuracy.state().tolist() == [2, 3]

    @pytest.mark.parametrize("top_k", [1, 2, 3, 5])
    def test_agrees_with_a_sort(self, top_k):
        torch.manual_seed(0)
        scores, targets = torch.randn(200, 5), torch.randint(5, (200,))
        accuracy = Accuracy(top_k)
        for part in torch.arange(200).split(37):
            accuracy.update(scores[part], targets[part])
        ranked = scores.argsort(1, descending=True)[:, :top_k]
        assert (
            accuracy.compute() == sum(t in row for t, row in zip(targets.tolist(), ranked.tolist(), strict=True)) / 200
        )

    def test_takes_classes(self):
        accuracy = Accuracy()
        accuracy.update(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 3], dtype=torch.int32))
        accuracy.update(torch.tensor([True, False]), torch.tensor([1, 1]))
        assert accuracy.state().tolist() == [3, 5]

    def test_takes_scores_per_place(self):
        """As `cross_entropy` does for segmentation: [N, C, H, W] and [N, H, W]."""
        targets = torch.randint(4, (2, 3, 5))
        accuracy = Accuracy()
        accuracy.update(torch.nn.functional.one_hot(targets, 4).movedim(-1, 1).float(), targets)
        assert accuracy.state().tolist() == [30, 30]

    def test_diverged_model_is_not_right(self):
        accuracy = Accuracy()
        accuracy.update(torch.full((6, 3), math.nan), torch.tensor([0, 1, 2, 0, 1, 2]))
        assert accuracy.compute() < 0.5

    def test_empty_batch_counts_nothing(self):
        accuracy = Accuracy()
        accuracy.update(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
        assert math.isnan(accuracy.compute())

    @pytest.mark.parametrize(
        ("predictions", "targets", "error", "expected"),
        [
            (torch.ones(3, 4), torch.ones(2, dtype=torch.int64), InputError, r"predictions \[3, 4\] and targets \[2\]"),
            (torch.ones(3), torch.ones(2, dtype=torch.int64), InputError, "do not match"),
            (torch.ones(()), torch.ones(2, dtype=torch.int64), InputError, "do not match"),
            (torch.ones(2, 4), torch.ones(2), InputTypeError, "targets are torch.float32"),
            (torch.ones(2), torch.ones(2, dtype=torch.int64), InputTypeError, "(scores > 0.5).long()"),
            (torch.ones(2, 1), torch.ones(2, dtype=torch.int64), InputError, "(scores > 0.5).long()"),
            ([1, 2], torch.ones(2, dtype=torch.int64), InputTypeError, "predictions is a list"),
            (torch.ones(2, 4), [1, 2], InputTypeError, "targets is a list"),
        ],
    )
    def test_refuses_what_does_not_go_together(self, predictions, targets, error, expected):
        with pytest.raises(error, match=expected.replace("(scores", r"\(scores").replace("5).long()", r"5\).long\(\)")):
            Accuracy().update(predictions, targets)

    def test_refuses_too_few_classes(self):
        targets = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(InputError, match=r"top_k=5, but predictions \[2, 4\] have 4 classes"):
            Accuracy(top_k=5).update(torch.ones(2, 4), targets)
        with pytest.raises(InputError, match=r"top_k=2 needs a score per class"):
            Accuracy(top_k=2).update(targets, targets)
        for top_k in (0, -1, 1.0):
            with pytest.raises(InputError, match="expected an integer of at least 1"):
                Accuracy(top_k)


class TestEveryMetric:
    def test_counts_nothing_under_a_filler(self, filled):
        before = filled.state()
        with batch.hand.hold(FILLER):
            if isinstance(filled, Accuracy):
                filled.update(torch.ones(1, 3), torch.tensor([0]))
            else:
                filled.update(5.0)
                filled.update(torch.ones(3))
            if isinstance(filled, Mean):
                filled.update(5.0, weight=3)
        assert torch.equal(filled.state(), before)

    def test_starts_empty_and_is_reset(self, filled):
        filled.reset()
        assert filled.state().tolist() == [0.0] * filled.num_sums
        assert filled.compute() == 0.0 if isinstance(filled, Sum) else math.isnan(filled.compute())

    def test_is_pickled_and_copied(self, filled):
        for twin in (pickle.loads(pickle.dumps(filled)), copy.deepcopy(filled)):
            assert twin.compute() == filled.compute()
            twin.reset()
        assert filled.state().any()

    def test_merged_is_as_if_one_had_seen_all(self, filled):
        one, other, empty = copy.deepcopy(filled), copy.deepcopy(filled), copy.deepcopy(filled)
        empty.reset()
        one.merge(other, empty)
        empty.merge(one)
        assert torch.equal(one.state(), 2 * filled.state())
        assert torch.equal(empty.state(), one.state())
        assert torch.equal(other.state(), filled.state())

    def test_state_is_a_copy(self, filled):
        filled.state().zero_()
        assert filled.state().any()
        twin = copy.deepcopy(filled)
        given = filled.state()
        twin.load_state(given)
        given.zero_()
        assert torch.equal(twin.state(), filled.state())

    def test_refuses_a_state_of_another_kind(self, filled):
        with pytest.raises(InputError, match=r"a state is float64"):
            filled.load_state(torch.zeros(7, dtype=torch.float64))
        with pytest.raises(InputError, match=r"got torch.float32"):
            filled.load_state(torch.zeros(filled.num_sums))

    def test_does_not_merge_with_another_kind(self, filled):
        with pytest.raises(InputTypeError, match=r"cannot merge Accuracy\(top_k=7\)"):
            filled.merge(Accuracy(top_k=7))

    def test_goes_from_inference_mode_to_ordinary_and_back(self, filled):
        def update(metric):
            if isinstance(metric, Accuracy):
                metric.update(torch.ones(1, 3), torch.tensor([0]))
            else:
                metric.update(torch.ones(1))

        filled.reset()
        with torch.inference_mode():
            update(filled)
        update(filled)
        with torch.inference_mode():
            update(filled)
            twin = copy.deepcopy(filled)
            twin.load_state(filled.state())
        update(twin)
        update(filled)
        assert torch.equal(twin.state(), filled.state())
        twin.merge(filled)
        assert torch.equal(twin.state(), 2 * filled.state())

    def test_shows_its_value(self, filled):
        assert f"{filled.compute():.6g}" in repr(filled)


def test_never_waits_for_the_device_while_updating():
    """The meta device has no values: whoever looks at one raises."""
    loss, accuracy = Mean(), Accuracy(top_k=2)
    with batch.hand.hold(BatchShare(3, 3, 1)):
        loss.update(torch.ones((), device="meta"))
    loss.update(torch.ones(3, device="meta"), weight=torch.ones(3, device="meta"))
    accuracy.update(torch.ones(3, 5, device="meta"), torch.ones(3, dtype=torch.int64, device="meta"))
    assert loss.state().device.type == accuracy.state().device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sums_stay_on_the_gpu():
    loss, accuracy = Mean(), Accuracy()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.update(torch.ones((), device="cuda"), weight=3)
        accuracy.update(torch.eye(3, device="cuda"), torch.tensor([0, 1, 1]).pin_memory().to("cuda", non_blocking=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.state().device.type == "cuda"
    assert synchronize(loss, accuracy) == (1.0, 2 / 3)


class TestSynchronizeOnOneProcess:
    def test_gives_the_values(self):
        mean, total = Mean(), Sum()
        mean.update(3.0)
        total.update(2)
        assert synchronize({"b": total, "a": mean}) == {"b": 2.0, "a": 3.0}
        assert list(synchronize({"b": total, "a": mean})) == ["b", "a"]
        assert synchronize(mean, total) == (3.0, 2.0)
        assert synchronize(mean) == (3.0,)
        assert synchronize() == ()
        assert synchronize({}) == {}

    def test_refuses_anything_else(self):
        for given in ((1.0,), (Mean(), "a"), ({}, Mean())):
            with pytest.raises(InputTypeError, match="expected metrics, or one mapping"):
                synchronize(*given)


def test_metric_of_ones_own():
    class Recall(Metric):
        num_sums = 2

        def update(self, found, relevant):
            self.accumulate((found & relevant).sum(), relevant.sum())

        def from_sums(self, sums):
            return sums[0] / sums[1] if sums[1] else math.nan

    recall = Recall()
    recall.update(torch.tensor([True, True, False]), torch.tensor([True, False, True]))
    assert recall.compute() == 0.5
    assert synchronize(recall) == (0.5,)


def test_evaluation_counts_every_sample_once():
    targets = torch.arange(23) % 3
    scores = torch.randn(23, 3, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(scores, targets)
    whole, parts = Accuracy(), []
    whole.update(scores, targets)
    for evaluation in (True, False):
        for world_size in (1, 2, 3, 5):
            total, loss = Accuracy(), Mean()
            for rank in range(world_size):
                part, part_loss = Accuracy(), Mean()
                loader = DataLoader(dataset, 7, evaluation=evaluation, rank=rank, world_size=world_size)
                for logits, labels in loader:
                    part.update(logits, labels)
                    part_loss.update(torch.nn.functional.cross_entropy(logits.double(), labels))
                total.merge(part)
                loss.merge(part_loss)
            assert torch.equal(total.state(), whole.state())
            parts.append(loss.compute())
    expected = torch.nn.functional.cross_entropy(scores.double(), targets).item()
    assert parts == pytest.approx([expected] * len(parts), rel=1e-12)


@pytest.mark.parametrize(
    ("contributions", "shapes"),
    [((torch.ones(2, 2),), r"\[2, 2\]"), ((1.0,), r"\[\]"), ((1, 2, 3, torch.ones(1)), r"\[\], \[\], \[\], \[1\]")],
)
def test_sums_of_a_matrix_are_handed_over_one_by_one(contributions, shapes):
    class Confusion(Metric):
        num_sums = 4

        def update(self, *values):
            self.accumulate(*values)

        def from_sums(self, sums):
            return sums[3]

    metric = Confusion()
    with pytest.raises(InputError, match=rf"expected 4 single numbers, .* shapes {shapes}\. .*accumulate\(\*tensor"):
        metric.update(*contributions)
    metric.update(*torch.eye(2).flatten())
    assert metric.compute() == 1.0
