"""The process group "lockstep" of torch.distributed, and the base class that it shares with the one over MPI.

`import lockstep` registers the name, and torch then asks for a group (`registration.py`). All of `torch.distributed`
works on it: the functions of `dist`, `new_group`, torch's own DDP, FSDP2 and DTensor.

torch calls a method of `EngineProcessGroup` for each verb, by its own, older names (`allreduce`, `_allgather_base`);
each method only rearranges its arguments and calls the op table in `engine.py`. If torch ever gives Python backends
another base class, only this file has to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lockstep import env
from lockstep.comm import exit_hooks
from lockstep.comm.callsite import call_site, site_text
from lockstep.comm.engine import Engine, Work
from lockstep.comm.ephemeral import Extension
from lockstep.comm.group_nonce import agree_on_nonce
from lockstep.comm.group_setup import BootstrapStore, LivenessCheck, NewGroup
from lockstep.comm.inference import leaves_inference_mode
from lockstep.comm.monitored import monitored_barrier
from lockstep.comm.names import BACKEND_NAME
from lockstep.comm.shared_memory import make_engine
from lockstep.comm.tensors import check_output, check_pairs, check_tensor
from lockstep.comm.wire import current_wire
from lockstep.comm.wording import describe_group
from lockstep.errors import CollectiveMismatch, InputError, SetupError
from lockstep.shm.bootstrap import FIRST_KEY, Bootstrap, SeveralHosts
from lockstep.shm.team import SharedMemoryTeam
from lockstep.shm.terms import Terms
from lockstep.torch_private.stores import Store

__all__ = [
    "VERBS",
    "EngineProcessGroup",
    "LockstepProcessGroup",
    "backend_name",
    "engine_of",
    "find_nonce",
    "is_default_group",
    "make_group",
    "mismatch_in",
    "nonce_of",
    "ranks_of",
]

VERBS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "gather",
    "gather_single",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_anysource",
)
"""torch's names for the methods that move tensors."""

_Tensors = Sequence[torch.Tensor]
_Check = Callable[[object, str], torch.Tensor]


def _timeout_s(options: Any) -> float | None:
    """The timeout in seconds given for this one collective, or None for the group's own."""
    timeout = getattr(options, "timeout", None)
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None


def _is_async(options: Any) -> bool:
    # torch's C++ callers (DDP's reducer) always want a handle; releases before 2.8 do not set the field.
    return bool(getattr(options, "asyncOp", True))


@leaves_inference_mode(*VERBS)
class EngineProcessGroup(ProcessGroup):
    """A process group whose verbs are run by an engine.

    Args:
        engine: runs the collectives.
        backend: the registered name of the backend.
        options: torch's `_DistributedBackendOptions`.
        nonce: the nonce on which the ranks have agreed; empty for none.

    Attributes:
        engine: the op table; also holds the flight record and the team.
        nonce: goes into the MACs of the values that ranks write into a store.
    """

    def __init__(self, engine: Engine, backend: str, options: Any, nonce: str = "") -> None:
        super().__init__(options.group_rank, options.group_size)
        self.engine = engine
        self.nonce = nonce
        self._backend_name = backend
        self._store: Store = options.store
        self._name: str = options.group_id
        exit_hooks.register(self)

    # ---- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: _Tensors | torch.Tensor, opts: Any = None) -> Work:
        """`dist.all_reduce`."""
        opts = dist.AllreduceOptions() if opts is None else opts
        if isinstance(tensors, torch.Tensor):  # as torch's DistributedDataParallel calls it in `join`
            tensors = [tensors]
        if len(tensors) == 1 and tensors[0].is_sparse:
            return self.engine.all_reduce_sparse(tensors[0], opts.reduceOp, _is_async(opts), _timeout_s(opts))
        return self.engine.all_reduce(tensors, opts.reduceOp, _is_async(opts), _timeout_s(opts))

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Work:
        """Several tensors in one call."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: _Tensors, opts: Any) -> Work:
        """`dist.reduce`."""
        (tensor,) = tensors
        return self.engine.reduce(tensor, opts.reduceOp, opts.rootRank, _is_async(opts), _timeout_s(opts))

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> Work:
        """`dist.reduce_scatter`."""
        return self.engine.reduce_scatter(outputs, inputs, opts.reduceOp, _is_async(opts), _timeout_s(opts))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """`dist.reduce_scatter_tensor`."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        """Several tensors in one call."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        check_pairs("reduce_scatter", outputs, inputs)
        rows = [
            self._split(source, output, "reduce_scatter", check_tensor)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return self.engine.reduce_scatter(outputs, rows, opts.reduceOp, _is_async(opts), _timeout_s(opts))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensors: _Tensors, opts: Any) -> Work:
        """`dist.broadcast`."""
        return self.engine.broadcast(tensors, opts.rootRank, _is_async(opts), _timeout_s(opts))

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        """`dist.all_gather`."""
        return self.engine.all_gather(outputs, inputs, _is_async(opts), _timeout_s(opts))

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """`dist.all_gather_into_tensor`."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        """Several tensors in one call."""
        check_pairs("all_gather", outputs, inputs)
        rows = [
            self._split(output, source, "all_gather", check_output)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return self.engine.all_gather(rows, inputs, _is_async(opts), _timeout_s(opts))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        """`dist.all_gather_coalesced`: one list of all inputs for each rank."""
        for row in output_lists:
            check_pairs("all_gather_coalesced", row, inputs)
        rows = list(zip(*output_lists, strict=True))
        return self.engine.all_gather(rows, inputs, _is_async(opts), _timeout_s(opts))

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any) -> Work:
        """`dist.gather`."""
        (tensor,) = inputs
        row = outputs[0] if self.rank() == opts.rootRank else None
        return self.engine.gather(row, tensor, opts.rootRank, _is_async(opts), _timeout_s(opts))

    def gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Work:
        """`dist.gather_single` of torch 2.14 and newer; ranks other than the root give any output."""
        is_root = self.rank() == opts.rootRank
        row = self._split(output, source, "gather", check_output) if is_root else None
        return self.engine.gather(row, source, opts.rootRank, _is_async(opts), _timeout_s(opts))

    gather_into_tensor = gather_single

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> Work:
        """`dist.scatter`."""
        (tensor,) = outputs
        row = inputs[0] if self.rank() == opts.rootRank else None
        return self.engine.scatter(tensor, row, opts.rootRank, _is_async(opts), _timeout_s(opts))

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        """`dist.all_to_all`."""
        return self.engine.all_to_all(outputs, inputs, _is_async(opts), _timeout_s(opts))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """`dist.all_to_all_single`; splits count rows of the first dimension, none means even."""
        outputs = self._split_rows(output, output_split_sizes, "output")
        inputs = self._split_rows(source, input_split_sizes, "input")
        return self.engine.all_to_all(outputs, inputs, _is_async(opts), _timeout_s(opts), [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """`dist.barrier`."""
        return self.engine.barrier(_is_async(opts), _timeout_s(opts))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """`dist.monitored_barrier`: a barrier whose error names every rank that did not call it. Collective.

        Args:
            timeout: time until a missing rank is an error; default the group's own.
            wait_all_ranks: whether the first sentence of the error, which is gloo's, names all missing ranks or only
                the first. The other sentences and `culprits` always name all of them.

        Raises:
            CollectiveTimeout: names the ranks that did not call it, and where they are.
            RankLost: one of them died, left or failed.
        """
        monitored_barrier(self.engine, timeout, wait_all_ranks)

    # ---- point to point ------------------------------------------------------------------------------

    def send(self, tensors: _Tensors, peer: int, tag: int = 0) -> Work:
        """`dist.send` and `dist.isend`."""
        (tensor,) = tensors
        return self.engine.send(tensor, peer, tag)

    def recv(self, tensors: _Tensors, peer: int, tag: int = 0) -> Work:
        """`dist.recv` and `dist.irecv` from one rank."""
        (tensor,) = tensors
        return self.engine.receive(tensor, peer, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> Work:
        """`dist.recv` and `dist.irecv` from any rank."""
        (tensor,) = tensors
        return self.engine.receive(tensor, None, tag)

    # ---- pieces --------------------------------------------------------------------------------------

    def _split(self, whole: torch.Tensor, part: torch.Tensor, operation: str, check: _Check) -> list[torch.Tensor]:
        """`whole` as one piece of `part`'s size for each rank."""
        check(whole, operation)
        check_tensor(part, operation)
        world_size = self.size()
        if whole.numel() != part.numel() * world_size:
            raise InputError(
                f"{operation}: the tensor for all ranks has {whole.numel()} elements, the one for this rank "
                f"{part.numel()}; expected {world_size} times as many. Where sizes differ between ranks, call "
                f"dist.{operation}, which takes a list with a tensor of each rank's size"
            )
        if whole.is_contiguous():
            return list(whole.view(world_size, -1).unbind(0))
        if whole.size(0) % world_size:
            raise InputError(
                f"{operation}: the tensor for all ranks has {whole.size(0)} rows, not a multiple of {world_size} "
                "(the ranks), and gaps between its elements; call .contiguous() on it"
            )
        return list(whole.chunk(world_size))

    def _split_rows(self, tensor: torch.Tensor, splits: Sequence[int], side: str) -> list[torch.Tensor]:
        world_size = self.size()
        check = check_output if side == "output" else check_tensor
        check(tensor, "all_to_all_single")
        rows = tensor.size(0) if tensor.dim() else 1
        if len(splits) == 0:
            if rows % world_size:
                raise InputError(
                    f"all_to_all_single: {rows} rows of the {side} do not divide evenly among {world_size} ranks; "
                    "give split sizes"
                )
            splits = [rows // world_size] * world_size
        if len(splits) != world_size or sum(splits) != rows:
            raise InputError(
                f"all_to_all_single: {side} splits {list(splits)} must be {world_size} numbers that add up to "
                f"{rows} rows"
            )
        if not tensor.is_contiguous():
            return list(torch.split(tensor, list(splits)))
        row_numel = tensor.numel() // rows if rows else 0
        return list(torch.split(tensor.view(-1), [split * row_numel for split in splits]))

    # ---- life ------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls. Local; calls under way keep theirs."""
        self.engine.timeout_s = timeout.total_seconds()

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Extend the timeout until a collective called from now on has finished. Local. Called by torch 2.15."""
        self.engine.extensions.add(Extension(timeout.total_seconds()))

    def fail(self, message: str, error: BaseException | None = None) -> None:
        """Tell the peers that this rank raised an exception; they raise RankLost with `message`. Local."""
        self.engine.fail(message, error)

    def shutdown(self) -> None:
        """Leave the group. Local; `dist.destroy_process_group` calls it.

        Asynchronous calls made so far are completed first, as with gloo; not after an error, or while one propagates.
        """
        self.engine.shutdown()

    def abort(self) -> None:
        """Leave the group at once: asynchronous calls under way end with CollectiveAborted. Local."""
        self.engine.close()

    def disown(self) -> None:
        """Make the group unusable in this process, a fork of the rank. Local; the rank itself is not affected."""
        self.engine.disown()

    def name(self) -> str:
        """The registered name."""
        return self._backend_name

    getBackendName = name  # noqa: N815 - torch's name for it

    @property
    def group_name(self) -> str:
        """torch's name for this group."""
        return self._name

    def get_group_store(self) -> Store:
        """The store through which the ranks met."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors the group moves. Used by torch's asynchronous checkpoints and object collectives."""
        return [torch.device("cpu")]

    def get_backend(self, device: torch.device) -> EngineProcessGroup:
        """The group that moves tensors on that device: this one. Public since torch 2.14."""
        return self

    _get_backend = get_backend

    def behind(self, device: torch.device) -> dist.ProcessGroup | None:
        """The group that moves tensors on that device in place of this one; None for this one."""
        return None

    @property
    def supports_splitting(self) -> bool:
        """False: sub-groups come from `dist.new_group`."""
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """False, so that FSDP2 allocates its buffers with torch."""
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank()}, world_size={self.size()}, name={self._name!r})"


_Group = TypeVar("_Group", bound=EngineProcessGroup)


def ranks_of(options: Any) -> tuple[int, ...]:
    """Global rank of each rank of the group that torch's `_DistributedBackendOptions` describe."""
    return tuple(options.global_ranks_in_group) or tuple(range(options.group_size))


def is_default_group(options: Any) -> bool:
    """Whether torch's `_DistributedBackendOptions` describe the default group."""
    return len(options.global_ranks_in_group) == 0


def find_nonce(store: BootstrapStore, options: Any, first_key: str) -> str:
    """The nonce of a new group: that of the default group, or else a new one. Collective.

    Args:
        store: the group's store, still without a nonce.
        options: torch's `_DistributedBackendOptions`.
        first_key: see `agree_on_nonce`.
    """
    nonce = nonce_of(dist.group.WORLD)
    if nonce is not None:
        return nonce
    ranks, timeout_s = ranks_of(options), options.timeout.total_seconds()
    return agree_on_nonce(store, options.group_rank, ranks, timeout_s, first_key)


def make_group(kind: Callable[[Any], _Group], options: Any) -> _Group:
    """Create a group of that class from torch's `_DistributedBackendOptions`. Collective.

    Raises:
        SetupError: the rank is not below the world size, or an environment variable has an invalid value.
    """
    env.check()
    if not 0 <= options.group_rank < options.group_size:
        raise SetupError(
            f"rank is {options.group_rank}, but world_size is {options.group_size}: expected 0 … "
            f"{options.group_size - 1}. A global rank is node_rank * ranks per node + local rank"
        )
    return kind(options)


def _if_ours(group: object) -> EngineProcessGroup | None:
    """The group if it is one of ours; None for torch's own groups.

    torch.distributed types the groups of all backends alike, so only the class can tell. This is the one place that
    checks it; capabilities of our groups are properties of their engine and team.
    """
    return group if isinstance(group, EngineProcessGroup) else None


def nonce_of(group: object) -> str | None:
    """The nonce on which the ranks of a group have agreed; None for torch's own groups."""
    ours = _if_ours(group)
    return None if ours is None else ours.nonce


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Name of the backend that moves tensors of a device: "nccl"; "" if torch.distributed did not make the group."""
    try:
        backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    except (AssertionError, TypeError, ValueError):
        return ""
    return backends.get(device.type, "")


def engine_of(group: object, device: torch.device | None = None) -> Engine | None:
    """The engine that runs the collectives of a group; None for torch's own groups.

    Args:
        group: a process group of any backend.
        device: if given, None is returned if another group moves tensors of that device. See [Note: mixed groups].
    """
    ours = _if_ours(group)
    if ours is None or (device is not None and ours.behind(device) is not None):
        return None
    return ours.engine


def mismatch_in(group: object, text: str) -> CollectiveMismatch:
    """The error for ranks whose calls matched, but not what they sent. Counted: see `FlightRecorder.close`. Local."""
    error, engine = CollectiveMismatch(text), engine_of(group)
    return error if engine is None else engine.recorder.note_failed(error)


def _connect(new: NewGroup, default: Engine | None) -> Engine:
    """Connect the ranks of a new group, on one host or several; `default` is the default group's engine. Collective."""
    where = f"new_group({list(new.ranks)}) at {site_text(call_site())}"
    waits = new.default_waits
    detector = None if default is None or waits is None else default.make_detector(new, waits, lambda: where)
    liveness = LivenessCheck(None if default is None else default.team, new.ranks, new.timeout_s, detector)
    with new.store.explaining(), liveness as check_peers:
        terms: Terms = {"wire": current_wire().name}
        bootstrap = Bootstrap(new.store, new.rank, new.ranks, new.timeout_s, check_peers, terms)
        further = None if default is None else default.connect_further(new, bootstrap, check_peers)
        if further is not None:
            return further
        try:
            return make_engine(SharedMemoryTeam.connect(bootstrap), new)
        except SeveralHosts:
            pass
        # Imported only if there are several hosts.
        from lockstep.comm.hosts.group import connect

        engine = connect(new, check_peers)
        if new.rank == 0:
            bootstrap.forget_several_hosts()
        return engine


class LockstepProcessGroup(EngineProcessGroup):
    """A process group over shared memory inside a host, and over Gloo between hosts.

    Created by `dist.init_process_group("lockstep")` or `dist.new_group(backend="lockstep")`, not by hand.

    Args:
        options: torch's `_DistributedBackendOptions`.
    """

    def __init__(self, options: Any) -> None:
        rank, ranks, is_default = options.group_rank, ranks_of(options), is_default_group(options)
        name = describe_group(options.group_id, ranks, is_default)
        default = engine_of(dist.group.WORLD)
        waits = None if is_default or default is None else default.team.published_waits
        nonce = find_nonce(BootstrapStore(options.store, options.group_id), options, FIRST_KEY)
        store = BootstrapStore(options.store, options.group_id, nonce=nonce)
        new = NewGroup(store, rank, ranks, options.timeout.total_seconds(), name, is_default, waits)
        super().__init__(_connect(new, default), BACKEND_NAME, options, nonce)

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor in symmetric memory: `all_reduce` works on it without copies. Collective."""
        return self.engine.symmetric_empty(shape, dtype)
