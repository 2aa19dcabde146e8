"""Runs conformance cases on ranks and reports on each.

All cases of a run share one call of `run_ranks` and one process group. After each case the ranks synchronize in a
mapped file (`progress.py`); if a case failed, each rank leaves the group and all create a new one, so that one failure
does not cause the next. If a rank died or hung, its case is reported as failed, and a new call continues with the next
case.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep import env
from lockstep.errors import InputError
from lockstep.testing.conformance import data_movement, ordering, point_to_point, reductions
from lockstep.testing.conformance.case import Case, Context, all_unique
from lockstep.testing.conformance.gaps import reason_to_skip
from lockstep.testing.conformance.progress import CaseProgress, create
from lockstep.testing.limits import limit_s
from lockstep.testing.pool import run_ranks
from lockstep.topology import read_topology

__all__ = ["CASES", "CaseResult", "Report", "run_conformance"]

CASES: tuple[Case, ...] = all_unique((*reductions.CASES, *data_movement.CASES, *point_to_point.CASES, *ordering.CASES))

# On a quiet machine.
_COLLECTIVE_TIMEOUT_S = 10.0
_TIMEOUT_S = 200.0
# How much later than this rank's another rank's error may come, as a multiple of the group's deadline.
_DEADLINES_OF_A_CASE = 3.0


@dataclass(frozen=True)
class CaseResult:
    """The result of one case.

    Attributes:
        name: name of the case.
        status: "passed", "failed" or "skipped".
        detail: the error of each failed rank, or the reason for skipping the case; else "".
        seconds: time on the slowest rank.
    """

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """The results of one run; `str()` is a table of all cases that did not pass."""

    backend: str
    world_size: int
    results: tuple[CaseResult, ...]

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The cases that failed."""
        return tuple(result for result in self.results if result.status == "failed")

    def __str__(self) -> str:
        counts = Counter(result.status for result in self.results)
        seconds = sum(result.seconds for result in self.results)
        lines = [
            f"{self.backend}, {self.world_size} ranks: {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['skipped']} skipped in {seconds:.1f} s"
        ]
        for result in self.failures:
            lines.append(f"FAILED  {result.name}")
            lines.extend(f"        {line}" for line in result.detail.splitlines())
        reasons = Counter(result.detail for result in self.results if result.status == "skipped")
        lines.extend(f"SKIPPED {count:3} cases for {reason}" for reason, count in sorted(reasons.items()))
        return "\n".join(lines)


def run_conformance(
    backend: str,
    world_size: int,
    *,
    cases: Sequence[Case] = CASES,
    register: str | None = None,
    skip_gaps: bool = True,
    collective_timeout: float | None = None,
    timeout: float | None = None,
    launch: Callable[..., list[Any]] = run_ranks,
) -> Report:
    """Run the cases on `world_size` new ranks. Local: called once, not on every rank.

    Args:
        backend: name for `init_process_group`.
        cases: the cases to run; those with a larger `min_world_size` are left out.
        register: a module to import on every rank, which registers the backend.
        skip_gaps: skip cases whose features `BACKEND_GAPS` lists for this backend.
        collective_timeout: the process group's deadline in seconds; by default 10 on a quiet machine, and more on a
            slow or busy one (`limit_s`).
        timeout: seconds for all cases together, by default 200 on a quiet machine; cases not reached count as failed.
        launch: starts the ranks, called like `run_ranks` with `init=False` and `expect_errors=True`; for backends whose
            ranks need a special launcher, which must be one that `lockstep.topology` recognises.
    """
    fitting = _fitting(cases, world_size)
    reasons = {one.name: reason_to_skip(one, backend) if skip_gaps else None for one in fitting}
    results = {name: CaseResult(name, "skipped", reason) for name, reason in reasons.items() if reason is not None}
    remaining = [one.name for one in fitting if one.name not in results]
    timeout_s = limit_s(_TIMEOUT_S) if timeout is None else timeout
    collective_timeout_s = limit_s(_COLLECTIVE_TIMEOUT_S) if collective_timeout is None else collective_timeout
    deadline = time.monotonic() + timeout_s
    while remaining:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            results |= {name: CaseResult(name, "failed", f"not reached within {timeout_s:g} s") for name in remaining}
            break
        new = _run_until_broken(launch, backend, world_size, remaining, register, collective_timeout_s, left_s)
        results |= {result.name: result for result in new}
        remaining = remaining[len(new) :]
    return Report(backend, world_size, tuple(results[one.name] for one in fitting))


def _fitting(cases: Sequence[Case], world_size: int) -> list[Case]:
    """The cases that need no more than `world_size` ranks."""
    fitting = [one for one in cases if one.min_world_size <= world_size]
    unknown = {one.name for one in fitting} - {one.name for one in CASES}
    if unknown:
        raise InputError(f"run_conformance runs cases of CASES, which the ranks look up by name; not {sorted(unknown)}")
    return fitting


def _run_until_broken(
    launch: Callable[..., list[Any]],
    backend: str,
    world_size: int,
    names: list[str],
    register: str | None,
    collective_timeout: float,
    timeout: float,
) -> list[CaseResult]:
    """Results from the first case on, up to and including one that broke a process; at least one."""
    folder = tempfile.mkdtemp(prefix="lockstep-conformance-")
    broken = ""
    try:
        create(os.path.join(folder, "progress"), world_size)
        outcomes = launch(
            _run_on_rank, world_size, backend, names, folder, register, collective_timeout,
            backend=backend, init=False, timeout=timeout, expect_errors=True,
        )  # fmt: skip
        broken = "\n".join(f"rank {rank}: {_said(one)}" for rank, one in enumerate(outcomes) if one is not None)
    except TimeoutError as error:
        broken = str(error)
    finally:
        journals = [_read_journal(os.path.join(folder, f"journal-{rank}")) for rank in range(world_size)]
        shutil.rmtree(folder, ignore_errors=True)
    finished = min(map(len, journals))
    results = [_merge(list(of_ranks)) for of_ranks in zip(*(journal[:finished] for journal in journals), strict=True)]
    if finished < len(names):
        results.append(CaseResult(names[finished], "failed", broken))
    return results


def _said(outcome: object) -> str:
    return f"{type(outcome).__name__}: {outcome}"


def _read_journal(path: str) -> list[CaseResult]:
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [CaseResult(**json.loads(line)) for line in file if line.endswith("\n")]


def _merge(of_ranks: list[CaseResult]) -> CaseResult:
    """Merge the results of all ranks into one."""
    said = {rank: result.detail for rank, result in enumerate(of_ranks) if result.status == "failed"}
    if len(said) == len(of_ranks) > 1 and len(set(said.values())) == 1:
        details = [f"all ranks: {said[0]}"]
    else:
        details = [f"rank {rank}: {detail}" for rank, detail in said.items()]
    status = "failed" if details else "passed"
    return CaseResult(of_ranks[0].name, status, "\n".join(details), max(result.seconds for result in of_ranks))


def _run_on_rank(backend: str, names: list[str], folder: str, register: str | None, collective_timeout: float) -> None:
    """On every rank: run the cases, writing a line to this rank's journal after each."""
    if register is not None:
        importlib.import_module(register)
    by_name = {one.name: one for one in CASES}
    topology = read_topology(env.snapshot())
    rank, world_size = topology.rank, topology.world_size
    progress = CaseProgress(os.path.join(folder, "progress"), rank, world_size)
    groups = _groups(backend, rank, world_size, folder, collective_timeout)
    next(groups)
    with open(os.path.join(folder, f"journal-{rank}"), "w", buffering=1) as journal:
        for number, name in enumerate(names):
            result = _run_case(by_name[name], Context(rank, world_size))
            any_failed = progress.finish(
                number, failed=result.status == "failed", deadline_s=_DEADLINES_OF_A_CASE * collective_timeout
            )
            journal.write(json.dumps(asdict(result)) + "\n")
            if any_failed:
                next(groups)
    groups.close()
    progress.close()


def _groups(
    backend: str, rank: int, world_size: int, folder: str, collective_timeout: float
) -> Generator[None, None, None]:
    """Yield default groups: each step destroys the previous one and creates a new one."""
    number = 0
    while True:
        store: Any = dist.FileStore(os.path.join(folder, f"store-{number}"), world_size)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=collective_timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        try:
            yield
        finally:
            dist.destroy_process_group()
        number += 1


def _run_case(one: Case, context: Context) -> CaseResult:
    started = time.perf_counter()
    try:
        one.check(context, **one.arguments)
    except Exception as error:
        if isinstance(error, AssertionError):
            detail = str(error)
        else:
            detail = "".join(traceback.format_exception_only(error)).strip() + _line_in_checks(error)
        return CaseResult(one.name, "failed", detail, time.perf_counter() - started)
    return CaseResult(one.name, "passed", "", time.perf_counter() - started)


def _line_in_checks(error: BaseException) -> str:
    """The line of the conformance suite through which an exception passed."""
    folder = os.path.dirname(__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
