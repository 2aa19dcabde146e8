"""Lets what the samples of torch's loaders draw depend on their indices alone, on N ranks as on one process.

A dataset draws while it makes a sample; a collate function draws for all rows of a batch at once (the masked words of a
language model). Each is seeded by the index of the sample: the latter by drawing row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.seeding import derive_seed, preserve_global_rngs, seed_global_rngs
from lockstep.data.source import SampleSource, TensorSource
from lockstep.tools.verify.draws import PERMUTATIONS, is_draw

__all__ = ["fetch_by_sample"]


def fetch_by_sample(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The fetch function of torch's loaders, also in workers. Lockstep's loader draws by sample anyway."""

    def fetch(fetcher: Any, index: Any) -> Any:
        dataset, collate = fetcher.dataset, fetcher.collate_fn
        if isinstance(dataset, SampleSource | TensorSource):
            return original(fetcher, index)
        try:
            with preserve_global_rngs():
                fetcher.dataset = _BySample(dataset)
                if isinstance(index, list):
                    fetcher.collate_fn = functools.partial(_collate_by_sample, collate, index)
                return original(fetcher, index)
        finally:
            fetcher.dataset, fetcher.collate_fn = dataset, collate

    return fetch


def _seed(index: Any, count: int = 0) -> None:
    seed_global_rngs(derive_seed(b"verify", count, 0, crc32(repr(index).encode())))


class _BySample:
    """A dataset whose samples' draws, from the process's generators, depend only on their index."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        _seed(index)
        return self._dataset[index]


def _collate_by_sample(collate: Callable[[Any], Any], indices: Sequence[Any], samples: Any) -> Any:
    with _RowsBySample(indices):
        return collate(samples)


class _RowsBySample(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Repeats draws of torch with one row per sample, row by row.

    Args:
        indices: the indices of the samples.
    """

    def __init__(self, indices: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._indices = indices
        self._count = 0  # of draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, rows = kwargs or {}, len(self._indices)
        result = func(*args, **kwargs)
        if not is_draw(func) or not isinstance(result, Tensor) or kwargs.get("generator") is not None:
            return result
        self._count += 1
        if result.ndim and result.size(0) == rows and not func.overloadpacket.__name__.startswith(PERMUTATIONS):
            for row, index in enumerate(self._indices):
                _seed(index, self._count)
                part = func(*(_of_row(each, row, rows) for each in args), **kwargs)
                result[row : row + 1] = part
        return result


def _of_row(value: Any, row: int, rows: int) -> Any:
    """An argument of a draw of one row: its part of a tensor, or a shape with one row."""
    if isinstance(value, Tensor):
        return value[row : row + 1] if value.ndim and value.size(0) == rows else value
    is_shape = isinstance(value, list | tuple) and len(value) > 0 and value[0] == rows
    return [1, *value[1:]] if is_shape else value
