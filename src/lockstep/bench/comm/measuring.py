"""Runs in the ranks: checks and times every verb at every size on every backend, in the same rounds.

All calls share two buffers per dtype, of the largest size, so that memory does not limit the number of
measurements and no backend has warmer memory than another. Buffers are zero during timing: sums of them
stay zero; anything else would overflow.

A backend that does not support an operation raises on the first call, on all ranks, and is skipped with that reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.distributed as dist

import lockstep
import lockstep.comm.backend  # registers the backend
from lockstep.bench.comm.verbs import DTYPES, VERBS, Verb, VerbContext, count_wrong, fill_inputs, parameters_of
from lockstep.bench.harness import Budget, Configuration, Contestant, agree_on_maximum, measure
from lockstep.bench.ranks import Job, tell
from lockstep.bench.results import Parameters, Series

__all__ = ["Buffers", "Call", "check_call", "measure_on_rank", "prepare"]

_CHECKS_BEFORE, _CHECKS_AFTER = 2, 1
_SHARE_TO_MEASURE = 0.6  # of the time left after the first checks
_OVERTIME_S = 10.0  # for the last checks, which find what repetitions have broken
_LATE_S = 0.02  # delay of one rank, in the check of a barrier
_TORCH_NAMES = {"mpi": "mpi4py"}  # torch's name of a backend, if different
_REASON_LENGTH = 160


class Buffers:
    """Two flat buffers of each dtype, views of the same bytes, on one device; initially zero.

    Args:
        num_bytes: bytes of each buffer.
        device: cpu or cuda.
    """

    def __init__(self, num_bytes: int, device: str) -> None:
        rounded = -(-num_bytes // 64) * 64
        self._bytes = [torch.zeros(rounded, dtype=torch.uint8, device=device) for _ in range(2)]

    def take(self, verb: Verb, count: int, dtype: torch.dtype, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that a call sends and receives; the same tensor twice if it works in place."""
        send, recv = (data.view(dtype) for data in self._bytes)
        send_numel = count * (world_size if verb.sends_parts else 1)
        recv_numel = count * (world_size if verb.receives_parts else 1)
        return (recv[:recv_numel] if verb.in_place else send[:send_numel]), recv[:recv_numel]

    def clear(self) -> None:
        """Set all buffers to zero."""
        for data in self._bytes:
            data.zero_()


@dataclass
class Call:
    """A call of a verb on a backend.

    Attributes:
        backend: its name in the results.
        verb: the verb to call.
        context: the calling rank and its group.
        send, recv: its buffers.
        count: number of elements, as in [Note: sizes and bandwidths] in `columns.py`.
        run: makes the call.
        settle: waits until it is done.
        wrong: number of wrong elements, over all checks and ranks; None before the first check.
    """

    backend: str
    verb: Verb
    context: VerbContext
    send: torch.Tensor
    recv: torch.Tensor
    count: int
    run: Callable[[], object] = field(init=False)
    settle: Callable[[], object] | None = None
    wrong: int | None = None

    def __post_init__(self) -> None:
        self.run = self.verb.bind(self.context, self.send, self.recv)


def check_call(call: Call, seed: int, meeting: dist.ProcessGroup | None) -> int:
    """Make a call once and count wrong elements on all ranks. Collective; leaves its buffers zero.

    Args:
        call: the call.
        seed: seed of the values; different each time.
        meeting: a gloo group of all ranks.

    Returns:
        Number of elements that differ from those of one process; for a barrier, of ranks that left too early.
    """
    if call.verb.name == "barrier":
        return _check_barrier(call, seed, meeting)
    context = call.context
    call.recv.fill_(77)
    fill_inputs(call.send, context.rank, context.world_size, seed)
    call.run()
    if call.settle is not None:
        call.settle()
    pieces = call.verb.pieces(context.world_size, context.rank, call.count)
    op = context.op if call.verb.reduces else "sum"
    wrong = count_wrong(call.recv, pieces, call.count, op, context.world_size, seed)
    call.send.zero_()
    call.recv.zero_()
    return _sum_of_ranks(wrong, meeting)


def _check_barrier(call: Call, seed: int, meeting: dist.ProcessGroup | None) -> int:
    """Check a barrier with one rank that is late, a different one each time. Ranks share a host's clock."""
    context = call.context
    dist.barrier(meeting)
    if context.rank == seed % context.world_size:
        time.sleep(_LATE_S)
    came = time.monotonic()
    call.run()
    if call.settle is not None:
        call.settle()
    went = time.monotonic()
    return _sum_of_ranks(int(went < agree_on_maximum([came], meeting)[0]), meeting)


def _sum_of_ranks(value: int, meeting: dist.ProcessGroup | None) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total, group=meeting)
    return int(total)


def prepare(
    verb: Verb,
    count: int,
    dtype: torch.dtype,
    op: str,
    groups: Mapping[str, tuple[dist.ProcessGroup, Buffers, Callable[[], object] | None]],
    meeting: dist.ProcessGroup | None,
) -> tuple[list[Call], dict[str, str]]:
    """Create the call of each backend, and make it once. Collective.

    Args:
        count: number of elements.
        dtype: dtype of the elements.
        op: name of the reduction.
        groups: backend -> its group, its buffers, and a function that waits for its calls.
        meeting: a gloo group of all ranks.

    Returns:
        The calls, and the reasons why other backends cannot make them.
    """
    calls: list[Call] = []
    reasons: dict[str, str] = {}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if verb.messages > 1 and world_size < 2:
        return [], dict.fromkeys(groups, "needs two ranks")
    for backend, (group, buffers, settle) in groups.items():
        send, recv = buffers.take(verb, count, dtype, world_size)
        reason = ""
        try:
            call = Call(backend, verb, VerbContext(group, rank, world_size, op), send, recv, count, settle=settle)
            call.run()
            if settle is not None:
                settle()
        except (RuntimeError, ValueError, TypeError, NotImplementedError, lockstep.LockstepError) as error:
            reason = " ".join(str(error).split())[:_REASON_LENGTH]
        if agree_on_maximum([float(bool(reason))], meeting)[0]:
            reasons[backend] = reason or "it failed on another rank"
        else:
            calls.append(call)
    return calls, reasons


@dataclass
class _Item:
    """Calls that are measured together."""

    parameters: Parameters
    calls: list[Call]


def measure_on_rank(job: Job) -> object:
    """The function of each rank. The default group is gloo.

    Args:
        job: `verbs`, `sizes_bytes`, `dtypes`, `op`, `backends`, `check`, `seconds`, `quick`.

    Returns:
        `complete`: whether there was time for everything.
    """
    started = time.monotonic()
    seconds = job["seconds"]
    assert isinstance(seconds, float)

    def left_s() -> float:
        return seconds - (time.monotonic() - started)

    items = _items(job)
    configurations = [
        Configuration(item.parameters, [Contestant(call.backend, call.run, call.settle) for call in item.calls])
        for item in items
    ]
    checks = _Checks(items, is_on=bool(job["check"]))
    checks.run(_CHECKS_BEFORE, lambda: left_s() - _SHARE_TO_MEASURE * seconds)
    by_parameters = {tuple(item.parameters.items()): item for item in items}
    done: set[tuple[object, ...]] = set()

    def report(found: list[Series]) -> None:
        key = tuple(found[0].parameters.items())
        done.add(key)
        tell({"series": [asdict(one) for one in _with_facts(found, by_parameters[key])], "done": len(done)})

    budget = _budget(left_s(), len(items), quick=bool(job["quick"]))
    series = measure(configurations, budget, left_s=left_s, report=report)
    checks.run(_CHECKS_AFTER, lambda: left_s() + _OVERTIME_S)
    for one in series:
        tell({"series": [asdict(found) for found in _with_facts([one], by_parameters[tuple(one.parameters.items())])]})
    return {"complete": len(done) == len(items)}


def _budget(left_s: float, num_items: int, *, quick: bool) -> Budget:
    """Keeps a third of the time for calibration, and for calls that take longer than planned."""
    if quick:
        return Budget(seconds=0.02, sample_s=0.002, min_rounds=2, max_rounds=3, sweeps=1)
    seconds = max(0.0, 0.6 * left_s / max(1, num_items))
    return Budget(seconds=seconds, sample_s=min(0.01, seconds / 10), min_rounds=3, max_rounds=40, sweeps=2)


def _items(job: Job) -> list[_Item]:
    """Every verb at every size and dtype; small sizes first, so that a run cut short has some of each verb."""
    sizes, names, dtypes, op = job["sizes_bytes"], job["verbs"], job["dtypes"], job["op"]
    assert isinstance(sizes, list)
    assert isinstance(names, list)
    assert isinstance(dtypes, list)
    assert isinstance(op, str)
    groups = _groups(job)
    n = dist.get_world_size()
    items, known = [], set()
    for size_bytes in sizes:
        for verb in map(VERBS.__getitem__, names):
            for dtype_name in dtypes if verb.name != "barrier" else dtypes[:1]:
                dtype = DTYPES[dtype_name]
                count = verb.count(size_bytes, dtype.itemsize, n)
                parameters = parameters_of(verb, count, dtype_name, op, n)
                key = tuple(parameters.items())
                if key in known:
                    continue  # two sizes below the smallest of this verb
                known.add(key)
                calls, reasons = prepare(verb, count, dtype, op, groups, None)
                tell({"skipped": [[backend, reason, parameters] for backend, reason in reasons.items()]})
                if calls:
                    items.append(_Item(parameters, calls))
    tell({"items": len(items)})
    return items


def _groups(job: Job) -> dict[str, tuple[dist.ProcessGroup, Buffers, Callable[[], object] | None]]:
    """A group per backend, with buffers on its device. Collective."""
    sizes, backends = job["sizes_bytes"], job["backends"]
    assert isinstance(sizes, list)
    assert isinstance(backends, list)
    num_bytes = max(max(sizes), 8 * dist.get_world_size())
    on: dict[str, Buffers] = {}
    groups: dict[str, tuple[dist.ProcessGroup, Buffers, Callable[[], object] | None]] = {}
    for backend in backends:
        device = "cuda" if backend == "nccl" else "cpu"
        if device == "cuda":
            torch.cuda.set_device(dist.get_rank())
        if device not in on:
            on[device] = Buffers(num_bytes, device)
        group = dist.new_group(backend=_TORCH_NAMES.get(backend, backend))
        assert isinstance(group, dist.ProcessGroup)
        groups[backend] = (group, on[device], torch.cuda.synchronize if device == "cuda" else None)
    return groups


class _Checks:
    """Checks of all calls, if enabled.

    Args:
        items: the measured items.
        is_on: whether checks are enabled.
    """

    def __init__(self, items: Sequence[_Item], *, is_on: bool) -> None:
        self._calls = [call for item in items for call in item.calls] if is_on else []
        self._seed = 0

    def run(self, times: int, left_s: Callable[[], float]) -> None:
        """Check all calls, until there is no time left. Collective."""
        for _ in range(times):
            for call in self._calls:
                if agree_on_maximum([-left_s()])[0] >= 0:
                    return
                self._seed += 1
                call.wrong = (call.wrong or 0) + check_call(call, self._seed, None)


def _with_facts(series: Sequence[Series], item: _Item) -> list[Series]:
    """The series of a configuration, in seconds per message, with the results of the checks."""
    wrong = {call.backend: call.wrong for call in item.calls}
    messages = item.calls[0].verb.messages
    found = []
    for one in series:
        count = wrong[one.contestant]
        facts: dict[str, float | str | list[float]] = {} if count is None else {"wrong": count}
        found.append(replace(one, samples_s=[sample / messages for sample in one.samples_s], facts=facts))
    return found
