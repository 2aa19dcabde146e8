"""Warns of a dataset, or of a collate function, that draws from a generator of its own.

The process-wide generators are seeded before each sample, a `random.Random(0)` or `torch.Generator()` that a dataset or
a transform holds is not. What a sample draws from it depends on how many samples this rank has fetched before, and so
on the number of ranks; what a collate function draws, on the batches that its process has made before. So the states of
what can be found in the first attributes are compared, and in what a function is bound to.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import numpy as np
import torch

from lockstep.data.worker_warnings import warn
from lockstep.log import get_logger

__all__ = ["OwnGenerators"]

_DEPTH = 4
_MOST_OBJECTS = 200
_MOST_ALIKE = 8  # of one type, in one list: those of samples are long

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_LEAVES = frozenset(map(id, (str, bytes, int, float, bool, dict, type(Path()))))

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
        if self._note(value, name) or not depth or id(value) in self._seen or len(self._seen) >= _MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if type(value) in (list, tuple):
            counts = Counter[type]()
            for index, item in enumerate(value[:_MOST_OBJECTS]):
                counts[type(item)] += 1
                if id(type(item)) not in _LEAVES and counts[type(item)] <= _MOST_ALIKE:
                    yield item, f"{name}[{index}]", depth - 1
        elif isinstance(value, MethodType | BuiltinMethodType):
            yield value.__self__, name, depth
        elif not isinstance(value, torch.Tensor | np.ndarray | type | str | bytes | int | float):
            for attribute, item in [*self._of_classes(value), *getattr(value, "__dict__", {}).items(), *_bound(value)]:
                yield item, f"{name}.{attribute}" if name else attribute, depth - 1

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
        """Generators that all objects of a class share, as MONAI's transforms do: by attribute."""
        found = []
        for kind in type(value).__mro__:
            if kind not in self._classes:
                self._classes.add(kind)
                found += [(name, item) for name, item in vars(kind).items() if isinstance(item, _GENERATORS)]
        return found


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
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()
    return repr(state)
