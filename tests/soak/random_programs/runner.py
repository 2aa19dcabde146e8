"""Runs programs on ranks, and looks at what they leave behind."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from random import Random

import torch.distributed as dist

from lockstep import env
from lockstep.testing.limits import limit_s
from lockstep.testing.pool import run_ranks
from lockstep.topology import read_topology
from random_programs.rank import Usage, measure_usage, run_program

__all__ = ["Ledger", "command", "run_programs", "seeds_from", "soak"]

# A rank that waits this long for another, on a quiet machine, is stuck.
_STUCK_AFTER_S = 30.0
_RUN_DEADLINE_S = 90.0
# Programs of a process that count as early, after which caches are full, and what it may grow by afterwards. torch
# itself keeps something of each default group there ever was (`sys.excepthook`): 8 pieces of Python's memory measured.
_EARLY_PROGRAMS = 10
_MALLOC_TOLERANCE_KIB = 4 * 1024
_BLOCKS_TOLERANCE = 5_000
_BLOCKS_PER_PROGRAM = 40

_has_run_before = False  # in a rank: whether what is loaded and cached on first use is there


def seeds_from(seed: int, num_steps: int) -> list[int]:
    """The step seeds of a program that a single number stands for."""
    chance = Random(seed)
    return [chance.getrandbits(32) for _ in range(num_steps)]


def command(seeds: Sequence[int], world_size: int, backend: str = "lockstep") -> str:
    """What to type to run a program again."""
    which = "" if backend == "lockstep" else f" --backend {backend}"
    listed = ",".join(map(str, seeds))
    return f"python tests/soak/run.py --world-size {world_size}{which} --steps {listed}"


def soak(seeds: Sequence[int], world_size: int, backend: str = "lockstep") -> dict[int, Usage]:
    """Run one program on `world_size` ranks. Local: called once, not on every rank.

    Args:
        seeds: the program, a seed for each step.
        world_size: number of ranks.
        backend: for `init_process_group`.

    Returns:
        What each rank's process held after it, by pid.

    Raises:
        AssertionError: a result is wrong, a call raised or came to no end, or something was left behind. The message
            names the step, and the command that runs the program again.
    """
    try:
        outcomes = run_ranks(
            _on_rank, world_size, list(seeds), backend, backend=backend, init=False, timeout=limit_s(_RUN_DEADLINE_S)
        )
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise AssertionError(f"{text}\nTo see it again: {command(seeds, world_size, backend)}") from error
    return dict(outcomes)


def run_programs(seeds: Iterable[int], num_steps: int) -> None:
    """Run programs on this rank, started by anything, whose default group is there. Collective.

    Args:
        seeds: one for each program.
        num_steps: of each.

    Raises:
        AssertionError: a result is wrong, or a call raised; names the program and the step.
    """
    for seed in seeds:
        try:
            run_program(seeds_from(seed, num_steps))
        except AssertionError as error:
            raise AssertionError(f"program {seed}: {error}") from error
        dist.barrier()


def _on_rank(seeds: list[int], backend: str) -> tuple[int, Usage]:
    """On every rank: meet, run, leave, and see that nothing is left. Its pid and what it holds."""
    global _has_run_before
    before = measure_usage()
    _meet_and_run(seeds, backend)
    after = measure_usage()
    left = _left_behind(before, after) if _has_run_before else ""
    _has_run_before = True
    assert not left, f"rank {read_topology(env.snapshot()).rank} is left with {left} after {len(seeds)} steps"
    return os.getpid(), after


def _meet_and_run(seeds: list[int], backend: str) -> None:
    topology = read_topology(env.snapshot())
    folder = env.LOCKSTEP_RENDEZVOUS.get()
    assert folder is not None
    store = dist.FileStore(str(Path(folder) / "soak"), topology.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=limit_s(_STUCK_AFTER_S)),
    )
    try:
        run_program(seeds)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _left_behind(before: Usage, after: Usage) -> str:
    """What a process holds after a program and did not before it, in words."""
    more = list(after.descriptors)
    for name in before.descriptors:
        if name in more:
            more.remove(name)
    found = [f"open {name}" for name in more]
    if after.shared_maps > before.shared_maps:
        found.append(f"{after.shared_maps - before.shared_maps} maps of shared memory")
    if after.threads > before.threads:
        found.append(f"{after.threads - before.threads} threads")
    return ", ".join(found)


def _named_segments() -> set[str]:
    """Names of ours in the places where shared memory could be left."""
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {str(path) for folder in folders for path in folder.glob("lockstep-segment-*")}


class Ledger:
    """What the processes of many soaks held, to see at the end whether it grew.

    Attributes:
        num_programs: entered so far.
        num_steps: of all of them.
    """

    def __init__(self) -> None:
        self.num_programs = 0
        self.num_steps = 0
        self._usages: dict[int, list[Usage]] = {}
        self._named = _named_segments()

    def enter(self, num_steps: int, usages: Mapping[int, Usage]) -> None:
        """Take down what `soak` returned for a program."""
        self.num_programs += 1
        self.num_steps += num_steps
        for pid, usage in usages.items():
            self._usages.setdefault(pid, []).append(usage)

    def growth(self) -> dict[int, tuple[int, int]]:
        """How much more each process held in its last programs than in its early ones: KiB of C, blocks of Python."""
        return {
            pid: (_rise([one.malloc_kib for one in usages]), _rise([one.python_blocks for one in usages]))
            for pid, usages in self._usages.items()
            if len(usages) >= 2 * _EARLY_PROGRAMS
        }

    def check(self) -> None:
        """Raise AssertionError if memory has grown, or segments are left that have names."""
        for pid, (malloc_kib, blocks) in self.growth().items():
            assert malloc_kib < _MALLOC_TOLERANCE_KIB, f"process {pid} holds {malloc_kib} KiB more: {self}"
            limit = _BLOCKS_TOLERANCE + _BLOCKS_PER_PROGRAM * len(self._usages[pid])
            assert blocks < limit, f"process {pid} holds {blocks} pieces of memory more in Python: {self}"
        left = _named_segments() - self._named
        assert not left, f"segments are left: {sorted(left)}: {self}"

    def __str__(self) -> str:
        growth = self.growth().values()
        return (
            f"{self.num_programs} programs, {self.num_steps} steps; processes grew by "
            f"{max((malloc_kib for malloc_kib, _ in growth), default=0)} KiB and "
            f"{max((blocks for _, blocks in growth), default=0)} objects of Python at most"
        )


def _rise(values: Sequence[int]) -> int:
    return int(statistics.median(values[-_EARLY_PROGRAMS:]) - max(values[:_EARLY_PROGRAMS]))
