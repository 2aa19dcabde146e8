"""`DataLoader(batch_sampler=…)` in one process: every rank is a loader with an explicit rank."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

from loader_cases import WORLDS, Drawing, Numbers, Seeded, run_epoch, run_ranks_in_turn
from lockstep import batch
from lockstep.batch.share import BatchShare
from lockstep.data import DataLoader
from lockstep.errors import DataError

BATCHES = [[0, 1, 2, 3, 4], [5], [6, 7], [8, 9, 9]]
EVERYTHING = {"batch_sampler": [[4, 4], [0, 9, 2, 7, 1], [4]]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]


class Drawn:
    """Batches that are drawn as they come, from all process-wide generators."""

    def __init__(self, length=None):
        self.length = length

    def __iter__(self):
        for _ in range(5):
            size = random.randint(1, 5)
            yield [int(torch.randint(10, ())), *np.random.permutation(10)[: size - 1]]


class Sized(Drawn):
    def __len__(self):
        return 5


def test_ranks_get_their_shares_and_fillers_of_two_rows():
    loaders = [DataLoader(range(10), batch_sampler=BATCHES, rank=rank, world_size=3) for rank in range(3)]
    samples, shares = zip(*(zip(*run_epoch(loader), strict=True) for loader in loaders), strict=True)
    assert samples == (
        ([0, 1], [5], [6], [8]),
        ([2, 3], [5, 5], [7], [9]),
        ([4], [5, 5], [6, 6], [9]),
    )
    held = [[2, 1, 1, 1], [2, 0, 1, 1], [1, 0, 0, 1]]
    assert [list(each) for each in shares] == [
        [BatchShare(count, len(whole), 3) for count, whole in zip(counts, BATCHES, strict=True)] for counts in held
    ]
    assert {len(loader) for loader in loaders} == {4}
    assert loaders[0].batch_size is None
    assert loaders[0].batch_sampler is BATCHES


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dataset", [Numbers(10), Seeded(10), Drawing(10)])
def test_batches_and_what_samples_draw_are_those_of_one_process(dataset, world_size, **options):
    for sampler in (EVERYTHING["batch_sampler"], Drawn()):
        expected = run_ranks_in_turn(dataset, 1, epochs=2, batch_sampler=sampler, seed=7)
        assert run_ranks_in_turn(dataset, world_size, epochs=2, batch_sampler=sampler, seed=7, **options) == expected


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "device": "cpu", "prefetch": 2}])
def test_workers_change_nothing(options):
    test_batches_and_what_samples_draw_are_those_of_one_process(Drawing(10), 3, **options)


def test_an_index_that_comes_again_draws_anew():
    drawn = [sample for each in run_ranks_in_turn(Seeded(10), 2, **EVERYTHING) for sample in each]
    of_the_fourth = [sample[1:] for sample in drawn if sample[0] == 4]
    assert len({tuple(each) for each in of_the_fourth}) == 3
    first = next(sample for sample in drawn if sample[0] == 4)
    assert first in run_ranks_in_turn(Seeded(10), 1, batch_size=10)[0], "by (seed, epoch, index), as without it"


def test_the_sampler_draws_by_seed_and_epoch_and_disturbs_nobody():
    def batches(scramble, **options):
        torch.manual_seed(scramble)
        random.seed(scramble)
        np.random.seed(scramble)
        found = []
        for loaded in DataLoader(range(10), batch_sampler=Drawn(), rank=0, world_size=1, **options):
            found.append(loaded.tolist())
            drawn = torch.rand(()).item(), random.random(), np.random.rand()
        return found, drawn

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    own = [(torch.rand(()).item(), random.random(), np.random.rand()) for _ in range(5)]
    first, drawn = batches(3)
    assert drawn == own[-1]
    assert batches(4)[0] == first
    assert batches(3, seed=1)[0] != first
    loader = DataLoader(range(10), batch_sampler=Drawn())
    assert [loaded.tolist() for loaded in loader] == first
    assert [loaded.tolist() for loaded in loader] != first, "the next epoch"


def test_length_is_that_of_the_batch_sampler():
    loader = DataLoader(range(10), batch_sampler=Drawn())
    with pytest.raises(TypeError, match=r"Drawn.* has no len\(\)"):
        len(loader)
    with pytest.raises(TypeError):
        len(iter(loader))
    assert len(list(iter(loader))) == 5
    with pytest.raises(TypeError):
        len(DataLoader(range(10), batch_sampler=BatchSampler(Drawn(), 2, False)))
    loader = DataLoader(range(10), batch_sampler=Sized())
    assert len(loader) == len(iter(loader)) == 5
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert len(iter(loader)) == 4


def test_evaluation_leaves_out_what_a_rank_does_not_hold():
    loaders = [
        DataLoader(range(10), batch_sampler=BATCHES, evaluation=True, rank=rank, world_size=3) for rank in range(3)
    ]
    assert [[samples for samples, _ in run_epoch(loader)] for loader in loaders] == [
        [[0, 1], [5], [6], [8]],
        [[2, 3], [7], [9]],
        [[4], [9]],
    ]
    assert [len(iter(loader)) for loader in loaders] == [4, 3, 2]
    assert {len(loader) for loader in loaders} == {4}


class Told(Sampler):
    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([[self.epoch], [1, 2]])


class ToldBySampler(Sampler):
    """As torch's: the sampler within is told."""

    def __init__(self):
        self.sampler = Told()

    def __iter__(self):
        return iter(self.sampler)


@pytest.mark.parametrize("sampler", [Told(), ToldBySampler()])
@pytest.mark.parametrize("copied", [lambda loader: loader, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_is_told_epochs_by_the_loader_or_by_the_script(sampler, copied):
    loader = copied(DataLoader(range(10), batch_sampler=sampler, rank=0, world_size=1))
    assert [run_epoch(loader)[0][0] for _ in range(2)] == [[0], [1]]
    getattr(loader.batch_sampler, "sampler", loader.batch_sampler).set_epoch(5)
    assert (loader.next_epoch, run_epoch(loader)[0][0], run_epoch(loader)[0][0]) == (5, [5], [6])
    loader.set_epoch(3)
    assert run_epoch(loader)[0][0] == [3]


def test_a_sampler_for_ranks_that_was_made_for_one_is_taken():
    sampler = BatchSampler(DistributedSampler(range(10), num_replicas=1, rank=0, seed=4), 4, drop_last=False)
    loader = DataLoader(range(10), batch_sampler=sampler, rank=0, world_size=1)
    first, second = ([samples for samples, _ in run_epoch(loader)] for _ in range(2))
    assert first != second, "the loader tells its sampler the epoch"
    sampler.sampler.set_epoch(0)
    assert list(sampler) == first


def test_a_batch_size_that_is_changed_counts_from_the_next_epoch_on():
    loader = DataLoader(range(10), batch_sampler=BatchSampler(RandomSampler(range(10)), 4, False), rank=0, world_size=1)
    assert [len(samples) for samples, _ in run_epoch(loader)] == [4, 4, 2]
    loader.batch_sampler.batch_size = 7
    assert [len(samples) for samples, _ in run_epoch(loader)] == [7, 3]


def test_another_thread_than_the_loaders_may_not_run_it():
    """It would draw while the training does."""
    loader = DataLoader(range(10), batch_sampler=Drawn(), rank=0, world_size=1)
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(DataError, match=r"a thread other than.*Create the loader in the thread that fetches$"):
            threads.submit(lambda: list(loader)).result()
        made = threads.submit(DataLoader, range(10), batch_sampler=Drawn(), rank=0, world_size=1).result()
        assert len(threads.submit(lambda: list(made)).result()) == 5


class Wrong:
    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "Wrong yields no batch in epoch 0"),
        ([[1], []], "Wrong yielded an empty batch, number 1 of epoch 0: leave it out"),
        ([3, 4], "Wrong yielded 3 as batch 0.*one index at a time as `sampler`"),
        ([[1], ["a"]], r"Wrong yielded \['a'\] as batch 1 of epoch 0; expected.* list of integers"),
        ([[1.0]], "expected the indices of a global batch"),
        ([None], "Wrong yielded None"),
    ],
)
def test_what_is_no_batch_is_an_error(batches, words):
    with pytest.raises(DataError, match=words):
        list(DataLoader(range(10), batch_sampler=Wrong(*batches)))


class Once:
    """Begins where it has stopped."""

    def __init__(self):
        self.rest = iter([[1, 2], [3]])

    def __iter__(self):
        return self.rest


def test_one_that_can_be_walked_once_says_so_in_the_second_epoch():
    loader = DataLoader(range(10), batch_sampler=Once())
    assert len(list(loader)) == 2
    with pytest.raises(DataError, match=r"Once yields no batch in epoch 1.*start anew each time"):
        list(loader)


class TestResuming:
    def state(self, sampler, number=2):
        loader = DataLoader(range(10), batch_sampler=sampler, rank=0, world_size=1)
        batches = iter(loader)
        found = [next(batches).tolist() for _ in range(number)]
        return found, loader.state_dict()

    @pytest.mark.parametrize("number", range(1, 6))
    def test_goes_by_batches(self, number):
        first, state = self.state(Drawn(), number)
        whole = run_ranks_in_turn(range(10), 1, batch_sampler=Drawn())
        for world_size in WORLDS:
            rest = run_ranks_in_turn(range(10), world_size, batch_sampler=Drawn(), state=state)
            assert first + rest == whole

    @pytest.mark.parametrize(
        "other", [[[1, 2], [3, 5], [6]], [[1, 2, 3], [4, 6]], [[1, 2]], [[1], [2, 3, 4]], [[2, 1], [3, 4]]]
    )
    def test_of_other_batches_is_an_error(self, other):
        _, state = self.state([[1, 2], [3, 4], [6]])
        loader = DataLoader(range(10), batch_sampler=other, rank=0, world_size=1)
        loader.load_state_dict(state)
        with pytest.raises(DataError, match="list yields different batches in epoch 0 from when the loader's state"):
            iter(loader)

    def test_only_the_batches_consumed_are_compared(self):
        _, state = self.state([[1, 2], [3, 4], [6]])
        loader = DataLoader(range(10), batch_sampler=[[1, 2], [3, 4], [7]], rank=0, world_size=1)
        loader.load_state_dict(state)
        assert [samples for samples, _ in run_epoch(loader)] == [[7]]

    def test_a_state_of_another_order_does_not_fit(self):
        _, state = self.state(BATCHES)
        with pytest.raises(DataError, match="its order is 'batch_sampler', here it is 'sequential'"):
            DataLoader(range(10), 4).load_state_dict({**state, "samples_per_epoch": 10})
        sequential = DataLoader(range(10), 4).state_dict()
        with pytest.raises(DataError, match="its samples_per_epoch is 10, here it is None"):
            DataLoader(range(10), batch_sampler=BATCHES).load_state_dict(sequential)


def test_batches_of_which_nothing_tells_are_known_by_their_sizes():
    """As far as ranks can: the loader says how a batch is split when it yields it."""
    batch.reset()
    loaders = [DataLoader(range(10), batch_sampler=BATCHES, rank=rank, world_size=2) for rank in range(2)]
    walks = [iter(loader) for loader in loaders]
    known = []
    for _ in BATCHES:
        for walk in walks:
            next(walk)
        known.append([division.num_samples for division in batch.plans.divisions(0, 2)])
    assert known == [[5], [1, 5], [1, 2, 5], [1, 2, 3, 5]]
    for walk in walks:
        walk.close()
    batch.reset()
