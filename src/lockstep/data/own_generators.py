"""Warns of a dataset, or of a collate function, that draws from a generator of its own.

The process-wide generators are seeded before each sample, a `random.Random(0)` or `torch.Generator()` that a dataset or
a transform holds is not. What a sample draws from it depends on how many samples this rank has fetched before, and so
on the number of ranks; what a collate function draws, on the batches that its process has made before. So the states of
what can be found in the first attributes are compared, and in what a function is bound to.

[Note: seeds of a worker] Others seed the process-wide generators by the number of their worker, when that fetches its
first sample (RAFT and what is built on it). It was the way to have other numbers in each worker; here that sample draws
what depends on who fetches it first. A dataset that seeds each sample by its index is as good as the loader.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lockstep.data.worker_warnings import warn
from lockstep.log import get_logger

__all__ = ["OwnGenerators", "OwnSeeds"]

_DEPTH = 7  # such as ConcatDataset.datasets[0].dataset.transform.transforms[0].rng
_MOST_OBJECTS = 400
_MOST_ALIKE = 8  # of one type, in one list or dictionary: transforms are few, records are many

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_LEAVES = (torch.Tensor, np.ndarray, type, str, bytes, int, float, PurePath, type(None))

_logger = get_logger(__name__)


class OwnGenerators:
    """Looks whether generators that something holds are drawn from. A context manager.

    Args:
        owner: any object.
        called: what a warning calls it.
        advice: the rest of the warning: what depends on what, and what to do.
    """

    def __init__(self, owner: Any, called: str, advice: str) -> None:
        self._called = called
        self._advice = advice
        self._found: dict[str, Any] = {}
        self._process_wide = _process_wide()
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        self._find(owner)

    def __enter__(self) -> OwnGenerators:
        self._before = {name: _state(one) for name, one in self._found.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        drawn = [name for name, one in self._found.items() if _state(one) != self._before[name]]
        if drawn and kind is None:
            warn(_logger, f"{self._called} draws from a generator of its own, {drawn[0]}: {self._advice}")

    def _find(self, owner: Any) -> None:
        """Breadth first: what is near counts more than what a long list holds."""
        waiting = deque([(owner, "", _DEPTH)])
        while waiting:
            waiting += self._look(*waiting.popleft())

    def _look(self, value: Any, name: str, depth: int) -> Iterator[tuple[Any, str, int]]:
        """Note a generator; of anything else, what is to be looked at next: value, name and depth."""
        if self._note(value, name) or not depth or isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        if len(self._seen) >= _MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if isinstance(value, MethodType | BuiltinMethodType):
            yield value.__self__, name, depth
            return
        for part, item in [*self._of_classes(value), *_parts(value)]:
            yield item, (name + part).removeprefix("."), depth - 1

    def _note(self, value: Any, name: str) -> bool:
        """Whether there is nothing to look for inside: a generator, noted unless it is a process-wide one, or a module.

        A module is nobody's own (`self.rng = random`), nor are the generators behind its functions.
        """
        if isinstance(value, random.SystemRandom | ModuleType) or any(value is one for one in self._process_wide):
            return True
        is_generator = isinstance(value, _GENERATORS)
        if is_generator:
            self._found[name] = value
        return is_generator

    def _of_classes(self, value: Any) -> list[tuple[str, Any]]:
        """Generators that all objects of a class share, as MONAI's transforms do: by how that is written."""
        found = []
        for kind in type(value).__mro__:
            if kind not in self._classes:
                self._classes.add(kind)
                found += [(f".{name}", item) for name, item in vars(kind).items() if isinstance(item, _GENERATORS)]
        return found


class OwnSeeds:
    """Looks whether a dataset seeds torch's generator once in each worker. See [Note: seeds of a worker].

    Args:
        called: what a warning calls the dataset.
    """

    def __init__(self, called: str) -> None:
        self._called = called
        self._begins_seeded: bool | None = None  # the first sample was; None before it

    def look(self, given: int) -> None:
        """A sample was fetched, behind `given` as torch's seed. Local."""
        info, now = get_worker_info(), torch.initial_seed()
        if info is None or self._begins_seeded is False:
            return
        if now != given:
            self._begins_seeded = now in (info.id, info.seed)
        elif self._begins_seeded:
            self._begins_seeded = False  # once is enough
            warn(
                _logger,
                f"{self._called} seeds torch's generator in the first sample that a worker fetches, so what is drawn "
                "for that sample depends on the number of ranks and workers. Leave that out: the loader seeds the "
                "process-wide generators of torch, numpy and random for each sample",
            )
        else:
            self._begins_seeded = False


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What may be found in it, and how that is written behind its name."""
    if type(value) in (list, tuple):
        return [(f"[{index}]", item) for index, item in _first_of_each_type(enumerate(value))]
    if isinstance(value, dict):
        items = _first_of_each_type(dict.items(value))
        return [(f"[{key!r}]" if isinstance(key, str | int) else "[…]", item) for key, item in items]
    return [(f".{name}", item) for name, item in [*getattr(value, "__dict__", {}).items(), *_bound(value)]]


def _first_of_each_type(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    counts = Counter[type]()
    for key, item in itertools.islice(items, _MOST_OBJECTS):
        counts[type(item)] += 1
        if counts[type(item)] <= _MOST_ALIKE:
            yield key, item


def _bound(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function is called with beside its arguments, by name: a partial's own, or names of an outer function."""
    if isinstance(function, functools.partial):
        yield "func", function.func
        yield "args", function.args
        yield from function.keywords.items()
    elif isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it has no value yet
                yield name, cell.cell_contents


def _process_wide() -> tuple[Any, ...]:
    """The generators that the loader seeds before each sample."""
    python, numpy = getattr(random.random, "__self__", None), getattr(np.random.random_sample, "__self__", None)
    return python, numpy, torch.default_generator


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.get_state(legacy=False))
