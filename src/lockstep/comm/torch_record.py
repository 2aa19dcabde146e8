"""The flight record of torch's own groups (gloo, nccl, …), for the launcher.

Such groups have no flight record that others could read: their errors say that a rank is late, but not which one. Under
our launcher every rank writes into its status file (`lockstep.rank_status`) which collective it enters, and from which
line; when one of them times out or is killed, the launcher compares the files and names the missing ranks.

[Note: where the record is taken] Python calls the verbs of a group as methods of torch's class `ProcessGroup`, and
waits by its class `Work`. Those methods are wrapped, on the classes, once. That covers what `torch.distributed`, our
engine, FSDP2 and scripts do, and does not change the group's behaviour: arguments, results and errors pass through
unchanged. It misses calls made in C++, by the reducer of torch's DDP; its forward pass is recorded instead, and from
torch 2.14 on its collectives too (`native_calls.py`).

Rejected: a wrapper group around torch's, which DDP's reducer would use, but which would also have to handle nccl's
streams, coalescing, splitting and aborts; TORCH_DISTRIBUTED_DEBUG=DETAIL, which synchronizes before every collective;
torch's own flight recorder, which a killed rank cannot dump.

[Note: cost of a recorded call] The record of a call is looked up by dtype, shape and line; texts are only made for new
ones. Python function calls are expensive, which is why entering looks up two indices without one, and why handles are
identified by their address. `make gpu` measures it next to torch's own methods (`measure-record`).

For nccl a call counts as finished when a stream waits for it, not when the GPU has finished it.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lockstep import env, rank_status
from lockstep.comm.callsite import CallSite, make_locator, site_text
from lockstep.comm.native_calls import from_python, watch
from lockstep.comm.wording import describe_group, describe_shape
from lockstep.rank_status import CALL, FINISHED, NUMBER, RING, SITE, START
from lockstep.torch_private.patching import patch, wrap

__all__ = ["register"]

# For each verb, its names in different releases of torch; missing ones are skipped.
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
_PASS = "forward pass"
_LOCAL = "use_local_synchronization"
_FEW_HANDLES = 1024

_Call = tuple[Any, ...]
"""The name of a call, and dtype and shape of its first tensor if it has one; the text is only made for a new one."""
_Handle = tuple["weakref.ref[Any]", "_GroupRecord", int, str]
"""A torch Work, the record of its group, the number of its call (0 for messages), and the text while waiting for it."""


class _GroupRecord:
    """What this rank is doing in one of torch's groups.

    Args:
        name: the group's name in messages.
    """

    def __init__(self, name: str) -> None:
        self._status = rank_status.open_section(name)
        self._calls: dict[_Call, int] = {}
        self._sites: dict[CallSite, int] = {}
        self._lock = threading.Lock()

    def enter(self, call: _Call, site: CallSite) -> int:
        """Record that this rank makes a call; returns the number of the call."""
        status = self._status
        words = status.words
        with self._lock:
            number: int = words[NUMBER] + 1
            offset = 2 * (number & 1)
            index = self._calls.get(call)
            if index is None:
                index = self._add(self._calls, call, status.write_call, _text)
            words[CALL + offset] = index
            index = self._sites.get(site)
            if index is None:
                index = self._add(self._sites, site, status.write_site, site_text)
            words[SITE + offset] = index
            status.times[START] = time.perf_counter()
            words[NUMBER] = number
        return number

    def _add(
        self, known: dict[Any, int], key: Any, write: Callable[[int, str], None], make_text: Callable[[Any], str]
    ) -> int:
        """Store a text in its ring, and return its index. A full ring starts over: only the latest call needs texts."""
        if len(known) == RING:
            known.clear()
        index = known[key] = len(known)
        write(index, make_text(key))
        return index

    def finish(self, number: int) -> None:
        """Record that this rank has finished that call, and thereby all before it."""
        words = self._status.words
        with self._lock:
            if words[FINISHED] < number:
                words[FINISHED] = number

    def publish_waiting(self, text: str) -> None:
        """Record which message this rank is waiting for; empty for none."""
        self._status.publish_waiting(text)


class _Batch(threading.local):
    """Messages that this thread has started as a batch: their handle comes at the end."""

    def __init__(self) -> None:
        self.texts: list[str] = []


# By id, valid only while the weak reference is alive: a new object at the same address must not match.
_records: dict[int, tuple[weakref.ref[Any], _GroupRecord]] = {}
_handles: dict[int, _Handle] = {}
_clears_at = _FEW_HANDLES
_batch = _Batch()
_passes: list[_GroupRecord] = []
_module: ModuleType | None = None


def register(module: ModuleType) -> None:
    """Record torch's groups from now on, if a launcher reads the record. Local; once is enough.

    Args:
        module: `torch.distributed.distributed_c10d`.
    """
    global _module
    if _module is not None or env.LOCKSTEP_RENDEZVOUS.get() is None:
        return
    _module = module
    rank_status.note_torch()
    wrap(f"{_C10D}.init_process_group", _noting_that_it_joins, alias="torch.distributed")
    wrap(f"{_C10D}.new_group", _noting_that_it_meets, alias="torch.distributed")
    for method, name in {**_VERBS, **_MESSAGES}.items():
        original = getattr(module.ProcessGroup, method, None)
        if original is not None:
            wrapper = _recorded_message if method in _MESSAGES else _recorded
            patch(f"{_CLASSES}.ProcessGroup.{method}", wrapper(original, name))
    if hasattr(module.ProcessGroup, "_end_coalescing"):
        wrap(f"{_CLASSES}.ProcessGroup._end_coalescing", _recorded_batch)
    watch(module.ProcessGroup, _native_noter())
    wrap(f"{_CLASSES}.Work.wait", _recorded_wait)
    wrap(f"{_CLASSES}.Reducer.prepare_for_backward", _recorded_pass)


def _noting_that_it_joins(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` that also tells the launcher, which can then name ranks that never joined a group.

    At exit it also aborts nccl groups that the script leaves open, as our worlds do.
    """

    locate = make_locator()

    def init_process_group(*values: Any, **options: Any) -> Any:
        name = _name_of_joining(values, options)
        with rank_status.noting_meeting(f"{name} at {site_text(locate())}", of_all=name == rank_status.JOINING):
            result = original(*values, **options)
        assert _module is not None
        rank_status.note_joined(_module.get_rank(), _module.get_world_size())
        if "nccl" in _module.get_backend():
            from lockstep.comm.nccl_end import abort_at_exit  # needs all of torch.distributed, not loaded earlier

            abort_at_exit()
        return result

    return init_process_group


def _name_of_joining(values: tuple[Any, ...], options: dict[str, Any]) -> str:
    """`rank_status.JOINING` if the numbers are those of the launcher, which then knows which ranks are awaited."""
    given = dict(zip(("backend", "init_method", "timeout", "world_size", "rank"), values, strict=False)) | options
    launched = {"rank": env.RANK.get(), "world_size": env.WORLD_SIZE.get()}
    numbers = {name: given[name] for name in launched if given.get(name, -1) != -1}
    by_environment = given.get("init_method") in (None, "env://") and given.get("store") is None
    if numbers == launched or (not numbers and by_environment):
        return rank_status.JOINING
    return f"{rank_status.JOINING}({', '.join(f'{name}={number}' for name, number in numbers.items())})"


def _noting_that_it_meets(original: Callable[..., Any]) -> Callable[..., Any]:
    """`new_group` that tells the launcher which ranks this one is waiting for."""
    locate = make_locator()

    def new_group(ranks: Any = None, *values: Any, **options: Any) -> Any:
        who = "" if ranks is None else ranks  # unchanged: an iterator must be left for torch to consume
        with rank_status.noting_meeting(f"new_group({who}) at {site_text(locate())}", _is_of_all(values, options)):
            return original(ranks, *values, **options)

    return new_group


def _is_of_all(values: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether all ranks of the launcher must call `new_group`, not only its members."""
    given = dict(zip(("timeout", "backend", "pg_options", _LOCAL), values, strict=False)) | options
    if _module is None or not _module.is_initialized() or given.get(_LOCAL, False):
        return False
    return bool(_module.get_world_size() == env.WORLD_SIZE.get())


def _record_of(group: Any) -> _GroupRecord:
    found = _records.get(id(group))
    if found is not None and found[0]() is group:
        return found[1]
    assert _module is not None
    ranks = sorted(_ranks_of(group))
    is_default = group is _module.GroupMember.WORLD
    # torch's name is only needed for groups other than the default.
    record = _GroupRecord(describe_group("" if is_default else group.group_name, ranks, is_default))
    key = id(group)
    _records[key] = weakref.ref(group, lambda _: _records.pop(key, None)), record
    return record


def _note_handle(work: Any, record: _GroupRecord, number: int, text: str) -> None:
    global _clears_at
    if len(_handles) >= _clears_at:
        for key, handle in list(_handles.items()):
            if handle[0]() is None:
                _handles.pop(key, None)
        _clears_at = max(_FEW_HANDLES, 2 * len(_handles))
    _handles[id(work)] = weakref.ref(work), record, number, text


def _ranks_of(group: Any) -> list[int]:
    assert _module is not None
    try:
        ranks: list[int] = _module.get_process_group_ranks(group)
    except KeyError:  # torch has forgotten it, or did not create it
        return []
    return ranks


def _call_of(name: str, values: tuple[Any, ...]) -> _Call:
    first: Any = values[0] if values else None
    while isinstance(first, list | tuple) and first:
        first = first[0]
    try:
        return name, first.dtype, first.shape
    except AttributeError:
        return (name,)


def _text(call: _Call) -> str:
    """`all_reduce(float32[4])`; `barrier()`; for a forward pass, just its name."""
    name, *tensor = call
    return name if name == _PASS else f"{name}({describe_shape(*tensor) if tensor else ''})"


def _recorded(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    locate = make_locator()

    @functools.wraps(original)
    def call(group: Any, *values: Any, **options: Any) -> Any:
        record = _record_of(group)
        number = record.enter(_call_of(name, values), locate())
        from_python.depth += 1
        try:
            work = original(group, *values, **options)
        finally:
            from_python.depth -= 1
        if work is None:  # monitored_barrier has already waited
            record.finish(number)
        else:
            _note_handle(work, record, number, "")
        return work

    return call


def _native_noter() -> Callable[[Any, str, tuple[Any, ...]], None]:
    locate = make_locator()

    def note(group: Any, name: str, tensors: tuple[Any, ...]) -> None:
        """Record a collective called from C++. Its end cannot be observed."""
        record = _record_of(group)
        record.finish(record.enter(_call_of(name, tensors), locate()))

    return note


def _recorded_message(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Record a send or receive: not a step of the group, not numbered, and shown only while a thread waits for it."""
    locate = make_locator()
    has_peer = original.__name__ != "recv_anysource"

    @functools.wraps(original)
    def call(group: Any, *values: Any, **options: Any) -> Any:
        work = original(group, *values, **options)
        peer = values[1] if has_peer and len(values) > 1 else None
        text = _message_text(_call_of(name, values), peer, locate())
        if work is None:  # part of a batch, which has a single handle
            _batch.texts.append(text)
        else:
            _note_handle(work, _record_of(group), 0, text)
        return work

    return call


@functools.lru_cache(maxsize=1024)
def _message_text(call: _Call, peer: int | None, site: CallSite) -> str:
    to = "" if peer is None else f", rank {peer} of the group"
    return f"{_text(call)[:-1]}{to}) at {site_text(site)}"


def _recorded_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record the end of a batch, which returns the handle of its messages."""

    def end(group: Any, *values: Any, **options: Any) -> Any:
        texts, _batch.texts = _batch.texts, []
        work = original(group, *values, **options)
        if texts and work is not None:
            more = f" and {len(texts) - 1} more of its batch" if len(texts) > 1 else ""
            _note_handle(work, _record_of(group), 0, texts[0] + more)
        return work

    return end


def _recorded_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *values: Any, **options: Any) -> Any:
        handle = _handles.get(id(work))
        if handle is None or handle[0]() is not work:
            return original(work, *values, **options)
        _, record, number, text = handle
        if text:
            record.publish_waiting(text)
        done = original(work, *values, **options)
        if text:
            record.publish_waiting("")
        else:
            record.finish(number)
        return done

    return wait


def _recorded_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record a forward pass of torch's DDP, which reduces gradients from C++: no more can be known."""
    locate = make_locator()

    def prepare(reducer: Any, *values: Any, **options: Any) -> Any:
        if not _passes:
            _passes.append(_GroupRecord(_DDP))
        record = _passes[0]
        record.finish(record.enter((_PASS,), locate()))
        return original(reducer, *values, **options)

    return prepare
