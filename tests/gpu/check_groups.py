"""Groups: nccl at one rank, and two ranks that share a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import lockstep
from gpu_context import Context, Skip, same
from lockstep import env
from lockstep.comm.mixed_group import MixedProcessGroup


def one_rank_of_nccl(run: Context) -> dict[str, Any]:
    """`lockstep.init()` chooses nccl and the GPU by itself, and every verb runs."""
    world = lockstep.init(seed=0) if run.is_cuda else run.init("nccl", seed=0)
    expected = ("nccl", "cuda:0") if run.is_cuda else ("gloo", "cpu")
    same((world.backend, str(world.device)), expected, "backend and device")
    if run.is_cuda:
        same(torch.cuda.current_device(), 0, "current device")
    found = verbs(run, skip=() if run.is_cuda else ("reduce_scatter", "all_to_all"))
    dist.barrier()
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"rank": 0})
    same(objects, [{"rank": 0}], "all_gather_object")
    pair = dist.new_group([0])
    tensor = torch.ones(2, device=run.device)
    dist.all_reduce(tensor, group=pair)
    same(tensor.tolist(), [1.0, 1.0], "all_reduce in a group of one's own")
    world.shutdown()
    return {"verbs": found}


def two_ranks_of_nccl(run: Context) -> dict[str, Any]:
    """Every verb, between ranks that count as hosts of their own."""
    world = run.init("nccl", seed=0)
    found = verbs(run, skip=() if run.is_cuda else ("reduce_scatter", "all_to_all"))
    dist.barrier()
    world.shutdown()
    return {"verbs": found}


def verbs(run: Context, skip: tuple[str, ...] = (), group: Any = None) -> int:
    """Every verb of tensors on the device, at one rank or two, against what ranks 0 … W-1 derive by hand."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ranks = range(size)

    def of(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=run.device)

    number = 0
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        tensor = of(1 + rank, 10, dtype=dtype)
        dist.all_reduce(tensor, group=group)
        same(tensor.tolist(), [sum(1.0 + each for each in ranks), 10.0 * size], f"all_reduce of {dtype}")
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        work.wait()
        same(tensor.tolist(), [sum(1.0 + each for each in ranks), 10.0 * size], f"asynchronous all_reduce of {dtype}")
        number += 2
    tensor = of(5 + rank)
    dist.broadcast(tensor, size - 1, group=group)
    same(tensor.item(), 4.0 + size, "broadcast")
    rows = [of(0) for _ in ranks]
    dist.all_gather(rows, of(7 + rank), group=group)
    same([row.item() for row in rows], [7.0 + each for each in ranks], "all_gather")
    number += 2
    if "reduce_scatter" not in skip:
        part = of(0)
        dist.reduce_scatter(part, [of(each + rank) for each in ranks], group=group)
        same(part.item(), sum(float(rank + each) for each in ranks), "reduce_scatter")
        number += 1
    if "all_to_all" not in skip:
        outputs = [of(0) for _ in ranks]
        dist.all_to_all(outputs, [of(10 * rank + each) for each in ranks], group=group)
        same([each.item() for each in outputs], [10.0 * each + rank for each in ranks], "all_to_all")
        number += 1
    found = functional.all_reduce(of(2 + rank), "sum", group if group is not None else dist.group.WORLD)
    same(float(found + 0), sum(2.0 + each for each in ranks), "functional all_reduce")
    large = torch.full((3_000_001,), 0.5, device=run.device)
    dist.all_reduce(large, group=group)
    same((large.min().item(), large.max().item()), (0.5 * size, 0.5 * size), "3 million elements")
    return number + 2


def staged_verbs(run: Context) -> dict[str, Any]:
    """Over lockstep tensors of the GPU go through memory of the host."""
    world = run.init("lockstep")
    number = verbs(run)
    rank = world.rank
    device = run.device
    strided = torch.arange(6.0, device=device).view(2, 3).t()  # nccl's groups refuse it
    dist.all_reduce(strided)
    same(strided.tolist(), [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]], "transposed")
    to_root = torch.tensor([1.0 + rank], device=device)
    dist.reduce(to_root, 0)
    if rank == 0:
        same(to_root.item(), 3.0, "reduce")
    gathered = [torch.zeros(1, device=device) for _ in range(2)] if rank == 0 else None
    dist.gather(torch.tensor([3.0 + rank], device=device), gathered)
    same(None if gathered is None else [each.item() for each in gathered], [3.0, 4.0] if rank == 0 else None, "gather")
    scattered = torch.zeros(1, device=device)
    dist.scatter(scattered, [torch.tensor([8.0 + each], device=device) for each in range(2)] if rank == 0 else None)
    same(scattered.item(), 8.0 + rank, "scatter")
    for numel in (4, 1_000_000):
        message = torch.full((numel,), float(rank), device=device)
        if rank == 0:
            dist.send(message + 5, 1)
            dist.recv(message, 1)
            same(message[-1].item(), 6.0, f"send and recv of {numel}")
        else:
            dist.recv(message, 0)
            same(message[0].item(), 5.0, f"recv of {numel}")
            dist.send(message + 1, 0)
    later = torch.zeros(1000, device=device)
    work = dist.isend(torch.full((1000,), 2.0 + rank, device=device), 1 - rank)
    other = dist.irecv(later, 1 - rank)
    assert work is not None
    assert other is not None
    other.wait()
    work.wait()
    same(later[-1].item(), 3.0 - rank, "isend and irecv")
    sparse = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,), device=device)
    dist.all_reduce(sparse)
    same(sparse.to_dense().tolist(), [1.0, 1.0, 4.0, 0.0], "all_reduce of a sparse tensor")
    mixed = torch.tensor([1.0]) if rank == 0 else torch.tensor([1.0], device=device)
    dist.all_reduce(mixed)
    same(mixed.item(), 2.0, "one rank on the CPU, one on the GPU")
    world.shutdown()
    return {"verbs": number + 9}


def staged_order(run: Context) -> dict[str, Any]:
    """A slow kernel in front of a call must be over before the call reads; one behind it must read its result."""
    world = run.init("lockstep")
    streams = [torch.cuda.Stream() for _ in range(2)] if run.is_cuda else [None]
    for trial in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                tensor = torch.zeros(1 << 20, device=run.device)
                _keep_busy(run)
                tensor.add_(world.rank + trial)
                work = dist.all_reduce(tensor, async_op=True)
                assert work is not None
                _keep_busy(run)  # beside it
                work.wait()
                result = tensor * 2
                del tensor, work
                other = torch.full((1 << 20,), -1.0, device=run.device)  # may get the memory that was just let go
            expected = 2.0 * (2 * trial + 1)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            same((result.min().item(), result.max().item()), (expected, expected), f"trial {trial}")
            del other
    futures = []
    for _ in range(4):
        tensor = torch.ones(1000, device=run.device)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        futures.append(work.get_future().then(lambda done: done.value()[0] * 3))
    for future in futures:
        same(future.wait().max().item(), 6.0, "a future's callback")
    world.shutdown()
    return {}


def _keep_busy(run: Context) -> None:
    """Some milliseconds of work on the current stream."""
    if run.is_cuda:
        matrix = torch.ones(1500, 1500, device=run.device)
        for _ in range(20):
            matrix = (matrix @ matrix).clamp_(max=1.0)


_GLOO_CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda tensor: dist.all_reduce(tensor),
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "all_gather": lambda tensor: dist.all_gather([torch.empty_like(tensor) for _ in range(2)], tensor),
    "reduce_scatter": lambda tensor: dist.reduce_scatter(torch.empty_like(tensor), [tensor, tensor]),
}


def _succeeds(call: Callable[[torch.Tensor], Any], run: Context) -> bool:
    try:
        call(torch.ones(4, device=run.device))
    except RuntimeError:
        return False
    return True


def gloo_verbs(run: Context) -> dict[str, Any]:
    """What gloo can do with tensors of a GPU, for comparison."""
    world = run.init("gloo")
    outcomes = {name: _succeeds(call, run) for name, call in _GLOO_CALLS.items()}
    done = [name for name, works in outcomes.items() if works]
    refused = [name for name, works in outcomes.items() if not works]
    assert {"all_reduce", "broadcast"} <= set(done), f"gloo refused {refused}"
    world.shutdown()
    return {"works": ", ".join(done), "refused": ", ".join(refused)}


def mixed(run: Context) -> dict[str, Any]:
    """In "cpu:lockstep,cuda:nccl" tensors of the CPU go to ours, those of the GPU to nccl."""
    if not run.is_cuda:
        raise Skip("without a GPU nothing is behind the group")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:lockstep,cuda:nccl")
    group: Any = dist.group.WORLD
    assert isinstance(group, MixedProcessGroup), type(group)
    same(type(group.get_backend(run.device)).__name__.startswith("ProcessGroupNCCL"), True, "behind it is NCCL")
    size = dist.get_world_size()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    same(tensor.tolist(), [float(size)] * 3, "all_reduce of a tensor of the CPU")
    number = group.engine.recorder.number
    if size == 1:
        found = verbs(run)
        same(group.engine.recorder.number, number, "calls of ours while nccl moves tensors")
        pair: Any = dist.new_group([0])
        dist.all_reduce(torch.ones(2, device=run.device), group=pair)
        engine = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2, device=run.device), device_ids=[0])
        engine(torch.ones(3, 4, device=run.device)).sum().backward()
        dist.destroy_process_group(pair)
        dist.destroy_process_group()
        return {"verbs": found}
    error = expect_nccl_error(run)
    dist.all_reduce(tensor)  # ours continues working
    same(tensor.tolist(), [4.0] * 3, "all_reduce behind an error of nccl")
    return {"nccl says": error}


def mixed_batch(run: Context) -> dict[str, Any]:
    """Large messages that neighbours send to each other, or one rank to itself, in one batch: none waits in vain."""
    if not run.is_cuda:
        raise Skip("without a GPU nothing is behind the group")
    rank, size, device = env.RANK.get() or 0, env.WORLD_SIZE.get() or 1, run.device
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:lockstep,cuda:nccl")
    peer = (rank + 1) % size
    sent, found = torch.full((16 << 20,), 1.0 + rank, device=device), torch.zeros(16 << 20, device=device)
    ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, found, (rank - 1) % size)]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    value = 1.0 + (rank - 1) % size
    same((found.min().item(), found.max().item()), (value, value), "what came")
    same(len(works), 1, "handles of what nccl began in one")
    dist.destroy_process_group()
    return {"ranks": size}


def expect_nccl_error(run: Context) -> str:
    """nccl refuses two ranks on one GPU; the first line of how."""
    try:
        dist.all_reduce(torch.ones(3, device=run.device))
        torch.cuda.synchronize()
    except (RuntimeError, dist.DistBackendError) as error:
        text = str(error)
        assert "uplicate GPU" in text or "invalid usage" in text, text
        return next((line for line in text.splitlines() if "uplicate" in line), text.splitlines()[0])[:300]
    raise AssertionError("nccl took two ranks on one GPU")
