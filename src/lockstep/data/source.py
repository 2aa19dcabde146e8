"""Fetching samples so that their randomness depends on seed, epoch and index alone.

torch's fetcher, in the main process or in a worker, asks its dataset for one batch through
`__getitems__`. What it holds here is a `SeededDataset` around the user's dataset. Two kinds of
randomness are served:

- a dataset whose `__getitem__` takes a keyword `generator` is handed a `torch.Generator` of its
  own for each sample. This is the clean way, and free of the process-wide generators. torch's
  wrappers (`Subset`, `ConcatDataset`, `StackDataset`) are looked into, and hand it on.
- everything else may draw from the process-wide generators of torch, numpy or `random`, as most
  transforms do. They are seeded anew before each sample, which takes some microseconds, unless it is known that the
  dataset draws nothing (`drawing.py`). A collate function of the user's is seeded once per batch.

A dataset with a `__getitems__` fetches a batch in one go, and can only be seeded once for it. If it then draws, its
samples depend on which of them a rank fetches together, and so on the number of ranks.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, get_worker_info

from lockstep.data.drawing import are_indices, is_plain_sample, only_looks_up
from lockstep.data.order import Fetch
from lockstep.data.seeding import derive_seed, derive_seeds, seed_global_rngs
from lockstep.torch_private.loader import set_guarded, stacks_as_torch

__all__ = [
    "SeededDataset",
    "TensorSource",
    "WorkerInit",
    "identity",
    "is_deterministic",
    "make_source",
    "takes_generator",
]

# Indexing these runs no code of the user's, so nothing can be drawn.
_DETERMINISTIC_TYPES = (torch.Tensor, np.ndarray, list, tuple, range)


def _parts(dataset: Any) -> Sequence[Any]:
    """The datasets inside one of torch's wrappers; empty for any other dataset.

    A subclass that picks samples in a way of its own is not looked into.
    """
    for wrapper in (Subset, ConcatDataset, StackDataset):
        if isinstance(dataset, wrapper) and type(dataset).__getitem__ is wrapper.__getitem__:
            if isinstance(dataset, Subset):
                return [dataset.dataset]
            return list(dataset.datasets.values()) if isinstance(dataset.datasets, dict) else dataset.datasets
    return ()


def is_deterministic(dataset: Any, indices: Sequence[Any]) -> bool:
    """Whether looking these indices up is known to draw no random numbers now; False when in doubt."""
    kind = type(dataset)  # A subclass of one of torch's may have code of its own behind any name.
    if kind in (Subset, ConcatDataset) and not are_indices(indices):
        return False
    if kind is Subset:
        order = dataset.indices
        is_plain = type(order) in (list, tuple, range, np.ndarray, torch.Tensor)
        return is_plain and is_deterministic(dataset.dataset, [order[index] for index in indices])
    if kind is ConcatDataset:
        return all(is_deterministic(dataset.datasets[part], own) for part, own in _by_part(dataset, indices).items())
    if kind is StackDataset:
        return all(is_deterministic(part, indices) for part in _parts(dataset))
    if kind is TensorDataset:
        return all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
    return kind in _DETERMINISTIC_TYPES or only_looks_up(dataset, indices)


def _by_part(dataset: ConcatDataset[Any], indices: Sequence[int]) -> dict[int, list[int]]:
    """The parts of a concatenated dataset that these indices lie in, each with its own indices."""
    found: dict[int, list[int]] = {}
    for index in indices:
        part, own = _part_of(dataset, index)
        found.setdefault(part, []).append(own)
    return found


def _part_of(dataset: ConcatDataset[Any], index: int) -> tuple[int, int]:
    """In which part of a concatenated dataset a sample is, and its index there."""
    position = index + len(dataset) if index < 0 else index
    part = bisect.bisect_right(dataset.cumulative_sizes, position)
    return part, position - (dataset.cumulative_sizes[part - 1] if part else 0)


# By method, with the code that it had: a reloaded module may have put other code into the same function.
_generator_takers: WeakKeyDictionary[Any, tuple[Any, bool]] = WeakKeyDictionary()


def _getitem_takes_generator(getitem: Callable[..., Any]) -> bool:
    code = getattr(getitem, "__code__", None)
    with contextlib.suppress(TypeError):  # no hash, or no weak references
        known = _generator_takers.get(getitem)
        if known is not None and known[0] is code:
            return known[1]
    try:
        parameter = inspect.signature(getitem).parameters.get("generator")
    except (TypeError, ValueError):  # written in C, without a readable signature
        parameter = None
    takes = parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    with contextlib.suppress(TypeError):
        _generator_takers[getitem] = code, takes
    return takes


def takes_generator(dataset: Any) -> bool:
    """Whether `dataset[index]` wants a `generator`; looks into torch's wrappers."""
    parts = _parts(dataset)
    return any(map(takes_generator, parts)) if parts else _getitem_takes_generator(type(dataset).__getitem__)


def _fetches_batches(dataset: Any) -> bool:
    """Whether `__getitems__` is the user's own; those of torch's wrappers hand on what they wrap."""
    if getattr(type(dataset), "__getitems__", None) in (Subset.__getitems__, StackDataset.__getitems__):
        return any(map(_fetches_batches, _parts(dataset)))
    return callable(getattr(dataset, "__getitems__", None))


def _reader(dataset: Any) -> Callable[[int, torch.Generator], Any]:
    """What reads a sample, and hands a generator to whichever dataset inside takes one."""
    if not _parts(dataset):
        if _getitem_takes_generator(type(dataset).__getitem__):
            return lambda index, generator: dataset.__getitem__(index, generator=generator)
        return lambda index, generator: dataset[index]
    if isinstance(dataset, Subset):
        read = _reader(dataset.dataset)
        return lambda index, generator: read(dataset.indices[index], generator)
    if isinstance(dataset, ConcatDataset):
        readers: dict[int, Callable[[int, torch.Generator], Any]] = {}  # of the parts that indices lie in

        def read_part(index: int, generator: torch.Generator) -> Any:
            part, own = _part_of(dataset, index)
            if part not in readers:
                readers[part] = _reader(dataset.datasets[part])
            return readers[part](own, generator)

        return read_part
    if isinstance(dataset.datasets, dict):
        named = {name: _reader(inner) for name, inner in dataset.datasets.items()}
        return lambda index, generator: {name: read(index, generator) for name, read in named.items()}
    each = [*map(_reader, dataset.datasets)]
    return lambda index, generator: tuple(read(index, generator) for read in each)


class SeededDataset:
    """A dataset that fetches one batch of one rank, seeded.

    Args:
        dataset: the user's.
        seed_samples: seed the process-wide generators before each sample, unless nothing can tell. A dataset with a
            `__getitems__` of its own (and no `generator`) fetches its batch in one go and is
            seeded once, from the key of the first sample.
        seed_collate: seed them before the batch is collated, from the same.
    """

    def __init__(self, dataset: Any, *, seed_samples: bool, seed_collate: bool) -> None:
        self.dataset = dataset
        self.seed_samples = seed_samples
        self.seed_collate = seed_collate
        self._takes_generator = takes_generator(dataset)
        self._fetches_batches = not self._takes_generator and _fetches_batches(dataset)

    def __getitems__(self, fetch: Fetch) -> list[Any]:
        samples = self._samples(fetch)
        if self.seed_collate:
            seed_global_rngs(derive_seed(b"collate", fetch.seed, fetch.epoch, fetch.keys[0]))
        return samples

    def _samples(self, fetch: Fetch) -> list[Any]:
        dataset, (seed, epoch, indices, keys) = self.dataset, fetch
        if self._fetches_batches:
            self._seed(seed, epoch, keys[0])
            fetched: list[Any] = dataset.__getitems__(indices)
            return fetched
        if not self._takes_generator and (not self.seed_samples or is_deterministic(dataset, indices)):
            samples = [dataset[index] for index in indices]
            if self.seed_samples and not self.seed_collate and not all(map(is_plain_sample, samples)):
                self._seed(seed, epoch, keys[-1])  # Objects with code of their own may draw when they are collated.
            return samples
        # All seeds at once: what runs seldom, between two samples, takes some times as long.
        seeds = derive_seeds(b"global", seed, epoch, keys) if self.seed_samples else [None] * len(indices)
        if self._takes_generator:
            return self._generated(seeds, derive_seeds(b"sample", seed, epoch, keys), indices)
        samples = []
        for index, value in zip(indices, seeds, strict=True):
            assert value is not None
            seed_global_rngs(value)
            samples.append(dataset[index])
        return samples

    def _generated(self, seeds: Sequence[int | None], own_seeds: Sequence[int], indices: Sequence[int]) -> list[Any]:
        """Samples of a dataset that takes a generator."""
        read = _reader(self.dataset)
        generator = torch.Generator()
        alone = sys.getrefcount(generator)
        samples = []
        for index, value, own in zip(indices, seeds, own_seeds, strict=True):
            if value is not None:
                seed_global_rngs(value)  # Not by the seed of its own generator: a dataset may draw from both.
            if sys.getrefcount(generator) != alone:  # The dataset has kept it, and may go on drawing from it.
                generator = torch.Generator()
            generator.manual_seed(own)
            samples.append(read(index, generator))
        return samples

    def _seed(self, seed: int, epoch: int, key: int) -> None:
        if self.seed_samples:
            seed_global_rngs(derive_seed(b"global", seed, epoch, key))


class TensorSource:
    """A `TensorDataset` under the default collate: whole batches by one gather per tensor.

    The same values as picking rows one by one and stacking them, without the Python object per
    row. Goes with `identity` for a collate function.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, fetch: Fetch) -> list[torch.Tensor]:
        rows = torch.tensor(fetch.indices, device="cpu")
        # A gather also for consecutive rows: a slice would alias the dataset, and a script that
        # normalises its batch in position would change the data.
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self.dataset.tensors]

    @staticmethod
    def fits(dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> bool:
        """Whether the two ways give the same batch."""
        return (
            type(dataset) is TensorDataset
            and collate_fn is default_collate
            and stacks_as_torch()
            and all(
                type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
                for tensor in dataset.tensors
            )
        )


def identity(batch: Any) -> Any:
    """The collate function of a source whose batches are collated already."""
    return batch


def make_source(
    dataset: Any, collate_fn: Callable[[list[Any]], Any], seed_global_rng: bool
) -> SeededDataset | TensorSource:
    """The source for a dataset: the gather where it fits, else one sample after the other."""
    if TensorSource.fits(dataset, collate_fn):
        return TensorSource(dataset)
    return SeededDataset(
        dataset,
        seed_samples=seed_global_rng,
        seed_collate=seed_global_rng and collate_fn is not default_collate,
    )


class WorkerInit:
    """Runs first in a worker: shows the user's dataset, then calls the user's `worker_init_fn`.

    `torch.utils.data.get_worker_info().dataset` is how a `worker_init_fn` reaches the worker's copy
    of the dataset. torch puts there what its fetcher holds, which is a source.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None, "called outside a worker"
        source: Any = info.dataset
        set_guarded(info, "dataset", source.dataset)  # the info is frozen
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
