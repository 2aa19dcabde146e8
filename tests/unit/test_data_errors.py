"""What the loader refuses, and what it says."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lockstep.data import DataLoader
from lockstep.errors import DataError


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Lengthless(Dataset):
    def __getitem__(self, index):
        return index


BY_RANK = torch.utils.data.DistributedSampler(range(10), num_replicas=2, rank=0)


class BatchesByRank(list):
    """As projects write them for torch's loader: each rank makes its own batches."""

    num_replicas, rank = 2, 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dataset": []}, "list is empty"),
        ({"dataset": Endless()}, "Endless is iterable-style.*__getitem__"),
        ({"dataset": iter([1])}, "iterable-style"),
        ({"dataset": 5}, r"dataset is 5 \(int\); expected an object with __getitem__"),
        ({"dataset": None}, "dataset is None"),
        ({"dataset": Lengthless()}, "Lengthless has no length.*__len__"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"batch_size": -3}, "batch_size is -3"),
        ({"batch_size": 32.0}, "batch_size is 32.0, a float; expected an integer: pass batch_size=32"),
        ({"batch_size": 2.5}, r"batch_size is 2.5 \(float\)"),
        ({"batch_size": None}, "batch_size is None"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"batch_size": 11, "drop_last": True}, "leaves no batch: 10 samples do not fill a batch of 11"),
        ({"num_workers": -1}, "num_workers is -1; expected at least 0"),
        ({"num_workers": 1.0}, "pass num_workers=1"),
        ({"timeout": -1, "num_workers": 1}, "timeout option should be non-negative"),
        ({"timeout": 5}, "timeout needs worker processes"),
        ({"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
        ({"prefetch_factor": 0, "num_workers": 1}, "prefetch_factor is 0"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"multiprocessing_context": "fork"}, "multiprocessing_context can only be used with"),
        ({"rank": 2, "world_size": 2}, "rank is 2, but world_size is 2: expected 0 … 1"),
        ({"rank": -1, "world_size": 2}, "rank is -1"),
        ({"rank": 0}, "rank was given without world_size"),
        ({"world_size": 2}, "world_size was given without rank"),
        ({"world_size": 0, "rank": 0}, "world_size is 0"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"evaluation": "False"}, "evaluation is 'False', a text"),
        ({"sampler": [0], "shuffle": True}, "shuffle=True and sampler list both set the order"),
        ({"sampler": iter([0])}, "must be iterable and have a length"),
        ({"sampler": []}, "sampler list is empty"),
        (
            {"sampler": BY_RANK},
            "DistributedSampler already gives each rank its own part.*global batch_size.*num_replicas=1 and rank=0",
        ),
        (
            {"batch_sampler": [[0, 1]], "batch_size": 4},
            "mutually exclusive with batch_size, shuffle, sampler, and drop",
        ),
        (
            {"batch_sampler": [[0, 1]], "shuffle": True},
            "mutually exclusive with batch_size, shuffle, sampler, and drop",
        ),
        ({"batch_sampler": [[0, 1]], "sampler": [0, 1]}, "mutually exclusive with"),
        ({"batch_sampler": [[0, 1]], "drop_last": True}, "mutually exclusive with"),
        ({"batch_sampler": [[0, 1]], "permutation": "computed"}, "Pass shuffle=True"),
        ({"batch_sampler": iter([[0, 1]])}, "list_iterator cannot be iterated again in each epoch. Pass a list"),
        ({"batch_sampler": (each for each in [[0, 1]])}, "generator cannot be iterated again in each epoch"),
        ({"batch_sampler": 4}, "int cannot be iterated again"),
        ({"batch_sampler": []}, "batch_sampler list is empty"),
        (
            {"batch_sampler": torch.utils.data.BatchSampler(BY_RANK, 4, False)},
            "BatchSampler already makes the batches of one rank.*num_replicas=1 and rank=0",
        ),
        ({"batch_sampler": BatchesByRank()}, "BatchesByRank already makes the batches of one rank"),
        ({"generator": torch.Generator()}, r"generator is not supported.*seed=generator.initial_seed\(\)"),
        ({"in_order": False}, "in_order=False is not supported"),
    ],
)
def test_impossible_arguments_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected) as raised:  # of torch, where that says it
        DataLoader(**{"dataset": range(10), **options})
    assert isinstance(raised.value, DataError) or " option " in expected or expected.startswith("multiprocessing")


class Splits(torch.utils.data.Sampler):
    """Gives each rank its own part, as samplers of many libraries do."""

    def __init__(self, size_name, size, rank_name, rank):
        vars(self).update({size_name: size, rank_name: rank})
        self.part = range(rank, 10, size)

    def __iter__(self):
        return iter(self.part)

    def __len__(self):
        return len(self.part)


@pytest.mark.parametrize(
    ("size_name", "rank_name"),
    [
        ("num_replicas", "rank"),
        ("world_size", "rank"),  # mmengine's
        ("_world_size", "_rank"),  # detectron2's
        ("_num_replicas", "_rank"),
        ("data_parallel_size", "data_parallel_rank"),
    ],
)
def test_a_sampler_that_splits_by_rank_is_refused(size_name, rank_name):
    sampler = Splits(size_name, 2, rank_name, 1)
    with pytest.raises(
        DataError, match=r"Splits already gives each rank its own part.*num_replicas=1 and rank=0.*such as LengthGr"
    ):
        DataLoader(range(10), sampler=sampler)
    alone = DataLoader(range(10), 5, sampler=sampler, rank=0, world_size=1)
    assert [batch.tolist() for batch in alone] == [[1, 3, 5, 7, 9]], "a rank may have data of its own"


def test_a_sampler_that_knows_of_one_rank_is_taken():
    for sampler in (Splits("world_size", 1, "rank", 0), Splits("world_size", 1, "seed", 5)):
        assert len(next(iter(DataLoader(range(10), 10, sampler=sampler)))) == len(sampler)
    sampler.world_size, sampler.rank = 4, None  # not told yet
    assert len(DataLoader(range(10), sampler=sampler)) == len(sampler)


@pytest.mark.parametrize("epoch", [-1, 1.5, None])
def test_set_epoch_wants_a_number(epoch):
    with pytest.raises(DataError, match="epoch is"):
        DataLoader(range(3)).set_epoch(epoch)


def test_batch_sampler_is_the_loaders_own():
    with pytest.raises(DataError, match="Iterate the loader itself"):
        list(DataLoader(range(3)).batch_sampler)


class Repeated:
    """What timm's MultiEpochsDataLoader and ultralytics' InfiniteDataLoader put in place of the batch sampler."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class WalksOnForEver(DataLoader):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


def test_batches_that_are_repeated_for_ever_are_refused():
    """From the second epoch on they would be batches behind the end, with weights of nonsense."""
    with pytest.raises(DataError, match=r"replaced by a Repeated.*with persistent_workers=True"):
        list(WalksOnForEver(range(9), 4, rank=0, world_size=2))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_has_batches_of_its_own(copied):
    assert len(list(copied(DataLoader(range(9), 4)))) == 3


@pytest.mark.parametrize("name", ["batch_size", "batch_sampler.batch_size", "drop_last", "batch_sampler.drop_last"])
def test_what_batches_are_made_from_stays(name):
    """Torch's loader ignores what is assigned to its batch sampler when an iteration is under way."""
    loader = DataLoader(range(9), 4)
    owner = loader.batch_sampler if "." in name else loader
    with pytest.raises(DataError, match=rf"loader\.{name} = 6: .*new\.load_state_dict\(loader\.state_dict\(\)\)"):
        setattr(owner, name.rpartition(".")[2], 6)
    list(loader)
    new = DataLoader(range(9), 6)
    new.load_state_dict(loader.state_dict())
    assert (loader.batch_size, new.batch_size, new.epoch) == (4, 6, 1)
