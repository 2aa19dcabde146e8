"""Fetches a batch so that the randomness of a sample depends only on seed, epoch and index.

torch's fetcher, in the main process or in a worker, gets a batch from its dataset through `__getitems__`. Here that
dataset is a source, which seeds, fetches and collates the samples. It supports two kinds of randomness:

- A dataset whose `__getitem__` takes a keyword argument `generator` is passed a new `torch.Generator` for each sample.
  This is the clean way, without process-wide generators. It also works inside torch's wrappers (`Subset`,
  `ConcatDataset`, `StackDataset`).
- Any other dataset may draw from the process-wide generators of torch (also on the current GPU), numpy or `random`, as
  most transforms do. They are seeded before each sample, and again before a user's collate function.

A dataset with `__getitems__` fetches a batch in one go, and can only be seeded once per batch. If it draws, its samples
depend on which ones a rank fetches together, and so on the number of ranks.

[Note: generators that nobody draws from] Seeding all generators takes longer than fetching a cheap sample, and most
datasets draw from one of them or from none. So draws are detected, by comparing generator states: after each sample of
the first batch that a process fetches, and after each batch from then on. A generator that was drawn from is seeded for
each sample from then on, and the samples fetched without its seed are fetched again: usually just the first sample, or
a batch if a transform is switched on later. The samples are the same either way. torch's generators, whose seed can be
read without drawing, have a state in each batch that depends only on seed and epoch.
"""

from __future__ import annotations

import bisect
import inspect
import operator
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, get_worker_info

from lockstep.data.order import Fetch
from lockstep.data.seeding import GLOBAL_RNGS, derive_seed, derive_seeds, preserve_global_rngs, states_after
from lockstep.data.worker_signals import Shield
from lockstep.errors import DataError
from lockstep.torch_private.loader import set_guarded, stacks_as_torch

__all__ = ["DrawnFrom", "SampleSource", "TensorSource", "WorkerInit", "identity", "make_source", "takes_generator"]

Collate = Callable[[list[Any]], Any]
_SEED_IS_READABLE = (0, 3)  # positions in `GLOBAL_RNGS`: a sample may read `torch.initial_seed()` and draw nothing

# Indexing these runs no user code, so nothing can be drawn.
_DETERMINISTIC_TYPES = (torch.Tensor, np.ndarray, list, tuple, range, TensorDataset)
_PLAIN_TYPES = frozenset({torch.Tensor, np.ndarray, np.int64, np.float32, np.float64, int, float, bool, str, bytes})


def _parts(dataset: Any) -> Sequence[Any]:
    """The datasets inside one of torch's wrappers; empty for any other dataset.

    Empty also for a subclass that picks samples in its own way.
    """
    for wrapper in (Subset, ConcatDataset, StackDataset):
        if isinstance(dataset, wrapper) and type(dataset).__getitem__ is wrapper.__getitem__:
            if isinstance(dataset, Subset):
                return [dataset.dataset]
            return list(dataset.datasets.values()) if isinstance(dataset.datasets, dict) else dataset.datasets
    return ()


def _is_deterministic(dataset: Any) -> bool:
    """Whether fetching a sample runs no user code; checked for each batch, as a dataset may be replaced."""
    kind = type(dataset)  # A subclass of one of torch's may override anything.
    if kind is Subset and type(dataset.indices) not in _DETERMINISTIC_TYPES:
        return False
    if kind in (Subset, ConcatDataset, StackDataset):
        return all(map(_is_deterministic, _parts(dataset)))
    return kind in _DETERMINISTIC_TYPES


def _are_plain(samples: list[Any]) -> bool:
    """Whether collating them runs no user code: numbers, tensors, arrays and strings, or tuples of these."""
    kinds = set(map(type, samples))
    if kinds <= {tuple, list}:
        kinds = {type(part) for sample in samples for part in sample}
    return kinds <= _PLAIN_TYPES


@lru_cache(maxsize=64)
def _getitem_takes_generator(kind: Any) -> bool:
    try:
        parameter = inspect.signature(kind.__getitem__).parameters.get("generator")
    except (TypeError, ValueError):  # written in C, without a readable signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def takes_generator(dataset: Any) -> bool:
    """Whether the dataset's `__getitem__` takes a `generator`; looks inside torch's wrappers."""
    parts = _parts(dataset)
    return any(map(takes_generator, parts)) if parts else _getitem_takes_generator(dataset.__class__)


def _fetches_batches(dataset: Any) -> bool:
    """Whether `__getitems__` is the user's own; looks inside torch's wrappers, which forward it."""
    if getattr(type(dataset), "__getitems__", None) in (Subset.__getitems__, StackDataset.__getitems__):
        return any(map(_fetches_batches, _parts(dataset)))
    return callable(getattr(dataset, "__getitems__", None))


def _read(dataset: Any, index: int, generator: torch.Generator) -> Any:
    """Fetch a sample, passing the generator to the dataset inside torch's wrappers that takes one."""
    parts = _parts(dataset)
    if not parts:
        takes_one = _getitem_takes_generator(dataset.__class__)
        return dataset.__getitem__(index, generator=generator) if takes_one else dataset[index]
    if isinstance(dataset, Subset):
        return _read(dataset.dataset, dataset.indices[index], generator)
    if isinstance(dataset, ConcatDataset):
        position = index + len(dataset) if index < 0 else index
        part = bisect.bisect_right(dataset.cumulative_sizes, position)
        return _read(parts[part], position - (dataset.cumulative_sizes[part - 1] if part else 0), generator)
    if isinstance(dataset.datasets, dict):
        return {name: _read(inner, index, generator) for name, inner in dataset.datasets.items()}
    return tuple(_read(inner, index, generator) for inner in parts)


class DrawnFrom:
    """The generators that a dataset and its collate function draw from. See [Note: generators that nobody draws from].

    Args:
        is_asked: whether to compare generators, and seed those that are drawn from.
    """

    def __init__(self, is_asked: bool = True) -> None:
        self.is_asked = is_asked
        self._checks_each = is_asked  # after each sample, not after each batch
        # Positions in `GLOBAL_RNGS` of the generators that were drawn from, and of the others.
        self._drawn: list[int] = []
        self._quiet = [*range(len(GLOBAL_RNGS))] if is_asked else []
        self._states: Sequence[Any] = ()  # of all generators; the others start from these in each batch

    @property
    def is_nothing(self) -> bool:
        """Whether samples may be fetched without `sample`."""
        return not self._drawn and not self._checks_each

    def batch(self, states: list[Any], quiet_value: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function`, which fetches and collates a batch; again if it drew from a generator for the first time."""
        self._states, quiet = states.copy(), states_after(quiet_value)
        for number in _SEED_IS_READABLE:
            self._states[number] = quiet[number]
            GLOBAL_RNGS[number].restore(quiet[number])
        while True:
            result = function(*arguments)
            if not self._note(self._states):
                self._checks_each = False
                return result

    def sample(self, value: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function`, which fetches a sample, after seeding the generators that are drawn from."""
        while True:
            self._seed_drawn(value)
            result = function(*arguments)
            if not self._checks_each or not self._note(self._states):
                return result

    def collate(self, value: int, function: Collate, samples: list[Any]) -> Any:
        """Call `function`, which collates samples; only once, as it may modify them."""
        self._seed_drawn(value)
        if not self._checks_each:
            return function(samples)
        states = states_after(value)
        self._rewind_quiet(states)
        result = function(samples)
        self._note(states)
        self._rewind_quiet(self._states)
        return result

    def _seed_drawn(self, value: int) -> None:
        for number in self._drawn:
            GLOBAL_RNGS[number].seed(value)

    def _rewind_quiet(self, states: Sequence[Any]) -> None:
        for number in self._quiet:
            GLOBAL_RNGS[number].restore(states[number])

    def _note(self, states: Sequence[Any]) -> bool:
        """Whether one of the other generators was drawn from since it was rewound to its state in `states`."""
        drawn = [number for number in self._quiet if not GLOBAL_RNGS[number].is_at(states[number])]
        if drawn:
            self._drawn += drawn
            self._quiet = [number for number in self._quiet if number not in drawn]
        return bool(drawn)


@lru_cache(maxsize=4)
def _quiet_value(seed: int, epoch: int) -> int:
    return derive_seed(b"quiet", seed, epoch)


class SampleSource:
    """Fetches and collates a batch of any dataset, sample by sample, each seeded.

    Args:
        dataset: the user's. With its own `__getitems__` (and no `generator`) it fetches a batch in one go, and is
            seeded once, by the key of the first sample.
        drawn_from: which generators both draw from, as known so far; None seeds no process-wide generator.
        thread: the thread that created the loader.
    """

    def __init__(self, dataset: Any, collate_fn: Collate, drawn_from: DrawnFrom | None, thread: int) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._drawn_from = drawn_from or DrawnFrom(is_asked=False)
        self._thread = thread
        self._takes_generator = takes_generator(dataset)
        self._fetches_batches = not self._takes_generator and _fetches_batches(dataset)

    def __getitems__(self, fetch: Fetch) -> Any:
        """Fetch and collate one batch.

        Raises:
            DataError: called in another thread than the one that trains; or the dataset raised StopIteration.
        """
        if not self._drawn_from.is_asked:
            return self._batch(fetch)
        if self._collate_fn is default_collate and _is_deterministic(self.dataset):
            samples = [self.dataset[index] for index in fetch.indices]
            if _are_plain(samples):
                return default_collate(samples)
        advice = ", pass num_workers=1, or pass seed_global_rng=False and let __getitem__ take a `generator`"
        with preserve_global_rngs(self._thread, advice) as states:
            return self._drawn_from.batch(states, _quiet_value(fetch.seed, fetch.epoch), self._batch, fetch)

    def _batch(self, fetch: Fetch) -> Any:
        try:
            samples = self._samples(fetch)
            if self._drawn_from.is_nothing:
                return self._collate_fn(samples)
            value = derive_seed(b"collate", fetch.seed, fetch.epoch, fetch.keys[0])
            return self._drawn_from.collate(value, self._collate_fn, samples)
        except StopIteration as error:  # would look like the end of the epoch
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"StopIteration at {place.filename}:{place.lineno} in {place.name}, while a batch of "
                f"{type(self.dataset).__name__} was fetched: it would end the epoch. Give next(…) a default or a new "
                "iterator for when nothing is left"
            ) from error

    def _samples(self, fetch: Fetch) -> list[Any]:
        dataset, call, (seed, epoch, indices, keys) = self.dataset, self._drawn_from.sample, fetch
        if self._fetches_batches:
            fetched: list[Any] = call(derive_seed(b"global", seed, epoch, keys[0]), dataset.__getitems__, indices)
            return fetched
        if self._drawn_from.is_nothing and not self._takes_generator:
            return [dataset[index] for index in indices]
        # All seeds at once, which is several times faster than one at a time between samples.
        values = derive_seeds(b"global", seed, epoch, keys)
        if not self._takes_generator:
            pairs = zip(values, indices, strict=True)
            return [call(value, operator.getitem, dataset, index) for value, index in pairs]
        own_values = derive_seeds(b"sample", seed, epoch, keys)  # not `values`: a dataset may draw from both

        def read_seeded(index: int, own_value: int) -> Any:
            return _read(dataset, index, torch.Generator().manual_seed(own_value))

        triples = zip(values, indices, own_values, strict=True)
        return [call(value, read_seeded, index, own_value) for value, index, own_value in triples]


class TensorSource:
    """A `TensorDataset` under the default collate: whole batches by one gather per tensor.

    Gives the same values as picking rows one by one and stacking them, without a Python object per row.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, fetch: Fetch) -> list[torch.Tensor]:
        rows = torch.tensor(fetch.indices, device="cpu")
        # Gathers consecutive rows too: a slice would alias the dataset, so a script that
        # normalises its batch in place would change the data.
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self.dataset.tensors]


def identity(batch: Any) -> Any:
    """The collate function for a source, whose batches are already collated; a function, so that it can be pickled."""
    return batch


def make_source(
    dataset: Any, collate_fn: Collate, drawn_from: DrawnFrom | None, thread: int
) -> SampleSource | TensorSource:
    """The source for a dataset: a `TensorSource` if that gives the same batches, else a `SampleSource`."""
    is_default = type(dataset) is TensorDataset and collate_fn is default_collate and stacks_as_torch()
    if is_default and all(
        type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
        for tensor in dataset.tensors
    ):
        return TensorSource(dataset)
    return SampleSource(dataset, collate_fn, drawn_from, thread)


class WorkerInit:
    """Runs first in a worker: makes the user's dataset visible, then calls the user's `worker_init_fn`.

    A `worker_init_fn` reaches the worker's copy of the dataset as `torch.utils.data.get_worker_info().dataset`, which
    torch sets to the fetcher's dataset, here a source.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn
        self._shield = Shield()

    def __call__(self, worker_id: int) -> None:
        self._shield()
        info = get_worker_info()
        assert info is not None, "called outside a worker"
        source: Any = info.dataset
        set_guarded(info, "dataset", source.dataset)  # the info is frozen
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
