"""The flight record of torch's own groups (gloo, nccl, …), for the launcher.

Such groups have no flight record that others could read, and do not ask for one: their errors say that a rank is
late, not which. Under our launcher every rank writes into its status file (`lockstep.rank_status`) which collective it
enters, from which line; when one of them times out or is killed, the launcher compares and names the missing ranks.

[Note: where the record is taken] Python calls the verbs of a group as methods of torch's class `ProcessGroup`, and
waits by its class `Work`. Those methods are wrapped, on the classes, once. That sees what `torch.distributed`, our
engine, FSDP2 and scripts do, and changes nothing of what the group does: arguments, results and errors pass through
untouched. They do not see what C++ calls by itself, which is the reducer of torch's DDP; its forward pass is recorded
instead, and from torch 2.14 on its collectives too (`native_calls.py`).

Rejected: a group of our own around torch's, which DDP's reducer would go through, but which would have to stand for
nccl's streams, coalescing, splitting and aborts too; TORCH_DISTRIBUTED_DEBUG=DETAIL, which meets before every
collective; torch's own flight recorder, which a rank that was killed cannot dump.

For nccl a call counts as over when a stream waits for it, not when the GPU is through. That path is written and has not
run on a GPU yet.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from lockstep import env, rank_status
from lockstep.comm import native_calls
from lockstep.comm.callsite import CallSite, call_site, site_text
from lockstep.comm.wording import describe_group, describe_tensor
from lockstep.rank_status import CALL, FINISHED, NUMBER, RING, SITE, START
from lockstep.torch_private.patching import patch, wrap

__all__ = ["register"]

# Names of one verb in different releases of torch are all there is in that release.
_VERBS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "gather": "gather",
    "gather_single": "gather",
    "gather_into_tensor": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
}
_MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
_DDP = "torch's DistributedDataParallel"
_CLASSES = "torch._C._distributed_c10d"
_C10D = "torch.distributed.distributed_c10d"


class _GroupRecord:
    """What this rank does in one group of torch's.

    Args:
        name: how messages call the group.
    """

    def __init__(self, name: str) -> None:
        self._status = rank_status.open_section(name)
        self._calls: dict[str, int] = {}
        self._sites: dict[CallSite, int] = {}
        self._lock = threading.Lock()

    def enter(self, text: str, site: CallSite) -> int:
        """Record that this rank calls something; returns the number of the call."""
        status = self._status
        with self._lock:
            number = status.words[NUMBER] + 1
            offset = 2 * (number & 1)
            status.words[CALL + offset] = self._index(self._calls, text, status.write_call, text)
            status.words[SITE + offset] = self._index(self._sites, site, status.write_site, site_text(site))
            status.times[START] = time.perf_counter()
            status.words[NUMBER] = number
        return number

    def _index(self, known: dict[Any, int], key: Any, write: Callable[[int, str], None], text: str) -> int:
        """The index of the text in its ring. A full ring starts again: only the latest call needs its texts."""
        index = known.get(key)
        if index is None:
            if len(known) == RING:
                known.clear()
            index = known[key] = len(known)
            write(index, text)
        return index

    def finish(self, number: int) -> None:
        """Record that this rank has come out of that call, and so of all before it."""
        with self._lock:
            self._status.words[FINISHED] = max(self._status.words[FINISHED], number)

    def publish_waiting(self, text: str) -> None:
        """Record which message this rank waits for; empty for none."""
        self._status.publish_waiting(text)


_records: WeakKeyDictionary[Any, _GroupRecord] = WeakKeyDictionary()
_numbers: WeakKeyDictionary[Any, tuple[_GroupRecord, int]] = WeakKeyDictionary()
_messages: WeakKeyDictionary[Any, tuple[_GroupRecord, str]] = WeakKeyDictionary()
_passes: list[_GroupRecord] = []
_module: ModuleType | None = None


def register(module: ModuleType) -> None:
    """Record torch's groups from now on, if a launcher reads it. Local; once is enough.

    Args:
        module: `torch.distributed.distributed_c10d`.
    """
    global _module
    if _module is not None or env.LOCKSTEP_RENDEZVOUS.get() is None:
        return
    _module = module
    rank_status.note_torch()
    wrap(f"{_C10D}.init_process_group", _noting_that_it_joins, alias="torch.distributed")
    for method, name in {**_VERBS, **_MESSAGES}.items():
        original = getattr(module.ProcessGroup, method, None)
        if original is not None:
            wrapper = _recorded_message if method in _MESSAGES else _recorded
            patch(f"{_CLASSES}.ProcessGroup.{method}", wrapper(original, name))
    native_calls.watch(module.ProcessGroup, _note_native)
    wrap(f"{_CLASSES}.Work.wait", _recorded_wait)
    wrap(f"{_CLASSES}.Reducer.prepare_for_backward", _recorded_pass)


def _noting_that_it_joins(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` that tells the launcher, which can then name ranks that never joined a group."""

    def init_process_group(*values: Any, **options: Any) -> Any:
        result = original(*values, **options)
        assert _module is not None
        rank_status.note_joined(_module.get_rank(), _module.get_world_size())
        return result

    return init_process_group


def _record_of(group: Any) -> _GroupRecord:
    record = _records.get(group)
    if record is None:
        assert _module is not None
        ranks = sorted(_ranks_of(group))
        is_default = group is _module.GroupMember.WORLD
        # Only other groups are asked for torch's name.
        name = describe_group("" if is_default else group.group_name, ranks, is_default)
        record = _records[group] = _GroupRecord(name)
    return record


def _ranks_of(group: Any) -> list[int]:
    assert _module is not None
    try:
        ranks: list[int] = _module.get_process_group_ranks(group)
    except KeyError:  # torch has forgotten it, or never made it
        return []
    return ranks


def _describe(name: str, values: tuple[Any, ...]) -> str:
    """`all_reduce(float32[4])`, by the first tensor among the arguments."""
    first: Any = values[0] if values else None
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if not hasattr(first, "dtype"):
        return f"{name}()"
    return f"{name}({describe_tensor(first)})"


def _recorded(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: Any, *values: Any, **options: Any) -> Any:
        record = _record_of(group)
        number = record.enter(_describe(name, values), call_site())
        with native_calls.called_from_python:
            work = original(group, *values, **options)
        if work is None:  # monitored_barrier has waited already
            record.finish(number)
        else:
            _numbers[work] = (record, number)
        return work

    return call


def _note_native(group: Any, name: str, tensors: tuple[Any, ...]) -> None:
    """Record a collective that C++ calls. Nothing tells when it is over."""
    record = _record_of(group)
    record.finish(record.enter(_describe(name, tensors), call_site()))


def _recorded_message(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Record a send or receive: no step of the group, without a number, shown only while a thread waits for it."""

    @functools.wraps(original)
    def call(group: Any, *values: Any, **options: Any) -> Any:
        work = original(group, *values, **options)
        peer = f", rank {values[1]} of the group" if len(values) > 1 and original.__name__ != "recv_anysource" else ""
        text = f"{_describe(name, values)[:-1]}{peer}) at {site_text(call_site())}"
        _messages[work] = (_record_of(group), text)
        return work

    return call


def _recorded_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *values: Any, **options: Any) -> Any:
        message = _messages.get(work)
        if message is not None:
            message[0].publish_waiting(message[1])
        done = original(work, *values, **options)
        if message is not None:
            message[0].publish_waiting("")
        call = _numbers.get(work)
        if call is not None:
            call[0].finish(call[1])
        return done

    return wait


def _recorded_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record a forward pass of torch's DDP, which reduces gradients from C++: more cannot be known."""

    def prepare(reducer: Any, *values: Any, **options: Any) -> Any:
        if not _passes:
            _passes.append(_GroupRecord(_DDP))
        record = _passes[0]
        record.finish(record.enter("forward pass", call_site()))
        return original(reducer, *values, **options)

    return prepare
