"""Batch samplers as projects have them, each trained on one process and on ranks: every batch, and the parameters.

They are recalled from memory in what matters: from what they draw, how they tell lengths and epochs, which sizes come
out. Parameters are float64; 1e-12 as in `test_train_parity.py`.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

import lockstep
from lockstep.batch.hand import current
from lockstep.errors import CollectiveMismatch, InputError, InputTypeError
from lockstep.testing import run_ranks
from lockstep.train import Trainer

NUM_TEXTS, NUM_CLASSES, EPOCHS = 61, 3, 2

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]


class Texts(torch.utils.data.Dataset[Any]):
    """Texts of 2 to 12 tokens, each of a class; a token is left out at random each time that a text is read."""

    def __init__(self) -> None:
        draw = np.random.RandomState(5)
        self.lengths = draw.randint(2, 13, NUM_TEXTS)
        self.labels = np.arange(NUM_TEXTS) % NUM_CLASSES
        self.tokens = [torch.tensor(draw.randint(1, 20, length)) for length in self.lengths]

    def __len__(self) -> int:
        return NUM_TEXTS

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        tokens = self.tokens[index].clone()
        tokens[torch.randint(len(tokens), (1,))] = 0
        return index, tokens, int(self.labels[index])


def collate(samples: list[tuple[int, Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    indices, tokens, labels = zip(*samples, strict=True)
    return torch.tensor(indices), pad_sequence(list(tokens), batch_first=True), torch.tensor(labels)


class Reader(nn.Module):
    """Its answer does not depend on padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, 6, padding_idx=0)
        self.out = nn.Linear(6, NUM_CLASSES)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens).sum(1))


class FrozenBatches(Sampler[list[int]]):
    """As fairseq's: sorted by length, cut where rows times the longest reach a budget; shuffled by seed and epoch."""

    def __init__(self, texts: Texts, max_tokens: int = 48) -> None:
        self.frozen: list[list[int]] = []
        batch: list[int] = []
        for index in np.argsort(texts.lengths, kind="mergesort").tolist():
            if batch and (len(batch) + 1) * texts.lengths[index] > max_tokens:
                self.frozen.append(batch)
                batch = []
            batch.append(index)
        self.frozen.append(batch)
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(self.frozen)
        np.random.RandomState(self.epoch).shuffle(batches)  # type: ignore[arg-type]
        return iter(batches)

    def __len__(self) -> int:
        return len(self.frozen)


class Bucketize(Sampler[list[int]]):
    """As torchaudio's BucketizeBatchSampler: shuffled in buckets of like length, batches by a total of tokens."""

    def __init__(self, texts: Texts, num_buckets: int = 3, max_token_count: int = 40) -> None:
        boundaries = torch.linspace(2, 12, num_buckets + 1)[1:-1]
        self.buckets = torch.bucketize(torch.tensor(texts.lengths), boundaries)
        self.lengths, self.max_token_count = texts.lengths, max_token_count

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = []
        for bucket in range(int(self.buckets.max()) + 1):
            members = torch.where(self.buckets == bucket)[0]
            batch: list[int] = []
            count = 0
            for index in members[torch.randperm(len(members))].tolist():
                if batch and count + self.lengths[index] > self.max_token_count:
                    batches.append(batch)
                    batch, count = [], 0
                batch.append(index)
                count += self.lengths[index]
            batches.append(batch)
        return iter([batches[place] for place in torch.randperm(len(batches)).tolist()])

    def __len__(self) -> int:
        return len(list(iter(self)))


class MPerClass(Sampler[list[int]]):
    """As metric learning has it: so many of each class in a batch, drawn as they come from numpy's own generator."""

    def __init__(self, texts: Texts, per_class: int = 2, num_batches: int = 7) -> None:
        self.members = [np.flatnonzero(texts.labels == label) for label in range(NUM_CLASSES)]
        self.per_class, self.num_batches = per_class, num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.num_batches):
            parts = [np.random.choice(members, self.per_class, replace=False) for members in self.members]
            yield np.concatenate(parts)  # type: ignore[misc]

    def __len__(self) -> int:
        return self.num_batches


class LengthGrouped(Sampler[int]):
    """As transformers' LengthGroupedSampler: megabatches of a random order, each sorted by length."""

    def __init__(self, texts: Texts, batch_size: int = 8) -> None:
        self.lengths, self.batch_size = texts.lengths, batch_size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.lengths)).tolist()
        size = 4 * self.batch_size
        megabatches = [order[begin : begin + size] for begin in range(0, len(order), size)]
        return iter([i for each in megabatches for i in sorted(each, key=lambda i: self.lengths[i], reverse=True)])

    def __len__(self) -> int:
        return len(self.lengths)


class AspectRatio(Sampler[list[int]]):
    """As mmdet's and detectron2's: samples of two kinds wait until a batch of one kind is full; without a length."""

    def __init__(self, texts: Texts, batch_size: int = 7) -> None:
        self.sampler, self.batch_size = RandomSampler(texts), batch_size  # type: ignore[arg-type]
        self.is_long = texts.lengths > 7

    def __iter__(self) -> Iterator[list[int]]:
        waiting: tuple[list[int], list[int]] = ([], [])
        for index in self.sampler:
            bucket = waiting[int(self.is_long[index])]
            bucket.append(index)
            if len(bucket) == self.batch_size:
                yield bucket[:]
                bucket.clear()
        rest = waiting[0] + waiting[1]
        while rest:
            yield rest[: self.batch_size]
            rest = rest[self.batch_size :]


class WithoutEnd(Sampler[list[int]]):
    """Draws from Python's generator for ever."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield random.sample(range(NUM_TEXTS), random.randint(1, 9))


class TooLong(BatchSampler):
    """Does not know how many batches it makes."""

    def __len__(self) -> int:
        return super().__len__() + 1


SAMPLERS: dict[str, Callable[[Texts], Any]] = {
    "token budget": FrozenBatches,
    "buckets": Bucketize,
    "m per class": MPerClass,
    "grouped by length": lambda texts: BatchSampler(LengthGrouped(texts), 8, drop_last=False),
    "aspect ratio": AspectRatio,
    "random": lambda texts: BatchSampler(RandomSampler(texts), 10, False),
    "list of lists": lambda texts: [[3, 1, 4, 1, 5], [9], [2, 6], list(range(NUM_TEXTS))],
    "without end": lambda texts: WithoutEnd(),
}
REFUSED: dict[str, Callable[[Texts], Any]] = {"too long": lambda texts: TooLong(SequentialSampler(texts), 4, False)}
MAX_STEPS = 9  # in an epoch, of those without an end
WORKERS = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}


def make_loader(name: str, **options: Any) -> lockstep.DataLoader[Any]:
    texts = Texts()
    return lockstep.DataLoader(texts, batch_sampler=(SAMPLERS | REFUSED)[name](texts), collate_fn=collate, **options)


def train(
    name: str, options: dict[str, Any], state: dict[str, Any] | None = None, keep: int = -1
) -> tuple[list[list[int]], list[float], dict[str, Any]]:
    """Samples of this rank, batch by batch; parameters; and the state after so many steps."""
    model = lockstep.DistributedDataParallel(Reader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = make_loader(name, seed=11, **options)
    ids: list[list[int]] = []
    kept: dict[str, Any] = {}
    if state is not None:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    while loader.next_epoch < EPOCHS:
        for step, (indices, tokens, labels) in enumerate(loader, start=1):
            optimizer.zero_grad()
            cross_entropy(model(tokens * 1), labels).backward()  # without the tag of the batch: its size says it
            optimizer.step()
            ids.append([] if lockstep.is_filler(indices) else indices.tolist())
            if len(ids) == keep:
                parts = {"model": model.module, "optimizer": optimizer, "loader": loader}
                kept = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
            if step == MAX_STEPS and name == "without end":
                break
    return ids, torch.cat([each.detach().reshape(-1) for each in model.parameters()]).tolist(), kept


def together(of_ranks: list[Any]) -> list[list[int]]:
    """The global batches, from each rank's part of them."""
    return [list(itertools.chain(*parts)) for parts in zip(*(ids for ids, *_ in of_ranks), strict=True)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_and_parameters_are_those_of_one_process(name: str) -> None:
    ((whole, parameters, _),) = run_ranks(train, 1, name, {})
    assert len({len(each) for each in whole}) > 1 or name == "m per class"
    for world_size in (2, 3):
        ranks = run_ranks(train, world_size, name, {})
        assert together(ranks) == whole
        for _, ends, _ in ranks:
            assert ends == pytest.approx(parameters, rel=0, abs=1e-12)


@pytest.mark.parametrize("options", [WORKERS, {"num_workers": 1, "device": "cpu", "prefetch": 2}])
@pytest.mark.parametrize("name", ["buckets", "without end"])
def test_workers_change_nothing(name: str, options: dict[str, Any]) -> None:
    ((whole, parameters, _),) = run_ranks(train, 1, name, {})
    ranks = run_ranks(train, 2, name, options)
    assert together(ranks) == whole
    for _, ends, _ in ranks:
        assert ends == pytest.approx(parameters, rel=0, abs=1e-12)


@pytest.mark.parametrize("name", ["m per class", "aspect ratio", "buckets"])
def test_an_epoch_is_resumed_at_another_number_of_ranks(name: str) -> None:
    ((whole, parameters, state),) = run_ranks(train, 1, name, {}, None, 3)
    for world_size in (1, 2, 3):
        ranks = run_ranks(train, world_size, name, WORKERS if world_size == 3 else {}, state)
        assert together(ranks) == whole[3:]
        for _, ends, _ in ranks:
            assert ends == pytest.approx(parameters, rel=0, abs=1e-12)


def test_batches_of_a_class_have_as_many_of_each() -> None:
    texts = Texts()
    ((whole, *_),) = run_ranks(train, 1, "m per class", {})
    assert len(whole) == 2 * 7
    assert len({tuple(each) for each in whole}) == len(whole)
    for each in whole:
        assert sorted(texts.labels[each]) == [0, 0, 1, 1, 2, 2]


def test_a_sampler_that_knows_epochs_is_told_them() -> None:
    ((whole, *_),) = run_ranks(train, 1, "token budget", {})
    sampler = FrozenBatches(Texts())
    expected = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        expected += list(sampler)
    assert whole == expected


class OfThisRank(Sampler[list[int]]):
    """Shuffles by a generator of its own, that each rank has seeded by another number."""

    def __init__(self) -> None:
        self.draw = np.random.RandomState(torch.distributed.get_rank())

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1, 2, 3]
        yield self.draw.permutation(NUM_TEXTS)[:4].tolist()


def train_on_other_batches() -> None:
    model = lockstep.DistributedDataParallel(Reader())
    for _, tokens, labels in lockstep.DataLoader(Texts(), batch_sampler=OfThisRank(), collate_fn=collate):
        cross_entropy(model(tokens), labels).backward()


@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_that_differ_between_ranks_are_an_error(world_size: int) -> None:
    outcomes = run_ranks(train_on_other_batches, world_size, expect_errors=True)
    assert all(isinstance(each, CollectiveMismatch) for each in outcomes)
    assert "gradients of samples 4 … of epoch 0, but with different data" in str(outcomes[0])


def evaluate(sampler: str) -> tuple[float, int]:
    loader, model = make_loader(sampler, evaluation=True), Reader()
    loss = lockstep.metrics.Mean()
    with torch.no_grad():
        for indices, tokens, labels in loader:
            share = current()
            assert share is not None
            assert share.local_samples == len(indices)
            loss.update(cross_entropy(model(tokens), labels))
    (mean,) = lockstep.metrics.synchronize(loss)
    return mean, len(iter(loader))


@pytest.mark.parametrize("sampler", ["token budget", "aspect ratio", "list of lists"])
def test_an_evaluation_counts_every_sample_once(sampler: str) -> None:
    ((expected, number),) = run_ranks(evaluate, 1, sampler)
    for world_size in (2, 3):
        ranks = run_ranks(evaluate, world_size, sampler)
        assert [mean for mean, _ in ranks] == [pytest.approx(expected, rel=1e-12)] * world_size
        assert max(count for _, count in ranks) == number


def test_evaluation_data_that_differ_are_noticed() -> None:
    assert all(isinstance(each, CollectiveMismatch) for each in run_ranks(evaluate_other, 2, expect_errors=True))


def evaluate_other() -> None:
    loss = lockstep.metrics.Mean()
    loader = lockstep.DataLoader(Texts(), batch_sampler=OfThisRank(), collate_fn=collate, evaluation=True)
    for _, _, labels in loader:
        loss.update(labels.double())
    lockstep.metrics.synchronize(loss)


# ---- Trainer -------------------------------------------------------------------------------------------------


def fit(name: str, accumulate: int) -> list[float]:
    model = lockstep.DistributedDataParallel(Reader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(engine: Any, batch: Any) -> Tensor:
        return cross_entropy(engine(batch[1]), batch[2])

    Trainer(model, optimizer, make_loader(name), loss_fn, accumulate=accumulate).fit(EPOCHS)
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).tolist()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_trainer_takes_batches_of_any_sizes(accumulate: int) -> None:
    (expected,) = run_ranks(fit, 1, "token budget", accumulate)
    for ends in run_ranks(fit, 3, "token budget", accumulate):
        assert ends == pytest.approx(expected, rel=0, abs=1e-12)


def test_a_trainer_needs_to_know_how_many_batches_there_are() -> None:
    (error,) = run_ranks(fit, 1, "aspect ratio", 1, expect_errors=True)
    assert isinstance(error, InputTypeError)
    assert "AspectRatio has no length" in str(error)
    (error,) = run_ranks(fit, 1, "too long", 3, expect_errors=True)
    assert isinstance(error, InputError)
    assert "TooLong has length 17" in str(error)
