"""What the ranks of a soak do, step by step: drawn from seeds, the same on every rank.

A program is a list of step seeds. Each step is drawn from its own seed and from what the steps before it have left:
how many groups there are, how many calls are under way. So any part of a program is a program, which is what lets
hypothesis find the shortest that fails.

Ranks wait for calls under way in an order of their own. That cannot lock up: whatever a rank waits for, all ranks of
its group have started it, or are on their way to it in the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from random_programs.messages import AnySource, Batch, Letters, Messages
from random_programs.operations import COLLECTIVES, Operation

__all__ = ["Call", "Drop", "Make", "Step", "Together", "Wait", "draw_program"]

_MOST_GROUPS = 4
_TO_RANKS: tuple[type[Operation], ...] = (Messages, Messages, Batch, AnySource, Letters)


@dataclass(frozen=True)
class Make:
    """Make a group of some ranks."""

    group: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Drop:
    """Leave a group, after waiting for what is under way in it."""

    group: int


@dataclass(frozen=True)
class Call:
    """Start an operation in a group, and wait for it unless it is asynchronous."""

    group: int
    operation: Operation
    is_async: bool

    def __str__(self) -> str:
        return f"{'asynchronous ' * self.is_async}{self.operation} in group {self.group}"


@dataclass(frozen=True)
class Together:
    """Calls in two groups at a time, from a thread for each; ranks may be in both."""

    calls: tuple[tuple[Call, ...], tuple[Call, ...]]

    def __str__(self) -> str:
        return "; beside ".join(", then ".join(map(str, calls)) for calls in self.calls)


@dataclass(frozen=True)
class Wait:
    """Wait for some of the calls under way, on each rank for others."""

    seed: int


Step = Make | Drop | Call | Together | Wait


def draw_program(seeds: Sequence[int], world_size: int) -> list[Step]:
    """The steps of a program.

    Args:
        seeds: one for each step.
        world_size: ranks of the default group, which is group 0.
    """
    return _Drawing(world_size).steps(seeds)


class _Drawing:
    """Knows what groups there are while steps are drawn."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._groups = {0: tuple(range(world_size))}
        self._made = 0
        self._salt = 0

    def steps(self, seeds: Sequence[int]) -> list[Step]:
        return [self._step(Random(seed)) for seed in seeds]

    def _step(self, chance: Random) -> Step:
        dice = chance.random()
        if dice < 0.07 and len(self._groups) < _MOST_GROUPS:
            return self._make(chance)
        if dice < 0.11 and len(self._groups) > 1:
            group = chance.choice([index for index in self._groups if index])
            del self._groups[group]
            return Drop(group)
        if dice < 0.17 and len(self._groups) > 1:
            first, second = chance.sample(list(self._groups), 2)
            return Together((self._calls(chance, first), self._calls(chance, second)))
        if dice < 0.28:
            return Wait(chance.getrandbits(32))
        return self._call(chance, chance.choice(list(self._groups)), may_be_async=True)

    def _make(self, chance: Random) -> Make:
        members = chance.sample(range(self._world_size), chance.randint(1, self._world_size))
        self._made += 1
        self._groups[self._made] = tuple(members)
        return Make(self._made, tuple(members))

    def _calls(self, chance: Random, group: int) -> tuple[Call, ...]:
        return tuple(self._call(chance, group, may_be_async=False) for _ in range(chance.randint(1, 4)))

    def _call(self, chance: Random, group: int, *, may_be_async: bool) -> Call:
        world_size = len(self._groups[group])
        kinds = COLLECTIVES if world_size == 1 or chance.random() < 0.75 else _TO_RANKS
        self._salt += 1
        operation = chance.choice(kinds)(chance, world_size, self._salt)
        is_async = may_be_async and operation.has_async and chance.random() < 0.5
        return Call(group, operation, is_async)
