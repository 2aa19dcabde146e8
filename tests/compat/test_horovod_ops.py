"""Horovod's operations: matched by name whatever the order, exact, differentiable, and with errors on every rank."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep.compat.horovod.torch as hvd
from lockstep.compat.horovod.torch import channel
from lockstep.compat.horovod.torch.runtime import Runtime
from lockstep.errors import InputError
from lockstep.testing import limit_s, run_ranks

DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def in_world(check: Any, *args: Any) -> Any:
    hvd.init()
    try:
        return check(*args)
    finally:
        hvd.shutdown()


def basics() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert not hvd.mpi_enabled()
    assert hvd.gloo_enabled()
    hvd.init()  # once more does nothing


def reductions() -> None:
    """Rank r holds r + 1, so that the sum is n(n+1)/2 and the product n!."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) // 2
    for dtype, shape in itertools.product(DTYPES, ((), (3,), (2, 3), (0,), (70_000,))):
        own = torch.full(shape, rank + 1, dtype=dtype)
        assert torch.equal(hvd.allreduce(own, op=hvd.Sum), torch.full(shape, total, dtype=dtype)), (dtype, shape)
        assert torch.equal(hvd.allreduce(own, op=hvd.Max), torch.full(shape, size, dtype=dtype))
        assert torch.equal(hvd.allreduce(own, op=hvd.Min), torch.full(shape, 1, dtype=dtype))
        expected = torch.full(shape, total, dtype=torch.float64) / size
        if not dtype.is_floating_point:
            expected = expected.trunc()
        assert torch.equal(hvd.allreduce(own), expected.to(dtype))
        assert torch.equal(own, torch.full(shape, rank + 1, dtype=dtype)), "the input was changed"
        assert hvd.allreduce_(own, op=hvd.Sum) is own
        assert torch.equal(own, torch.full(shape, total, dtype=dtype))


def scaling() -> None:
    size = hvd.size()
    scaled = hvd.allreduce(torch.tensor([3, -3]), op=hvd.Sum, prescale_factor=0.5)
    assert scaled.tolist() == [size, -size]  # truncated before the sum
    scaled = hvd.allreduce(torch.tensor([3.0]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
    assert scaled.tolist() == [3.0 * size]
    pair = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int64)], op=hvd.Sum)
    assert [tensor.tolist() for tensor in pair] == [[size] * 2, [size] * 3]
    half = hvd.allreduce(torch.full((4,), 0.1), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    assert torch.allclose(half, torch.full((4,), 0.1 * size), rtol=2**-9)  # two roundings to 11 bits


def any_order() -> None:
    """Rank r submits the names rotated by r; each must get the sum of its own."""
    rank, size = hvd.rank(), hvd.size()
    names = [f"tensor {number}" for number in range(7)]
    turned = names[rank:] + names[:rank]
    handles = {name: hvd.allreduce_async(torch.full((3,), float(names.index(name))), name=name) for name in turned}
    for name in reversed(turned):
        assert hvd.synchronize(handles[name]).tolist() == [float(names.index(name))] * 3
    assert hvd.synchronize(handles[names[0]]) is None  # as in Horovod, a handle is good once
    # An operation of another kind overtakes one that a rank has not asked for yet.
    late = hvd.allgather_async(torch.tensor([rank]), name="late") if rank == 0 else None
    hvd.barrier()
    if late is None:
        late = hvd.allgather_async(torch.tensor([rank]), name="late")
    deadline = time.monotonic() + limit_s(20)
    while not hvd.poll(late):  # continues although nobody waits
        assert time.monotonic() < deadline
    assert hvd.synchronize(late).tolist() == list(range(size))


def movement() -> None:
    rank, size = hvd.rank(), hvd.size()
    gathered = hvd.allgather(torch.full((rank, 2), rank))  # rank 0 has no row
    assert gathered.tolist() == [[r, r] for r in range(size) for _ in range(r)]
    two = hvd.grouped_allgather([torch.tensor([rank]), torch.tensor([float(rank)] * (rank + 1))])
    assert two[0].tolist() == list(range(size))
    assert two[1].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    for root in range(size):
        own = torch.full((3,), rank)
        assert hvd.broadcast(own, root).tolist() == [root] * 3
        assert own.tolist() == [rank] * 3
        assert hvd.broadcast_(own, root) is own
        assert own.tolist() == [root] * 3
    # Rank r sends r + 1 rows to everybody; they say who sent them, and to whom.
    rows = torch.tensor([[rank, peer] for peer in range(size) for _ in range(rank + 1)])
    splits = torch.tensor([rank + 1] * size, dtype=torch.int32)
    received, counts = hvd.alltoall(rows, splits)
    assert counts.tolist() == [r + 1 for r in range(size)]
    assert received.tolist() == [[r, rank] for r in range(size) for _ in range(r + 1)]
    assert hvd.alltoall(torch.arange(size)).tolist() == [rank] * size
    # Rows that do not divide: the first ranks get one more.
    whole = torch.arange(size + 1.0)
    share = hvd.reducescatter(whole, op=hvd.Sum)
    bounds = [0, *itertools.accumulate([1 + (r < 1) for r in range(size)])]
    assert share.tolist() == [size * value for value in range(bounds[rank], bounds[rank + 1])]
    assert hvd.broadcast_object({"of": rank}, size - 1) == {"of": size - 1}
    assert hvd.allgather_object("x" * rank) == ["x" * r for r in range(size)]


def gradients() -> None:
    """As Horovod defines them."""
    rank, size = hvd.rank(), hvd.size()

    def grad_of(function: Any, *shape: int) -> torch.Tensor:
        tensor = torch.ones(shape, requires_grad=True)
        result = function(tensor)
        (result * (rank + 1)).sum().backward()
        assert tensor.grad is not None
        return tensor.grad

    total = size * (size + 1) / 2
    assert grad_of(lambda t: hvd.allreduce(t, op=hvd.Sum), 3).tolist() == [total] * 3
    assert grad_of(hvd.allreduce, 3).tolist() == [total / size] * 3
    assert grad_of(lambda t: hvd.grouped_allreduce([t, t], op=hvd.Sum)[0], 3).tolist() == [total] * 3
    assert grad_of(hvd.allgather, rank + 1).tolist() == [total / size] * (rank + 1)
    expected = total / size if rank == 0 else 0.0
    assert grad_of(lambda t: hvd.broadcast(t, 0), 2).tolist() == [expected] * 2
    # What went to rank p comes back with its gradient, p + 1.
    assert grad_of(hvd.alltoall, size).tolist() == [peer + 1 for peer in range(size)]
    assert grad_of(lambda t: hvd.reducescatter(t, op=hvd.Sum), size).tolist() == [
        size * (peer + 1) for peer in range(size)
    ]


def mistakes() -> None:
    rank, size = hvd.rank(), hvd.size()
    ones = torch.ones(4)
    for call, text in (
        (lambda: hvd.allreduce(ones, average=True, op=hvd.Sum), "only one"),
        (lambda: hvd.allreduce(torch.ones(4, 4).t()[:, :2]), "contiguous"),
        (lambda: hvd.allreduce(torch.ones(4, dtype=torch.bool)), "not supported"),
        (lambda: hvd.broadcast(ones, size), "invalid root rank"),
        (lambda: hvd.alltoall(torch.ones(size + 1), torch.ones(size, dtype=torch.int64)), "32-bit"),
        (lambda: hvd.alltoall(torch.ones(1), torch.full((size,), 2, dtype=torch.int32)), "Sum of splits"),
        (lambda: hvd.allreduce(ones, process_set=hvd.ProcessSet([0])), "not been registered"),
        (lambda: hvd.poll(-5), "not created"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.warns(DeprecationWarning, match="replaced with `op`"):
        hvd.allreduce(ones, average=False)
    hvd.allreduce_async(ones, name="twice")
    with pytest.raises(ValueError, match="same name"):
        hvd.allreduce_async(ones, name="twice")
    with pytest.raises(hvd.HorovodInternalError, match="rank-zero"):
        hvd.allgather(torch.tensor(1.0))
    if size == 1:
        return
    for call, text in (
        (lambda: hvd.allreduce(torch.ones(rank + 1)), "tensor shapes"),
        (lambda: hvd.allreduce(torch.ones(6, dtype=torch.float32 if rank else torch.int32)), "data types"),
        (lambda: hvd.allreduce(ones, op=hvd.Sum if rank else hvd.Max), "reduction operation"),
        (lambda: hvd.allreduce(ones, prescale_factor=1.0 + rank), "prescale"),
        (lambda: hvd.broadcast(ones, min(rank, 1)), "root ranks"),
        (lambda: hvd.allgather(torch.ones(2, rank + 1)), "dimension 1"),
    ):
        # In names of their own, so that ranks that catch an error at once do not meet the others' next call.
        with pytest.raises(hvd.HorovodInternalError, match=text) as caught:
            call()
        assert "rank 0: " in str(caught.value)
        assert "rank 1: " in str(caught.value)
        assert "test_horovod_ops.py:" in str(caught.value)
    assert hvd.allreduce(ones, op=hvd.Sum).tolist() == [size] * 4  # the ranks continue


def joining() -> None:
    """Rank r has r batches; each average divides by all ranks."""
    rank, size = hvd.rank(), hvd.size()
    for number in range(rank):
        averaged = hvd.allreduce(torch.full((2,), 6.0), name=f"batch {number}")
        present = size - 1 - number
        assert averaged.tolist() == [6.0 * present / size] * 2
    if rank == size - 1 and size > 1:
        with pytest.raises(hvd.HorovodInternalError, match="Allgather is not supported with Join"):
            hvd.allgather(torch.ones(1))
        with pytest.raises(hvd.HorovodInternalError, match="op=Min is not supported"):
            hvd.allreduce(torch.ones(1), op=hvd.Min)
    last = hvd.join()
    assert hvd.allgather_object(last) == [last] * size
    if size > 1:
        assert last == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size  # numbered alike again


def process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        with pytest.raises(ValueError, match="duplicate"):
            hvd.add_process_set([0])
        return
    even, odd = hvd.add_process_set(range(0, size, 2)), hvd.add_process_set(list(range(1, size, 2)))
    own = even if rank % 2 == 0 else odd
    assert own.included()
    assert own.size() == len(own.ranks or ())
    assert own.rank() == (own.ranks or []).index(rank)
    assert hvd.allgather(torch.tensor([rank]), process_set=own).tolist() == own.ranks
    total = sum(own.ranks or ())
    assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=own).item() == total
    assert hvd.broadcast(torch.tensor([rank]), (own.ranks or [])[-1], process_set=own).item() == (own.ranks or [])[-1]
    other = odd if own is even else even
    with pytest.raises(ValueError, match="not a member"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="not part of"):
        other.rank()
    with pytest.raises(ValueError, match="duplicate"):
        hvd.add_process_set(even.ranks or [])
    hvd.barrier(own)
    assert hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)
    assert not hvd.remove_process_set(odd)
    assert odd.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched process_set names"):
        hvd.add_process_set([rank])


def adasum() -> None:
    """Orthogonal vectors add up, equal ones stay."""
    rank, size = hvd.rank(), hvd.size()
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="non-power of 2"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        return
    basis = torch.zeros(4)
    basis[rank] = 2.0
    assert hvd.allreduce(basis, op=hvd.Adasum).tolist() == [2.0] * size + [0.0] * (4 - size)
    assert torch.allclose(hvd.allreduce(torch.ones(3), op=hvd.Adasum), torch.ones(3), rtol=1e-6)


def adasum_of_hosts(hosts: tuple[tuple[int, ...], ...]) -> None:
    """As for tensors on GPUs: the mean over the ranks of a host, and Adasum of the hosts' means."""
    own = torch.zeros(2)
    own[next(number for number, ranks in enumerate(hosts) if hvd.rank() in ranks)] = hvd.rank()
    means = [sum(ranks) / len(ranks) for ranks in hosts]
    orthogonal, equal = hvd.grouped_allreduce([own, torch.ones(3)], op=hvd.Adasum)
    assert orthogonal.tolist() == [*means, 0.0][:2]
    assert torch.allclose(equal, torch.ones(3), rtol=1e-6)


def like_gpus(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.compat.horovod.torch.adasum.combines_hosts", lambda device_type: True)
        patch.setattr(Runtime, "_gather_hosts", lambda self, control: ([len(hosts[0])] * self.world.world_size, hosts))
        if len({len(ranks) for ranks in hosts}) > 1 or len(hosts) == 3:
            with pytest.raises(NotImplementedError, match="GPU Adasum"):
                in_world(lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum))
        else:
            in_world(adasum_of_hosts, hosts)


@pytest.mark.parametrize(
    "hosts", [((0, 1, 2),), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1), (2,)), ((0,), (1,), (2,))]
)
def test_adasum_of_gpus_combines_hosts(hosts: tuple[tuple[int, ...], ...]) -> None:
    run_ranks(like_gpus, sum(map(len, hosts)), hosts, init=False)


def sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    dense = torch.zeros(5, 2)
    dense[rank % 5] = rank + 1.0
    warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch 2.11 says so, whatever it is told
    handle = hvd.sparse_allreduce_async(dense.to_sparse(1), name="sparse", op=hvd.Average)
    assert torch.allclose(handle().to_dense(), hvd.allreduce(dense), rtol=1e-6)
    assert size >= 1


CHECKS = (basics, reductions, scaling, any_order, movement, gradients, mistakes, joining, process_sets, adasum, sparse)


def run_checks(names: list[str]) -> None:
    for name in names:
        in_world(globals()[name])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_operations(world_size: int) -> None:
    run_ranks(run_checks, world_size, [check.__name__ for check in CHECKS], init=False)


def over_gloo() -> None:
    torch.distributed.group.WORLD  # noqa: B018 - the script's own group, which hvd.init() takes over
    in_world(lambda: [check() for check in (scaling, any_order, movement, gradients, process_sets)])
    assert torch.distributed.is_initialized()


def test_operations_over_gloo_in_the_scripts_own_group() -> None:
    run_ranks(over_gloo, 2, backend="gloo")


def before_init() -> None:
    for call in (hvd.size, hvd.rank, hvd.stop_timeline, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
            call()
    hvd.init(process_sets=[hvd.ProcessSet([0])] if hvd.is_initialized() else None)
    hvd.shutdown()
    with pytest.raises(InputError, match="subset"):
        hvd.init(comm=[1])
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1, 0])]
    hvd.init(process_sets=sets)
    assert [one.process_set_id for one in sets] == [1, 2]
    assert sets[1].ranks == [0, 1]
    hvd.shutdown()
    assert [one.process_set_id for one in sets] == [None, None]
    with pytest.raises(InputError, match="entry number 1 is a duplicate"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    assert not hvd.is_initialized()


def test_init_with_process_sets() -> None:
    run_ranks(before_init, 3, init=False)


def leaving() -> str:
    hvd.init()
    if hvd.rank() == 1:
        hvd.shutdown()
        return ""
    with pytest.raises(hvd.HorovodInternalError, match="rank 1") as caught:
        hvd.allreduce(torch.ones(1))
    with pytest.raises(hvd.HorovodInternalError):  # and every later call
        hvd.allreduce_async(torch.ones(1))
    hvd.shutdown()
    return str(caught.value)


def test_a_rank_that_leaves_is_named() -> None:
    assert "RankLost" in run_ranks(leaving, 2, init=False)[0]


def at_odds() -> str:
    hvd.init()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "_MAX_FRUITLESS", 200)  # rounds, else 5000
        with pytest.raises(hvd.HorovodInternalError, match="all ranks wait") as caught:
            hvd.allreduce(torch.ones(1), name=f"of rank {hvd.rank()}")
    hvd.shutdown()
    return str(caught.value)


def test_ranks_that_wait_for_different_things_are_told_within_seconds() -> None:
    for text in run_ranks(at_odds, 2, init=False):
        for rank in range(2):
            assert f"rank {rank}: allreduce.of rank {rank} at " in text


def traced(path: str) -> None:
    hvd.init()
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="a")
    hvd.synchronize(hvd.allgather_async(torch.ones(3), name="b"))
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(3), name="c")
    hvd.shutdown()


def test_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_ranks(traced, 2, str(path), init=False)
    events = json.loads(path.read_text())
    names = {event["name"] for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_ALLGATHER", "ALLGATHER", "CYCLE_START"} <= names
    rows = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    assert {"allreduce.a", "allgather.b"} <= rows.keys()
    assert "allreduce.c" not in rows
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    assert {event["pid"] for event in spans} == {rows["allreduce.a"], rows["allgather.b"]}
