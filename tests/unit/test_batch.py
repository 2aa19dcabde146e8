"""What is remembered of the loaders in use, and of forward passes, and when it is looked up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from lockstep import batch
from lockstep.batch import plans, tags
from lockstep.batch.plans import Division, LoaderToken
from lockstep.data import DataLoader
from lockstep.metrics import Mean


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    batch.reset()
    yield
    batch.reset()


def test_divisions_are_those_of_the_loaders_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when one is asked again and again, and a loader comes as another goes."""
    monkeypatch.setattr(plans, "_NUM_RECENT", 2)
    four, six, seven = Division(4, 4, 2), Division(6, 6, 2), Division(7, 6, 2)
    first, second, third = LoaderToken(), LoaderToken(), LoaderToken()
    batch.plans.register(first, 0, {four})
    assert batch.plans.divisions(0, 2) == batch.plans.divisions(0, 2) == (four,)
    assert batch.plans.divisions(1, 2) == batch.plans.divisions(0, 3) == ()
    batch.plans.register(first, 0, {six})
    assert batch.plans.divisions(0, 2) == (four, six)
    batch.plans.register(second, 1, {six})
    assert batch.plans.divisions(1, 2) == (six,)
    batch.plans.register(first, 0, {four})
    batch.plans.register(third, 0, {seven})
    assert batch.plans.divisions(0, 2) == (four, six, seven)
    assert batch.plans.divisions(1, 2) == ()  # two others were iterated since
    del first
    assert batch.plans.divisions(0, 2) == (seven,)
    batch.reset()
    assert batch.plans.divisions(0, 2) == ()


def test_a_loader_is_not_forgotten_for_those_iterated_between_its_batches() -> None:
    batches = iter(DataLoader(range(12), 4, rank=0, world_size=2))
    for _ in batches:
        for _ in range(40):
            assert len(list(DataLoader(range(6), 3, rank=0, world_size=2))) == 2
    assert {each.num_samples for each in batch.plans.divisions(0, 2)} == {4}


def test_ranks_ask_where_a_size_is_of_two_batches_on_any_of_them() -> None:
    """In use or not: that differs between ranks."""
    batch.plans.register(LoaderToken(), 0, {Division(4, 8, 2), Division(6, 8, 2)})
    assert not batch.plans.must_ask(0, 2)
    since = batch.plans.register(LoaderToken(), 0, {Division(7, 8, 2)}) - 1
    assert batch.plans.must_ask(0, 2)  # of 6 samples and of 7 rank 1 has three
    assert not batch.plans.must_ask(0, 2, since)
    assert batch.plans.must_ask(0, 2, since - 1)


def test_an_engine_goes_by_iterations_from_its_making_on_and_by_those_under_way() -> None:
    """One that has yielded, and one that has merely begun; not one that is over, nor one that was dropped."""
    loaders = [DataLoader(range(8), batch_size=size, rank=0, world_size=2) for size in (1, 2, 3, 4, 5)]
    under_way, begun, over, dropped, later = loaders
    assert len(list(over)) == 3
    iter(dropped)
    iterators = iter(under_way), iter(begun)
    next(iterators[0])
    since = batch.hand.since_now()
    iter(later)
    assert {each.batch_size for each in batch.plans.divisions(0, 2, since)} == {1, 2, 5}
    assert [each.local_samples for each in batch.hand.latest_of_each()] == [1]


def test_a_share_that_is_remembered_lets_go_of_its_loader() -> None:
    token = LoaderToken()
    share = batch.share.BatchShare(3, 5, 2, "samples 0 to 4 of epoch 0", True, 3, token, 17)
    remembered = share.remembered()
    assert remembered == share
    assert remembered.source is None
    assert share.source is token
    others = [field.name for field in dataclasses.fields(share) if field.name != "source"]
    assert [getattr(remembered, name) for name in others] == [getattr(share, name) for name in others]
    assert remembered.remembered() is remembered


def test_a_metric_walks_no_graph_before_an_engine_knew_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[torch.Tensor] = []
    monkeypatch.setattr(batch.graph, "find_marks", lambda tensor: walked.append(tensor) or [])
    loss = torch.ones((), requires_grad=True) * 2
    batch.graph.mark(loss, object(), tells_share=False)
    Mean().update(loss)
    assert not walked
    batch.graph.mark(loss, object(), tells_share=True)
    Mean().update(loss)
    assert walked == [loss]


def test_what_is_gone_keeps_no_tag() -> None:
    """What a weak reference keeps of a batch would lie in the way of the next one. See [Note: holes] in `tags.py`."""
    batch.reset()
    counts = []
    for _ in DataLoader([(torch.ones(3), number) for number in range(80)], batch_size=2, rank=0, world_size=1):
        gone = [address for address, (storage, _) in tags._tags.items() if storage.expired()]
        counts.append((len(tags._tags), len(gone)))
    # Two tensors of this batch; those of the one before were in use until now.
    assert set(counts[1:]) == {(4, 2)}


def test_many_tags_are_looked_through_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    batch.reset()
    looks = 0

    def purge() -> None:
        nonlocal looks
        looks += 1
        counted()

    counted = tags.purge
    monkeypatch.setattr(tags, "purge", purge)
    share = batch.share.BatchShare(1, 1, 1)
    kept = [torch.ones(1) for _ in range(1000)]
    for tensor in kept:
        tags.tag_batch(tensor, share)
    assert looks <= 10
    counted(at_most=999)
    del tensor
    kept.clear()
    counted(at_most=999)
    assert len(tags._tags) == 1000
    batch.tags.purge()
    assert not tags._tags
