"""Every name that `torch.distributed` exports works on our group, or stands here with a reason.

A release of torch that brings a name nobody has thought of fails `test_no_name_is_forgotten`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from failing import group_works
from lockstep.testing import run_ranks
from lockstep.torch_private.groups import open_groups

WORLD_SIZE = 2

_TYPE = "a type of torch's, the same for every group"
_BUILD = "says what torch was built with"
_OTHER_TESTS = "makes or ends groups, as every test of ranks does"
NO_CHECK = {
    "Backend": _TYPE,
    "BackendConfig": _TYPE,
    "DebugLevel": _TYPE,
    "GroupMember": _TYPE,
    "GroupName": _TYPE,
    "PrefixStore": _TYPE,
    "ProcessGroup": _TYPE,
    "ProcessGroupGloo": _TYPE,
    "ProcessGroupMPI": _TYPE,
    "ProcessGroupNCCL": _TYPE,
    "ProcessGroupNCCL2": _TYPE,
    "ProcessGroupNCCLLazy": _TYPE,
    "ProcessGroupUCC": _TYPE,
    "ProcessGroupXCCL": _TYPE,
    "ReduceOp": _TYPE,
    "Store": _TYPE,
    "Work": _TYPE,
    "group": _TYPE,
    "reduce_op": "ReduceOp of before torch 1.0; using it warns",
    **dict.fromkeys(
        (
            "AllToAllOptions",
            "AllgatherOptions",
            "AllreduceCoalescedOptions",
            "AllreduceOptions",
            "BarrierOptions",
            "BroadcastOptions",
            "GatherOptions",
            "ReduceOptions",
            "ReduceScatterOptions",
            "ScatterOptions",
        ),
        _TYPE,
    ),
    "is_gloo_available": _BUILD,
    "is_mpi_available": _BUILD,
    "is_nccl_available": _BUILD,
    "is_ucc_available": _BUILD,
    "is_xccl_available": _BUILD,
    "get_debug_level": "reads TORCH_DISTRIBUTED_DEBUG",
    "get_default_backend_for_device": "gloo for CPUs, which a backend named by hand does not change",
    "get_node_local_rank": "reads LOCAL_RANK",
    "is_torchelastic_launched": "reads what torchrun sets",
    "default_pg_timeout": "a constant",
    "init_process_group": _OTHER_TESTS,
    "destroy_process_group": _OTHER_TESTS,
    "shrink_group": "of nccl and experimental; a lockstep group that has lost a rank is made anew by the launcher",
}


def _values(numel: int = 2) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 10 * dist.get_rank()


def _of(rank: int, numel: int = 2) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 10 * rank


def _same(found: Any, *expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, torch.stack(expected).reshape(found.shape), rtol=0, atol=0)


def _reduces(name: str) -> None:
    tensor = _values()
    given: Any = [tensor] if name.endswith("coalesced") else tensor
    _verb(name)(given, *([0] if name == "reduce" else []))
    if name != "reduce" or dist.get_rank() == 0:
        _same(tensor, _of(0) + _of(1))


def _gathers(name: str) -> None:
    if name == "all_gather_coalesced":
        lists = [[torch.zeros(2)] for _ in range(WORLD_SIZE)]
        _verb(name)(lists, [_values()])
        rows = [row[0] for row in lists]
    else:
        rows = [torch.zeros(2) for _ in range(WORLD_SIZE)]
        _verb(name)(rows, _values())
    _same(torch.stack(rows), _of(0), _of(1))


def _gathers_into_one(name: str) -> None:
    output = torch.zeros(4)
    _verb(name)(output, _values())
    _same(output, _of(0), _of(1))


def _gathers_to_root(name: str) -> None:
    is_root = dist.get_rank() == 1
    rows = [torch.zeros(2) for _ in range(WORLD_SIZE)] if is_root else None
    output = torch.zeros(4) if is_root else None
    _verb(name)(_values(), rows if name == "gather" else output, dst=1)
    if rows is not None and output is not None:
        _same(torch.stack(rows) if name == "gather" else output, _of(0), _of(1))


def _scatters(_: str) -> None:
    output = torch.zeros(2)
    dist.scatter(output, [_of(0), _of(1)] if dist.get_rank() == 0 else None, src=0)
    _same(output, _of(dist.get_rank()))


def _reduce_scatters(name: str) -> None:
    output = torch.zeros(2)
    both = _values(4)
    _verb(name)(output, list(both.chunk(2)) if name == "reduce_scatter" else both)
    _same(output, (_of(0, 4) + _of(1, 4)).chunk(2)[dist.get_rank()])


def _exchanges(name: str) -> None:
    output = torch.zeros(2)
    if name == "all_to_all":
        _verb(name)(list(output.chunk(2)), list(_values().chunk(2)))
    else:
        _verb(name)(output, _values())
    rank = dist.get_rank()
    _same(output, _of(0)[rank], _of(1)[rank])


def _broadcasts(_: str) -> None:
    tensor = _values()
    dist.broadcast(tensor, 1)
    _same(tensor, _of(1))


def _waits(name: str) -> None:
    _verb(name)()


def _moves_objects(name: str) -> None:
    rank = dist.get_rank()
    objects: list[Any] = [{"rank": rank}, rank]
    if name == "broadcast_object_list":
        dist.broadcast_object_list(objects, 1)
        assert objects == [{"rank": 1}, 1]
    elif name == "scatter_object_list":
        received: list[Any] = [None]
        dist.scatter_object_list(received, ["a", "b"] if rank == 0 else None, src=0)
        assert received == ["ab"[rank]]
    else:
        found: list[Any] = [None] * WORLD_SIZE
        if name == "all_gather_object":
            dist.all_gather_object(found, rank)
        else:
            dist.gather_object(rank, found if rank == 0 else None, dst=0)
        assert found == [0, 1] or (name == "gather_object" and rank == 1)


def _sends(_: str) -> None:
    """send, recv, isend, irecv, their batch, and lists of objects."""
    rank = dist.get_rank()
    received = torch.zeros(2)
    if rank == 0:
        dist.send(_values(), 1)
        dist.isend(_values(), 1).wait()  # type: ignore[union-attr]
        dist.send_object_list(["sent"], 1)
    else:
        dist.recv(received, 0)
        _same(received, _of(0))
        dist.irecv(received.zero_(), 0).wait()  # type: ignore[union-attr]
        _same(received, _of(0))
        objects = [None]
        dist.recv_object_list(objects, 0)
        assert objects == ["sent"]
    operations = [dist.P2POp(dist.isend, _values(), 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    _same(received, _of(1 - rank))


def _makes_groups(name: str) -> None:
    if name == "new_group":
        group = dist.new_group([0, 1])
    elif name == "new_subgroups":
        group, _ = dist.new_subgroups(WORLD_SIZE)
    else:
        group, _ = dist.new_subgroups_by_enumeration([[0, 1]])
    tensor = _values()
    dist.all_reduce(tensor, group=group)
    _same(tensor, _of(0) + _of(1))


def _refuses_to_split(_: str) -> None:
    """Groups come from `new_group`; torch says itself that ours do not split."""
    with pytest.raises(RuntimeError, match=r"(?i)split"):
        dist.split_group(None, [[0, 1]])


def _asks(name: str) -> None:
    """Questions that are answered alike by every group."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    answers: dict[str, Callable[[], bool]] = {
        "get_rank": lambda: rank in (0, 1),
        "get_world_size": lambda: dist.get_world_size() == WORLD_SIZE,
        "get_group_rank": lambda: dist.get_group_rank(world, 1) == 1,
        "get_global_rank": lambda: dist.get_global_rank(world, 1) == 1,
        "get_process_group_ranks": lambda: dist.get_process_group_ranks(world) == [0, 1],
        "get_backend": lambda: dist.get_backend() == "lockstep",
        "get_backend_config": lambda: "lockstep" in distributed_c10d.get_backend_config(),
        "get_backend_impl": lambda: _verb("get_backend_impl")(device=torch.device("cpu")) is world,
        "get_pg_count": lambda: dist.get_pg_count() >= 1,
        "is_initialized": dist.is_initialized,
        "is_backend_available": lambda: dist.is_backend_available("lockstep"),
        "supports_complex": lambda: bool(dist.supports_complex(dist.ReduceOp.SUM)),
    }
    assert answers[name](), name


def _limits(_: str) -> None:
    """`set_timeout`, and the method of a group that older releases have."""
    world: Any = dist.group.WORLD
    before = timedelta(seconds=world.engine.timeout_s)
    dist.set_timeout(timedelta(seconds=77))  # type: ignore[attr-defined]
    assert world.engine.timeout_s == 77
    dist.set_timeout(before)  # type: ignore[attr-defined]


def _is_named(_: str) -> None:
    with dist.record_comm("named"):  # type: ignore[attr-defined]
        _reduces("all_reduce")


_Check = Callable[[str], None]
CHECKS: dict[str, _Check] = {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "reduce"), _reduces),
    **dict.fromkeys(("all_gather", "all_gather_coalesced"), _gathers),
    **dict.fromkeys(("all_gather_single", "all_gather_into_tensor"), _gathers_into_one),
    **dict.fromkeys(("gather", "gather_single", "gather_into_tensor"), _gathers_to_root),
    "scatter": _scatters,
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"), _reduce_scatters),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), _exchanges),
    "broadcast": _broadcasts,
    **dict.fromkeys(("barrier", "monitored_barrier"), _waits),
    **dict.fromkeys(
        ("broadcast_object_list", "scatter_object_list", "all_gather_object", "gather_object"), _moves_objects
    ),
    **dict.fromkeys(
        ("send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv", "send_object_list", "recv_object_list"), _sends
    ),
    **dict.fromkeys(("new_group", "new_subgroups", "new_subgroups_by_enumeration"), _makes_groups),
    "split_group": _refuses_to_split,
    **dict.fromkeys(
        (
            "get_rank",
            "get_world_size",
            "get_group_rank",
            "get_global_rank",
            "get_process_group_ranks",
            "get_backend",
            "get_backend_config",
            "get_backend_impl",
            "get_pg_count",
            "is_initialized",
            "is_backend_available",
            "supports_complex",
        ),
        _asks,
    ),
    "set_timeout": _limits,
    "record_comm": _is_named,
}


def _verb(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(distributed_c10d, name)
    return function


def exported() -> set[str]:
    return set(distributed_c10d.__all__)


def test_no_name_is_forgotten() -> None:
    forgotten = exported() - CHECKS.keys() - NO_CHECK.keys()
    assert not forgotten, (
        f"torch {torch.__version__} exports {sorted(forgotten)}: give each a check in CHECKS, or a reason in NO_CHECK"
    )
    assert not CHECKS.keys() & NO_CHECK.keys()


def use(name: str) -> bool:
    warnings.simplefilter("ignore", FutureWarning)
    CHECKS[name](name)
    return group_works()


@pytest.mark.parametrize("name", CHECKS)
def test_name_works_on_our_group(name: str) -> None:
    if name not in exported():
        pytest.skip(f"torch {torch.__version__} has no {name}")
    assert run_ranks(use, WORLD_SIZE, name) == [True] * WORLD_SIZE


# ---- timeouts --------------------------------------------------------------------------------------------------------


def set_limits() -> tuple[list[float], list[str]]:
    """By torch's private function, for the default group and one of two, and by what `dist.breakpoint` does."""
    world: Any = dist.group.WORLD
    pair: Any = dist.new_group([0, 1])
    before = world.engine.timeout_s
    set_private = _verb("_set_pg_timeout")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        set_private(timedelta(seconds=70))
        set_private(timedelta(seconds=80), pair)
        found = [world.engine.timeout_s, pair.engine.timeout_s]
        for group in open_groups():
            set_private(timedelta(seconds=before), group)
    return [*found, world.engine.timeout_s / before, pair.engine.timeout_s / before], [str(each) for each in told]


def test_the_private_function_that_sets_timeouts_knows_our_groups() -> None:
    assert run_ranks(set_limits, 2) == [([70.0, 80.0, 1.0, 1.0], [])] * 2


# ---- questions to a group that newer releases ask -------------------------------------------------------------------


def extend_timeouts() -> float:
    """One barrier has 0.1 s and what was added, the next 0.1 s."""
    world: Any = dist.group.WORLD
    world.set_timeout(timedelta(seconds=0.1))
    world._add_ephemeral_timeout(timedelta(seconds=20))
    world._add_ephemeral_timeout(timedelta(seconds=20))
    limits = []
    body = world.engine._algorithms.barrier
    world.engine._algorithms = type(
        "Spy", (), {"barrier": lambda _, limit_s: (limits.append(limit_s), body(limit_s))}
    )()
    dist.barrier()
    world.set_timeout(timedelta(seconds=20))
    dist.barrier()
    assert limits == [pytest.approx(40.1), pytest.approx(20)]
    assert not world.engine.extensions
    return limits[0]


def test_ephemeral_timeout_lasts_for_one_collective() -> None:
    assert run_ranks(extend_timeouts, 2) == [pytest.approx(40.1)] * 2


def ask_for_backends() -> bool:
    world: Any = dist.group.WORLD
    return world.get_backend(torch.device("cpu")) is world and world._get_backend(torch.device("cpu")) is world


def test_a_group_is_its_own_backend() -> None:
    assert run_ranks(ask_for_backends, 1) == [True]


# ---- one backend for each kind of device ----------------------------------------------------------------------------


def reduce_in_a_mixed_group() -> tuple[str, bool]:
    pair = dist.new_group([0, 1])
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=pair)
    assert tensor.tolist() == [2.0] * 3
    return type(dist.group.WORLD).__name__, group_works()


@pytest.mark.parametrize("backend", ["cpu:lockstep,cuda:nccl", "cuda:gloo,cpu:lockstep"])
def test_mixed_form_moves_tensors_of_the_cpu(backend: str) -> None:
    """torch puts our group in the place of the whole, and from 2.15 on hooks its recorder unless it is told not to."""
    assert run_ranks(reduce_in_a_mixed_group, 2, backend=backend) == [("MixedProcessGroup", True)] * 2
