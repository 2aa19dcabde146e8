"""`lockstep.DataLoader` in one process: every rank is a loader with an explicit rank."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from loader_cases import WORLDS, Drawing, Numbers, run_epoch, run_ranks_in_turn
from lockstep import batch
from lockstep.batch.share import BatchShare
from lockstep.batch.tags import is_filler
from lockstep.data import DataLoader, checks
from lockstep.errors import DataError, InputError

pytestmark = [
    # What torch says on a machine with one core, and Python 3.12 of any fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def no_share_is_left():
    batch.reset()
    yield
    left = batch.hand.current()
    batch.reset()
    assert left is None, "an iteration ended and left its share behind"


class TestOneAnswer:
    @pytest.mark.parametrize("world_size", WORLDS)
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize(("length", "batch_size"), [(23, 6), (24, 6), (3, 6), (7, 1), (11, 4)])
    def test_batches_are_those_of_one_process(self, world_size, shuffle, length, batch_size):
        options = {"batch_size": batch_size, "shuffle": shuffle, "seed": 7, "epochs": 2}
        expected = run_ranks_in_turn(Numbers(length), 1, **options)
        got = run_ranks_in_turn(Numbers(length), world_size, **options)
        assert got == expected
        assert sorted(sum(got, start=[])) == list(range(length))  # noqa: RUF017

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_workers_change_nothing(self, world_size):
        options = {"batch_size": 6, "shuffle": True, "seed": 7}
        expected = run_ranks_in_turn(Numbers(23), 1, **options)
        assert run_ranks_in_turn(Numbers(23), world_size, num_workers=2, **options) == expected

    def test_order_depends_on_seed_and_epoch_and_not_on_batch_size(self):
        def order(epoch, **options):
            loader = DataLoader(range(50), shuffle=True, rank=0, world_size=1, **options)
            loader.set_epoch(epoch)
            return [sample for samples, _ in run_epoch(loader) for sample in samples]

        first = order(0, batch_size=8, seed=1)
        assert order(0, batch_size=5, seed=1) == first
        assert order(1, batch_size=8, seed=1) != first
        assert order(0, batch_size=8, seed=2) != first

    @pytest.mark.parametrize("world_size", WORLDS)
    def test_weighted_gradients_are_the_global_gradient(self, world_size):
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(13, 4, dtype=torch.float64), torch.randn(13, dtype=torch.float64))
        weights = torch.randn(4, dtype=torch.float64, requires_grad=True)

        def gradients(rank, size):
            found = []
            for inputs, targets in DataLoader(dataset, 5, shuffle=True, rank=rank, world_size=size):
                loss = ((inputs @ weights).tanh() - targets).square().mean()
                (gradient,) = torch.autograd.grad(loss, weights)
                found.append(gradient * batch.hand.current().weight / size)
            return torch.stack(found)

        summed = sum(gradients(rank, world_size) for rank in range(world_size))
        assert (summed - gradients(0, 1)).abs().max() < 1e-12

    def test_ranks_without_samples_yield_fillers_of_weight_zero(self):
        got = run_epoch(DataLoader(range(7), 5, rank=4, world_size=5))
        # Two rows, so that its size is not that of a full batch's share; elsewhere one is enough.
        assert got == [([4], BatchShare(1, 5, 5)), ([5, 5], BatchShare(0, 2, 5))]
        got = run_epoch(DataLoader(range(5), 4, rank=1, world_size=2))
        assert got == [([2, 3], BatchShare(2, 4, 2)), ([4], BatchShare(0, 1, 2))]

    def test_evaluation_has_no_fillers(self):
        loaders = [DataLoader(range(7), 5, evaluation=True, rank=rank, world_size=5) for rank in range(5)]
        assert [[samples for samples, _ in run_epoch(loader)] for loader in loaders] == [
            [[0], [5]],
            [[1], [6]],
            [[2]],
            [[3]],
            [[4]],
        ]
        assert {len(loader) for loader in loaders} == {2}
        assert [len(iter(loader)) for loader in loaders] == [2, 2, 1, 1, 1]

    def test_drop_last_drops_the_last_partial_global_batch(self):
        for world_size in WORLDS:
            assert len(DataLoader(range(23), 6, drop_last=True, rank=0, world_size=world_size)) == 3
            assert run_ranks_in_turn(range(23), world_size, batch_size=6, drop_last=True)[-1] == [*range(12, 18)]


class TestShares:
    def test_is_published_with_each_batch_and_cleared_at_the_end(self):
        seen = [share for _, share in run_epoch(DataLoader(range(5), 4, rank=1, world_size=2, num_workers=1))]
        assert seen == [BatchShare(2, 4, 2), BatchShare(0, 1, 2)]
        assert batch.hand.current() is None

    def test_is_cleared_by_break(self):
        for _ in DataLoader(range(5), 2):
            assert batch.hand.current() == BatchShare(2, 2, 1)
            break
        assert batch.hand.current() is None

    def test_is_cleared_by_an_exception(self):
        def step():
            for _ in DataLoader(range(5), 2):
                raise KeyError

        with pytest.raises(KeyError):
            step()
        assert batch.hand.current() is None

    def test_is_cleared_by_close(self):
        loader = DataLoader(range(5), 2)
        first = iter(loader)
        next(first)
        second = iter(loader)
        next(second)
        second.close()
        assert batch.hand.current() is first.share
        first.close()
        assert batch.hand.current() is None
        assert list(second) == []

    def test_comes_back_after_an_evaluation_in_between(self):
        training = DataLoader(range(9), 4, rank=1, world_size=2)
        evaluation = DataLoader(range(3), 2, evaluation=True, rank=0, world_size=2)
        seen = []
        for _ in training:
            before = batch.hand.current()
            seen.extend(batch.hand.current() for _ in evaluation)
            assert batch.hand.current() is before
        assert set(seen) == {BatchShare(1, 2, 2), BatchShare(1, 1, 2)}

    def test_of_another_loader_stays(self):
        first, second = iter(DataLoader(range(5), 2)), iter(DataLoader(range(5), 3))
        next(first)
        next(second)
        newest = batch.hand.current()
        first.close()
        assert batch.hand.current() is newest
        second.close()
        assert batch.hand.current() is None


class TestEpochs:
    def test_advance_by_themselves(self):
        loader = DataLoader(range(20), 5, shuffle=True)
        first, second = run_epoch(loader), run_epoch(loader)
        assert first != second
        assert loader.epoch == 2
        loader.set_epoch(1)
        assert run_epoch(loader) == second
        assert loader.epoch == 2

    def test_break_uses_the_epoch_up(self):
        loader = DataLoader(range(20), 5, shuffle=True)
        for _ in loader:
            assert loader.epoch == 0
            break
        second = run_epoch(loader)
        loader.set_epoch(1)
        assert run_epoch(loader) == second

    def test_two_iterators_walk_two_epochs(self):
        loader = DataLoader(range(20), 5, shuffle=True)
        expected = run_epoch(loader), run_epoch(loader)
        loader.set_epoch(0)
        pairs = list(zip(loader, loader, strict=True))
        assert [one.tolist() for one, _ in pairs] == [samples for samples, _ in expected[0]]
        assert [other.tolist() for _, other in pairs] == [samples for samples, _ in expected[1]]

    def test_persistent_workers_follow_the_epoch_and_refuse_two_at_once(self):
        options = {"batch_size": 5, "shuffle": True, "seed": 2}
        plain, persistent = (
            DataLoader(Drawing(12), num_workers=workers, persistent_workers=workers > 0, **options)
            for workers in (0, 1)
        )
        for _ in range(2):
            assert run_epoch(persistent) == run_epoch(plain)
        first = iter(persistent)
        next(first)
        assert len(run_epoch(persistent)) == 3
        with pytest.raises(DataError, match="epoch 2 has ended: a newer one took over its worker processes"):
            next(first)

    def test_dataset_may_grow_between_epochs(self):
        items = [0, 1]
        loader = DataLoader(items, 2)
        assert len(loader) == 1
        items.append(2)
        assert len(loader) == 2
        assert [samples for samples, _ in run_epoch(loader)] == [[0, 1], [2]]


class TestState:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_resumes_at_other_world_and_batch_sizes(self, num_workers):
        dataset, options = Drawing(41), {"shuffle": True, "seed": 4, "num_workers": num_workers}
        whole = sum(run_ranks_in_turn(dataset, 1, epochs=2, batch_size=6, shuffle=True, seed=4), start=[])  # noqa: RUF017
        seen, state = [], None
        for world_size, batch_size, stop in ((2, 6, 2), (3, 5, 3), (5, 7, None)):
            loader = DataLoader(dataset, batch_size, rank=0, world_size=world_size, **options)
            if state is None:
                loader.set_epoch(1)
                state = loader.state_dict()
            seen += run_ranks_in_turn(dataset, world_size, state=state, stop=stop, batch_size=batch_size, **options)
            loader.load_state_dict(json.loads(json.dumps(state)))
            for count, _ in enumerate(loader, start=1):
                state = loader.state_dict()
                assert state["epoch"] == 1
                if count == stop:
                    break
        assert sum(seen, start=[]) == whole  # noqa: RUF017
        assert state["samples_consumed"] == 41

    def test_points_at_the_batch_that_comes_next(self):
        loader = DataLoader(range(10), 4, num_workers=1, prefetch_factor=3)
        consumed = [loader.state_dict()["samples_consumed"]]
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            consumed.append(loader.state_dict()["samples_consumed"])
        assert consumed == [0, 4, 8, 10]
        assert loader.state_dict()["epoch"] == 0
        assert list(batches) == []
        assert (loader.state_dict()["epoch"], loader.state_dict()["samples_consumed"]) == (1, 0)

    def test_after_break_leads_to_the_batch_that_would_have_come(self):
        loader = DataLoader(range(10), 4)
        for _ in loader:
            break
        state = loader.state_dict()
        assert run_epoch(loader)[0][0] == [0, 1, 2, 3], "iterating on is the next epoch"
        loader.load_state_dict(state)
        assert [samples for samples, _ in run_epoch(loader)] == [[4, 5, 6, 7], [8, 9]]
        assert loader.epoch == 1

    def test_at_the_end_of_an_epoch_leaves_an_empty_rest(self):
        loader = DataLoader(range(4), 4)
        for _ in loader:
            state = loader.state_dict()
        assert (state["epoch"], state["samples_consumed"]) == (0, 4)
        loader.load_state_dict(state)
        assert run_epoch(loader) == []
        assert len(run_epoch(loader)) == 1

    def test_set_epoch_keeps_the_place_in_the_restored_epoch_only(self):
        loader = DataLoader(range(6), 2)
        for _ in loader:
            break
        state = loader.state_dict()
        for epoch, batches in ((0, 2), (3, 3)):
            loader.load_state_dict(state)
            loader.set_epoch(epoch)
            assert loader.epoch == epoch
            assert len(run_epoch(loader)) == batches

    def test_seed_of_the_state_is_taken_over_with_a_warning(self, caplog):
        old, new = DataLoader(range(30), 30, shuffle=True, seed=1), DataLoader(range(30), 30, shuffle=True, seed=2)
        logging.getLogger("lockstep").addHandler(caplog.handler)
        try:
            new.load_state_dict(old.state_dict())
        finally:
            logging.getLogger("lockstep").removeHandler(caplog.handler)
        assert "seed=2 is replaced by 1" in caplog.text
        assert run_epoch(new) == run_epoch(old)

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"dataset_length": 11}, "dataset_length is 11, here it is 10"),
            ({"samples_per_epoch": 9}, "samples_per_epoch is 9, here it is 10"),
            ({"order": "shuffled"}, "order is 'shuffled', here it is 'sequential'"),
            ({"version": 2}, "version 2; this release reads version 1"),
            ({"samples_consumed": 12}, "12 samples consumed of 10"),
            ({"epoch": -1}, "epoch.* is -1"),
            ({"epoch": None}, "lacks epoch"),
        ],
    )
    def test_that_does_not_fit_is_refused(self, change, expected):
        loader = DataLoader(range(10), 4)
        state = {key: value for key, value in {**loader.state_dict(), **change}.items() if value is not None}
        with pytest.raises(DataError, match=expected):
            loader.load_state_dict(state)


class TestSampler:
    @pytest.mark.parametrize("world_size", WORLDS)
    def test_gives_the_global_order(self, world_size):
        order = [4, 4, 0, 9, 2, 7, 1]
        assert run_ranks_in_turn(range(10), world_size, batch_size=3, sampler=order) == [
            order[:3],
            order[3:6],
            order[6:],
        ]

    def test_that_draws_globally_is_the_same_on_all_ranks(self):
        def order(rank):
            torch.manual_seed(rank)
            sampler = torch.utils.data.WeightedRandomSampler([1.0] * 9 + [50.0], 12)
            return run_epoch(DataLoader(range(10), 12, sampler=sampler, seed=1, rank=0, world_size=1))

        assert order(0) == order(1)

    def test_is_told_the_epoch(self):
        class Told(list):
            def set_epoch(self, epoch):
                self[:] = [epoch] * epoch

        loader = DataLoader(range(10), 8, sampler=Told([0]))
        loader.set_epoch(4)
        assert run_epoch(loader)[0][0] == [4] * 4
        assert run_epoch(loader)[0][0] == [5] * 5
        assert loader.state_dict()["order"] == "sampler"


class TestPlace:
    def test_is_read_when_an_iteration_begins(self, monkeypatch):
        loader = DataLoader(range(4), 4)
        assert run_epoch(loader)[0][0] == [0, 1, 2, 3]
        monkeypatch.setattr(checks, "current_world", lambda: SimpleNamespace(rank=1, world_size=2))
        assert run_epoch(loader)[0][0] == [2, 3]
        explicit = DataLoader(range(4), 4, rank=0, world_size=4)
        assert run_epoch(explicit)[0][0] == [0]

    def test_is_that_of_torch_distributed_where_no_world_is_open(self, monkeypatch):
        monkeypatch.setattr(checks, "current_world", lambda: None)
        monkeypatch.setattr(checks.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(checks.dist, "get_rank", lambda: 2)
        monkeypatch.setattr(checks.dist, "get_world_size", lambda: 3)
        assert run_epoch(DataLoader(range(6), 6))[0] == ([4, 5], BatchShare(2, 6, 3))

    def test_launched_process_without_a_group_is_warned(self, monkeypatch):
        warnings = []
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setattr(checks, "current_world", lambda: None)
        monkeypatch.setattr(checks.log, "warn_once", lambda logger, message: warnings.append(message))
        run_epoch(DataLoader(range(6), 6))
        assert "WORLD_SIZE is 4, but no process group is open" in warnings[0]


def test_numpy_integers_are_integers():
    loader = DataLoader(range(10), np.int64(4), rank=np.int32(1), world_size=np.int32(2))
    assert run_epoch(loader)[0][0] == [2, 3]
    assert json.dumps(loader.state_dict())


class TestNestedIterations:
    def test_the_state_is_that_of_the_iteration_that_goes_on(self):
        loader = DataLoader(range(11), 4, shuffle=True, rank=0, world_size=2)
        states = []
        for number, _ in enumerate(loader):
            if number == 1:
                list(loader)  # an evaluation on the training data
            states.append(loader.state_dict())
        assert [(state["epoch"], state["samples_consumed"], state["next_epoch"]) for state in states] == [
            (0, 4, 1),
            (0, 8, 2),
            (0, 11, 2),
        ]
        assert loader.epoch == 2

    def test_a_resumed_epoch_is_followed_by_the_one_that_would_have_come(self):
        options = {"batch_size": 4, "shuffle": True, "rank": 0, "world_size": 1}
        loader, whole = DataLoader(range(11), **options), []
        for epoch in range(2):
            for number, batch_ in enumerate(loader):
                whole.append(batch_.tolist())
                if epoch == 0 and number == 0:
                    list(loader)
                    state = loader.state_dict()
        resumed = DataLoader(range(11), **options)
        resumed.load_state_dict(state)
        assert [batch_.tolist() for _ in range(2) for batch_ in resumed] == whole[1:]

    def test_a_state_that_is_written_again_before_an_iteration_leads_to_the_same(self):
        loader = DataLoader(range(11), 4)
        for _ in loader:
            list(loader)
            state = loader.state_dict()
            break
        resumed = DataLoader(range(11), 4)
        resumed.load_state_dict(state)
        assert (state["next_epoch"], resumed.next_epoch) == (2, 0)
        assert resumed.state_dict() == {**state, "next_epoch": 0}
        list(resumed)
        assert resumed.next_epoch == 2

    def test_a_state_of_an_older_release_says_nothing_of_it(self):
        loader = DataLoader(range(11), 4)
        state = loader.state_dict()
        del state["next_epoch"], state["epoch_after"]
        loader.load_state_dict(state)
        assert len(list(loader)) == 3
        assert loader.epoch == 1


class TestNextEpoch:
    """`while loader.next_epoch < EPOCHS` trains so many epochs, however iterations begin and end."""

    def run(self, loader, epochs, stop=None):
        """The epochs of its iterations."""
        found = []
        while loader.next_epoch < epochs:
            found.append(loader.next_epoch)
            for number, _ in enumerate(loader, start=1):
                assert loader.epoch == found[-1]
                if number == stop:
                    break
        return found

    @pytest.mark.parametrize("stop", [None, 1, 3])
    def test_ends(self, stop):
        assert self.run(DataLoader(range(11), 4), 3, stop) == [0, 1, 2]

    def test_ends_beside_an_iterator_that_is_kept(self):
        loader = DataLoader(range(11), 4)
        kept = iter(loader)
        next(kept)
        while loader.next_epoch < 3:
            list(loader)
        assert loader.state_dict()["next_epoch"] == 3
        kept.close()

    @pytest.mark.parametrize(
        ("taken", "expected"), [(1, [0, 1, 2]), (3, [0, 1, 2]), (4, [1, 2]), (7, [1, 2]), (8, [2])]
    )
    def test_begins_with_the_epoch_of_a_state(self, taken, expected):
        """Also with one of which no batch is left; the next one comes after the end of the loop over its batches."""
        loader = DataLoader(range(11), 4)
        batches = (each for _ in range(3) for each in itertools.chain(loader, [None]))
        states = [loader.state_dict() for _ in zip(range(taken), batches, strict=False)]
        resumed = DataLoader(range(11), 2)
        resumed.load_state_dict(states[-1])
        batches.close()
        assert self.run(resumed, 3) == expected

    def test_is_what_a_script_has_told_the_sampler(self):
        class Told(list):
            def set_epoch(self, epoch):
                pass

        loader = DataLoader(range(11), 4, sampler=Told(range(11)))
        loader.sampler.set_epoch(5)
        assert loader.next_epoch == 5
        list(loader)
        assert loader.next_epoch == 6


class Late(torch.utils.data.Dataset):
    """The second sample comes when a file is there."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 6

    def __getitem__(self, index):
        deadline = time.monotonic() + 60
        while index == 1 and not os.path.exists(self.path) and time.monotonic() < deadline:
            time.sleep(0.01)
        return index


def test_a_batch_that_is_late_is_not_skipped(tmp_path):
    """torch continues waiting for a batch that has timed out; its share and its place come with it."""
    loader = DataLoader(Late(tmp_path / "now"), 2, num_workers=1, timeout=0.2, rank=0, world_size=1)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    (tmp_path / "now").touch()
    got = []
    while len(got) < 3:
        with contextlib.suppress(RuntimeError):  # a machine that is busy may take its time for the others, too
            got.append((next(iterator).tolist(), loader.state_dict()["samples_consumed"]))
    iterator.close()
    assert got == [([0, 1], 2), ([2, 3], 4), ([4, 5], 6)]


class TestDevice:
    def test_batches_are_moved(self):
        loader = DataLoader(TensorDataset(torch.arange(5.0)), 2, device="meta", prefetch=3, rank=0, world_size=1)
        assert [part.device.type for (part,) in loader] == ["meta"] * 3
        assert loader.state_dict()["samples_consumed"] == 0
        assert not loader.pin_memory

    def test_an_exception_comes_in_its_turn(self):
        class Broken(Numbers):
            def __getitem__(self, index):
                if index == 2:
                    raise KeyError(index)
                return super().__getitem__(index)

        iterator = iter(DataLoader(Broken(5), 2, device="cpu", rank=0, world_size=1))
        next(iterator)
        with pytest.raises(KeyError):
            next(iterator)
        assert len(next(iterator)) == 1
        iterator.close()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"device": "gpu"}, "which torch does not know"),
            ({"prefetch": 2}, "pass device, too"),
            ({"device": "cpu", "prefetch": -1}, "prefetch is -1"),
        ],
    )
    def test_what_cannot_work_is_an_error(self, options, words):
        with pytest.raises(DataError, match=words):
            DataLoader(range(5), 2, **options)


def test_fillers_are_known():
    loader = DataLoader(TensorDataset(torch.arange(5.0)), 4, rank=1, world_size=2)
    assert [is_filler(batch_) for batch_ in loader] == [False, True]
    assert not is_filler(torch.ones(3))
    assert not is_filler(["no", "tensor"])


class Texts(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return f"text {index}", index


@pytest.mark.parametrize("collate", [list, lambda rows: {"texts": [text for text, _ in rows]}, lambda rows: (rows, 1)])
def test_fillers_without_tensors_are_known(collate):
    found = []
    others = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, rank=1, world_size=2)
    loader = DataLoader(Texts(), batch_size=4, collate_fn=collate, rank=1, world_size=2)
    for batch_, _ in zip(loader, others, strict=True):
        parts = [*batch_.values()] if isinstance(batch_, dict) else batch_
        found.append((is_filler(batch_), is_filler(parts[0])))
        if is_filler(batch_):
            with pytest.raises(InputError, match="Pass what the loader yielded"):
                is_filler(["texts", "of", "somebody"])
    assert found == [(False, False), (True, True)]
    assert not is_filler(["texts", "of", "somebody"])


class Ends(Texts):
    def __getitem__(self, index):
        return index if index != 3 else next(iter(()))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_ends_within_an_epoch_is_an_error(num_workers):
    batches = iter(DataLoader(Ends(), batch_size=2, num_workers=num_workers, rank=0, world_size=1))
    with pytest.raises(DataError, match=r"StopIteration at \S+test_data.py:\d+ in __getitem__"):
        list(batches)
    batches.close()
