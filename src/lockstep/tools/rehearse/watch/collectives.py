"""Collectives: which ones this rank called, and how the reduced values were used.

Records
* `sequence`, per group (its name and `ranks`): `calls` is a list of [index into `texts`, index into `lines`], in order;
* `reduced`, per line that reduces: `instances`; `reads`, how many of their results were read; `root`, the rank
  that gets the result, None for all; `means`, for each call whose result was divided by the number of ranks:
  [number of the call, samples in this rank's batch, samples of the pass so far, whether the pass had ended]; and
  `divided_at`, the lines that divided results by any number;
* `burst`: several reductions of single numbers in a row, none of them read before the next: `reductions`,
  `barrier`, `times`.

[Note: reads] A reduced value's storage carries a tag. Scaling (in place or not), views and copies pass the tag on;
every other operator, `.item()`, `.tolist()`, NumPy and pickling are reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep.comm.callsite import is_users
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.tools.rehearse.devices.marks import note_on, storage_of
from lockstep.tools.rehearse.devices.mode import observers
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.patching import wrap, wrap_everywhere
from lockstep.tools.rehearse.sites import chain, is_own_file, site
from lockstep.tools.rehearse.watch import passes, training
from lockstep.tools.rehearse.watch.recorder import recorder

__all__ = ["Reduced", "install", "saw_reduction"]

_TAG = "_lockstep_reduced"
_FAMILY = "lockstep-rehearsal-family"
_MAX_CALLS = 20_000
_MAX_INSTANCES = 500
_MAX_DIVISIONS = 50
_MAX_SCALARS = 4  # such as a loss, a sum and a count
_MAX_METRICS = 16  # more may be data that the run need not read, such as parameters or a benchmark's payload

_SCALINGS = frozenset({"aten::mul", "aten::mul_", "aten::div", "aten::div_", "aten::neg", "aten::neg_"})
_COPIES = frozenset(
    {"aten::clone", "aten::_to_copy", "aten::detach", "aten::alias", "aten::view", "aten::lift_fresh", "aten::squeeze"}
    | {"aten::unsqueeze", "aten::reshape", "aten::_unsafe_view", "aten::detach_", "aten::_reshape_alias"}
)


class Reduced:
    """One line that reduces.

    Attributes:
        sites: the line, and the lines that called it.
        root: the rank that gets the result; None for all.
        calls: number of calls from this line.
        instances: number of calls whose result a script is expected to read.
        reads: how many of these results were read.
        means: results divided by the number of ranks; see `reduced` in the module's docstring.
        divided_at: the lines that divided results by any number.
    """

    def __init__(self, sites: tuple[Site, ...], root: int | None) -> None:
        self.sites = sites
        self.root = root
        self.calls = self.instances = self.reads = 0
        self.means: list[list[Any]] = []
        self.divided_at: set[Site] = set()


class _Tag:
    """Tag of one result, shared by its copies and views."""

    def __init__(self, line: Reduced, world_size: int, is_trivial: bool) -> None:
        self.line = line
        self.moment = [line.calls, *_moment()]
        self.world_size = world_size
        self.is_trivial = is_trivial
        self.is_read = self.is_mean = False
        line.calls += 1
        line.instances += not is_trivial

    def read(self) -> None:
        if not self.is_read:
            self.is_read = True
            self.line.reads += not self.is_trivial

    def divide(self, factor: float, *, by: bool) -> None:
        wanted = self.world_size if by else 1 / self.world_size
        if self.is_mean or self.world_size == 1:
            return
        if len(self.line.divided_at) < _MAX_DIVISIONS:
            self.line.divided_at.update(chain(1))
        if abs(factor - wanted) < 1e-9:
            self.is_mean = True
            if len(self.line.means) < _MAX_INSTANCES:
                self.line.means.append(self.moment)


_lines: dict[tuple[tuple[Site, ...], int | None], Reduced] = {}
# The sequences, and their distinct texts and lines, which they refer to by index.
_sequences: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
_texts: dict[str, int] = {}
_sites: dict[tuple[str, int, str], int] = {}
_described: dict[Any, str] = {}


def _moment() -> list[Any]:
    now = passes.current()
    return [-1, -1, False] if now is None else [now.last_size, now.samples, now.is_finished]


def saw_reduction(
    tensor: torch.Tensor, world_size: int, root: int | None, *, is_mean: bool, is_trivial: bool = False
) -> None:
    """Track from now on whether the result of a reduction is read. Local.

    Args:
        tensor: the result of the collective.
        world_size: number of ranks in the group.
        root: the rank that gets it; None for all.
        is_mean: whether it is already a mean over ranks.
        is_trivial: whether it is fine not to read it.
    """
    sites = chain()
    is_trivial = is_trivial or tensor.numel() > _MAX_METRICS
    tag = _Tag(_lines.setdefault((sites, root), Reduced(sites, root)), world_size, is_trivial)
    if is_mean:
        tag.divide(world_size, by=True)
    storage = storage_of(tensor)
    if storage is not None:
        note_on(storage, _TAG, tag)
        _bursts.add(tag, tensor, sites)


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return None


def _observe(func: Any, args: Sequence[Any], result: Any) -> None:
    """Called after every operator. See [Note: reads]."""
    if not _lines:
        return
    name = func._schema.name
    for position, argument in enumerate(args):
        values = argument if isinstance(argument, list | tuple) else (argument,)
        for value in values:
            if not isinstance(value, torch.Tensor):
                continue
            tag: _Tag | None = getattr(storage_of(value), _TAG, None)
            if tag is not None and not _carry_on(tag, name, position, args, result):
                tag.read()


def _carry_on(tag: _Tag, name: str, position: int, args: Sequence[Any], result: Any) -> bool:
    """Pass the tag on to the result if the operator only scales or copies; return whether it does."""
    if position != 0 or not isinstance(result, torch.Tensor):
        return False
    if name in _SCALINGS:
        factor = _number(args[1]) if len(args) > 1 else 1.0
        if factor is None:
            return False
        if name.startswith("aten::div"):
            tag.divide(factor, by=True)
        elif name.startswith("aten::mul"):
            tag.divide(factor, by=False)
    elif name not in _COPIES:
        return False
    note_on(storage_of(result), _TAG, tag)
    return True


def _reads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method that reads a tensor without an operator."""

    def look(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tag: _Tag | None = getattr(storage_of(self), _TAG, None)
        if tag is not None:
            tag.read()
        return original(self, *args, **kwargs)

    return look


class _Bursts:
    """Counts runs of consecutive reductions of single numbers, none of which is read before the next."""

    def __init__(self) -> None:
        self.counts: dict[tuple[tuple[Site, ...], int, bool], int] = {}
        self._run: list[tuple[_Tag, Any, tuple[Site, ...]]] = []
        self._barrier: tuple[Site, ...] | None = None

    def add(self, tag: _Tag, tensor: torch.Tensor, sites: tuple[Site, ...]) -> None:
        if tensor.numel() > _MAX_SCALARS:
            self.end()
            return
        form = (tensor.dtype, tag.world_size, tag.line.root)
        if self._run and (self._run[0][1] != form or any(one.is_read for one, _, _ in self._run)):
            self.end()
        self._run.append((tag, form, sites))

    def add_barrier(self, sites: tuple[Site, ...]) -> None:
        self.end()
        self._barrier = sites

    def end(self) -> None:
        number, barrier = len(self._run), self._barrier
        if number >= 3 or (barrier is not None and number >= 2):
            first = barrier if barrier is not None else self._run[0][2]
            key = (first, number, barrier is not None)
            self.counts[key] = self.counts.get(key, 0) + 1
        self._run.clear()
        self._barrier = None


_bursts = _Bursts()


def _looks_like_barrier(tensor: torch.Tensor) -> bool:
    """Whether a reduction is of a single 0 or 1, as used to synchronize ranks; its result need not be read."""
    return tensor.numel() == 1 and tensor.detach().to(torch.float64).item() in (0.0, 1.0)


def _reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    is_rooted = original.__name__ == "reduce"

    def reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            not is_users(sys._getframe(1).f_code)
            or not isinstance(tensor, torch.Tensor)
            or tensor.layout is not torch.strided
        ):
            return original(tensor, *args, **kwargs)
        words = list(args)
        root = (words.pop(0) if words else kwargs.get("dst")) if is_rooted else None
        op = words[0] if words else kwargs.get("op", dist.ReduceOp.SUM)
        group = words[1] if len(words) > 1 else kwargs.get("group")
        is_trivial = tensor.numel() == 1 and _looks_like_barrier(tensor)
        result = original(tensor, *args, **kwargs)
        if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and tensor.is_floating_point():
            is_mean = op == dist.ReduceOp.AVG
            saw_reduction(tensor, dist.get_world_size(group), root, is_mean=is_mean, is_trivial=is_trivial)
        return result

    return reduce


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    def barrier(*args: Any, **kwargs: Any) -> Any:
        if is_users(sys._getframe(1).f_code):
            _bursts.add_barrier(chain())
        return original(*args, **kwargs)

    return barrier


def _own_line(line: tuple[str, int, str]) -> tuple[str, int, str]:
    """The line itself if it is the user's, else the user's line that led to it."""
    own = None if is_own_file(line[0]) else site()
    return line if own is None else (own.file, own.line, own.function)


def _enter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `FlightRecorder.enter`, which every collective calls before it waits, also those of the shims."""

    def enter(self: Any, key: Any, describe: Callable[[], str], line: Any, *rest: Any) -> Any:
        calls = _sequences.setdefault((self.group_name, self.global_ranks), [])
        if len(calls) < _MAX_CALLS:
            text = _described.get(key)
            if text is None:
                text = _described[key] = describe()
            calls.append((_texts.setdefault(text, len(_texts)), _sites.setdefault(_own_line(line), len(_sites))))
        return original(self, key, describe, line, *rest)

    return enter


def _join(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        names = ("backend", "init_method", "timeout", "world_size", "rank")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        recorder.note("init", chain(), world_size=str(given.get("world_size", "")))
        result = original(*args, **kwargs)
        recorder.rank, recorder.world_size, recorder.joined = dist.get_rank(), dist.get_world_size(), True
        _agree_on_family()
        return result

    return init_process_group


def _agree_on_family() -> None:
    """Adopt the family name of rank 0, for ranks of one group that were spawned by several processes, one per node."""
    store = distributed_c10d._get_default_store()
    if store is not None and recorder.rank == 0:  # MPI groups have no store.
        store.set(_FAMILY, recorder.family)
    elif store is not None and recorder.family:
        recorder.family = store.get(_FAMILY).decode() or recorder.family


def _finish() -> None:
    _bursts.end()
    for line in _lines.values():
        recorder.note(
            "reduced",
            line.sites,
            instances=line.instances,
            reads=line.reads,
            root=line.root,
            means=line.means,
            divided_at=[one.dump() for one in sorted(line.divided_at)],
        )
    for (sites, number, has_barrier), times in _bursts.counts.items():
        recorder.note("burst", sites, reductions=number, barrier=has_barrier, times=times)
    for (group, ranks), calls in _sequences.items():
        recorder.note("sequence", (), group=group, ranks=ranks, calls=calls, texts=list(_texts), lines=list(_sites))


def install() -> None:
    """Watch torch.distributed, and every collective of a Lockstep group."""
    for name, make in (
        ("all_reduce", _reduction),
        ("reduce", _reduction),
        ("barrier", _barrier),
        ("init_process_group", _join),
    ):
        wrap_everywhere(distributed_c10d, name, make)
    for name in ("numpy", "tolist", "__array__", "__reduce_ex__"):
        wrap(torch.Tensor, name, _reads)
    wrap(FlightRecorder, "enter", _enter)
    observers.append(_observe)
    passes.on_batch(_bursts.end)
    training.on_step(_bursts.end)
    recorder.finishers.append(_finish)
