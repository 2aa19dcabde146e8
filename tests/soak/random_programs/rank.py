"""A soak on one rank: runs a program, compares every result, and measures what is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import ClassVar

import torch
import torch.distributed as dist

from lockstep import libc
from lockstep.errors import CollectiveAborted, RankLost
from random_programs.operations import Operation, Place, Started
from random_programs.program import Call, Drop, Make, Step, Together, Wait, draw_program

__all__ = ["Usage", "measure_usage", "run_program"]

_THREAD_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Usage:
    """What a process holds.

    Attributes:
        descriptors: open files, by what they are.
        shared_maps: mapped pieces of shared memory.
        threads: of Python.
        malloc_kib: memory that C and C++ hold, tensors among it, in KiB.
        python_blocks: pieces of memory that Python holds.
    """

    descriptors: tuple[str, ...]
    shared_maps: int
    threads: int
    malloc_kib: int
    python_blocks: int


def measure_usage() -> Usage:
    """What this process holds now. Local."""
    gc.collect()
    names = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own, which listdir has closed
            # Without the number of a socket or pipe, which is new each time.
            names.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{name}")))
    with open("/proc/self/maps") as maps:
        shared = sum("memfd" in line or "/lockstep-segment-" in line for line in maps)
    return Usage(tuple(sorted(names)), shared, threading.active_count(), _live_malloc_kib(), sys.getallocatedblocks())


_MALLINFO = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _MALLINFO]


def _live_malloc_kib() -> int:
    """What is allocated and not free again, in all arenas, in KiB; 0 where glibc does not tell.

    The size of the process would not do: threads come and go here, each with an arena, and what is free in one stays.
    """
    ask = libc.function("mallinfo2")  # since glibc 2.33
    if ask is None:
        return 0
    ask.restype = _MallInfo
    info = ask()
    return int(info.uordblks + info.hblkhd) // 1024


def run_program(seeds: Sequence[int]) -> None:
    """Run a program on this rank, whose default group is there. Collective.

    Raises:
        AssertionError: a result is wrong, or a step raised what it should not; names the step.
    """
    # torch calls the tensor forms by other names from 2.13 on, and complains of ranks that are in no group.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    rank = _Rank()
    steps = draw_program(seeds, dist.get_world_size())
    for number, step in enumerate(steps):
        _say_where(f"step {number} of {len(steps)}, {step}", partial(rank.run, step))
    _say_where("the end", rank.finish)


def _say_where(place: str, act: Callable[[], None]) -> None:
    try:
        act()
    except (RankLost, CollectiveAborted):
        raise  # It follows from what another rank says better.
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise AssertionError(f"rank {dist.get_rank()} in {place}: {text}") from error


@dataclass(eq=False)
class _Pending:
    """A call that nobody has waited for yet."""

    call: Call
    started: Started


@dataclass
class _Rank:
    """One rank's state in a program."""

    rank: int = field(default_factory=dist.get_rank)
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    groups: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)
    pending: list[_Pending] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members[0] = tuple(range(dist.get_world_size()))
        self.groups[0] = None

    def run(self, step: Step) -> None:
        """One step."""
        match step:
            case Make(group, members):
                self.groups[group] = made = dist.new_group(list(members))
                self.members[group] = tuple(dist.get_process_group_ranks(made)) if self.rank in members else members
            case Drop(group):
                self._drop(group)
            case Call():
                self._call(step)
            case Together(calls):
                self._together(calls)
            case Wait(seed):
                self._wait_for_some(Random(f"{seed} {self.rank}"))

    def finish(self) -> None:
        """Wait for all that is under way, and leave all groups but the default one."""
        self._wait_for(self.pending)
        for group in [group for group in self.groups if group]:
            self._drop(group)

    def _call(self, call: Call) -> None:
        if self.rank not in self.members[call.group]:
            return
        started = call.operation.start(self._place(call.group), call.is_async)
        if call.is_async:
            self.pending.append(_Pending(call, started))
        else:
            self._check(call.operation, call.group, started)

    def _together(self, all_calls: Sequence[Sequence[Call]]) -> None:
        errors: list[BaseException] = []

        def run(calls: Sequence[Call]) -> None:
            try:
                for call in calls:
                    self._call(call)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(calls,)) for calls in all_calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_THREAD_DEADLINE_S)
            assert not thread.is_alive(), "a thread hangs"
        for error in errors:
            raise error

    def _wait_for_some(self, chance: Random) -> None:
        self._wait_for(chance.sample(self.pending, chance.randint(0, len(self.pending))))

    def _wait_for(self, chosen: Sequence[_Pending]) -> None:
        for one in list(chosen):
            if one.started.work is not None:
                one.started.work.wait()
                assert one.started.work.is_completed(), f"{one.call}: is_completed() is false after wait()"
            self.pending.remove(one)
            try:
                self._check(one.call.operation, one.call.group, one.started)
            except AssertionError as error:
                raise AssertionError(f"{one.call}, waited for here: {error}") from None

    def _drop(self, group: int) -> None:
        self._wait_for([one for one in self.pending if one.call.group == group])
        process_group = self.groups.pop(group)
        members = self.members.pop(group)
        if self.rank in members:
            assert process_group is not None
            # Otherwise those who still read what this rank has written would find it gone.
            dist.barrier(process_group)
            dist.destroy_process_group(process_group)

    def _place(self, group: int) -> Place:
        members = self.members[group]
        return Place(members.index(self.rank), members, self.groups[group])

    def _check(self, operation: Operation, group: int, started: Started) -> None:
        with torch.no_grad():
            operation.check(self.members[group].index(self.rank), started.results)
