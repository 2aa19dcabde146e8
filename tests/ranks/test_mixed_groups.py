"""A lockstep group beside others, one for each kind of device: who moves what, and how they end.

Without a GPU the roles are swapped: "cpu:gloo,cuda:lockstep" has gloo behind a group of ours for tensors of the CPU.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.mixed_group import MixedProcessGroup
from lockstep.testing import run_ranks
from lockstep.torch_private.groups import open_groups

CPU = torch.device("cpu")
BACKEND = "cpu:gloo,cuda:lockstep"
# Torch 2.6 has no such attribute: it has a batch begin in one if its first tensor lies on a GPU.
ASKS_FOR_COALESCING = hasattr(dist.ProcessGroupGloo, "supports_coalescing")


def use_gloo_behind() -> tuple[list[str], list[float], int]:
    world: Any = dist.group.WORLD
    behind = world.behind(CPU)
    assert isinstance(world, MixedProcessGroup)
    assert isinstance(world.get_backend(CPU), dist.ProcessGroupGloo)
    assert dist.get_process_group_ranks(behind) == [0, 1]
    rank = float(dist.get_rank())
    number = world.engine.recorder.number
    found = []
    tensor = torch.tensor([1.0 + rank])
    dist.all_reduce(tensor)
    found.append(tensor.item())
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    found.append(tensor.item())
    rows = [torch.empty(1), torch.empty(1)]
    dist.all_gather(rows, torch.tensor([rank]))
    found.append(sum(row.item() for row in rows))
    found.append(functional.all_reduce(torch.tensor([rank + 2]), "sum", world).wait().item())
    if rank == 0:
        dist.send(torch.tensor([9.0]), 1)
    else:
        dist.recv(tensor, 0)
        found.append(tensor.item())
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, rank)
    found.append(sum(objects))
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((3, 2), rank)).sum().backward()
    assert model.module.weight.grad is not None
    found.append(model.module.weight.grad[0, 0].item())
    dist.barrier()
    return [str(device) for device in world._device_types], found, world.engine.recorder.number - number


def test_tensors_of_another_kind_go_to_the_group_behind() -> None:
    first, second = run_ranks(use_gloo_behind, 2, backend=BACKEND)
    # gloo's sums: 1 + 2, twice 3, 0 + 1, 2 + 3, what was sent, 0 + 1, and the mean of three rows of 0 and of 1. The
    # one call of ours is the barrier.
    assert first == (["cpu"], [3.0, 6.0, 1.0, 5.0, 1.0, 1.5], 1)
    assert second == (["cpu"], [3.0, 6.0, 1.0, 5.0, 9.0, 1.0, 1.5], 1)


class Recorder:
    """Stands for NCCL's group."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append(name)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def route() -> tuple[list[str], list[str], float]:
    world: Any = dist.group.WORLD
    recorder = Recorder()
    world._behind["cuda"] = recorder
    gpu = torch.ones(2).as_subclass(OnGpu)
    world.allreduce([gpu])
    world.allgather([[gpu, gpu]], [gpu])
    world.broadcast([gpu], dist.BroadcastOptions())
    world._allgather_base(gpu, gpu)
    world.send([gpu], 1, 0)
    own = torch.ones(1)
    world.allreduce([own]).wait()
    world.barrier().wait()
    kinds = [str(device) for device in world._device_types]
    world._behind.clear()
    return recorder.calls, kinds, own.item()


def test_each_verb_goes_by_the_device_of_its_tensors() -> None:
    verbs = ["allreduce", "allgather", "broadcast", "_allgather_base", "send"]
    outcomes = run_ranks(route, 2, backend="cpu:lockstep,cuda:nccl")
    assert outcomes == [(verbs, ["cpu", "cuda"], 2.0)] * 2


def batch_behind() -> tuple[list[str], int]:
    """What torch has a group begin in one if its backend can, as NCCL; gloo, which cannot, stands for that."""
    world: Any = dist.group.WORLD
    number, peer = world.engine.recorder.number, 1 - dist.get_rank()
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroupGloo, "supports_coalescing", True)
        for name in ("_start_coalescing", "send", "recv", "_end_coalescing"):
            patch.setattr(dist.ProcessGroup, name, lambda *_, name=name: calls.append(name))
        ops = [dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.irecv, torch.ones(2), peer, tag=3)]
        dist.batch_isend_irecv(ops)
    return calls, world.engine.recorder.number - number


@pytest.mark.skipif(not ASKS_FOR_COALESCING, reason="torch asks for the kind of device, of which there is none here")
def test_messages_of_a_batch_begin_in_one() -> None:
    calls = ["_start_coalescing", "send", "recv", "_end_coalescing"]
    assert run_ranks(batch_behind, 2, backend=BACKEND) == [(calls, 0)] * 2


def batch_of_both_kinds() -> tuple[list[float], list[str]]:
    """In one list, for a group and for what stands for NCCL's behind it; and lists that torch refuses."""
    group: Any = dist.new_group([1, 0])
    other: Any = dist.new_group([1, 0])
    group.put_behind("cuda", recorder := Recorder())  # type: ignore[arg-type]
    rank, found = dist.get_rank(), torch.zeros(1)
    gpu = torch.ones(2).as_subclass(OnGpu)

    def op(kind: Any, tensor: torch.Tensor, of: Any = group) -> dist.P2POp:
        return dist.P2POp(kind, tensor, 1 - rank, of)

    sent = op(dist.isend, torch.tensor([5.0 + rank]))
    for work in dist.batch_isend_irecv([sent, op(dist.isend, gpu), op(dist.irecv, gpu), op(dist.irecv, found)]):
        work.wait()
    for wrong in ([], [sent, op(dist.irecv, gpu, other)], [sent, 1], sent):
        with pytest.raises((ValueError, IndexError)):
            dist.batch_isend_irecv(wrong)  # type: ignore[arg-type]
    group._behind.clear()
    return found.tolist(), recorder.calls


def test_a_batch_may_hold_tensors_of_both_kinds() -> None:
    outcomes = run_ranks(batch_of_both_kinds, 2, backend="cpu:lockstep,cuda:nccl")
    calls = ["send", "recv"] if ASKS_FOR_COALESCING else ["_start_coalescing", "send", "recv", "_end_coalescing"]
    assert outcomes == [([6.0], calls), ([5.0], calls)]


def set_limits() -> tuple[list[float], list[float], list[str]]:
    """Of a group of ours, of gloo behind it, and of what stands for NCCL behind it."""
    world: Any = dist.group.WORLD
    world._behind["cuda"] = recorder = Recorder()
    gloo = world.get_backend(CPU)
    ours, behind = [], []
    for set_timeout, seconds in ((distributed_c10d._set_pg_timeout, 77), (world.set_timeout, 88)):
        set_timeout(timedelta(seconds=seconds))
        ours.append(world.engine.timeout_s)
        # Older releases do not tell.
        behind.append(gloo.options._timeout.total_seconds() if hasattr(gloo, "options") else float(seconds))
    del world._behind["cuda"]
    return ours, behind, recorder.calls


def test_the_limit_of_a_group_is_that_of_what_is_behind_it() -> None:
    assert run_ranks(set_limits, 2, backend=BACKEND) == [([77.0, 88.0], [77.0, 88.0], ["set_timeout"] * 2)] * 2


def make_and_destroy() -> tuple[int, int, int, bool]:
    before = len(open_groups())
    pair = dist.new_group([0, 1])
    made = len(open_groups())
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=pair)
    assert tensor.item() == 2.0
    dist.destroy_process_group(pair)
    after = len(open_groups())
    alone: Any = dist.new_group([0])
    return before, made, after, (alone is dist.GroupMember.NON_GROUP_MEMBER) == (dist.get_rank() == 1)


def test_a_group_ends_with_what_is_behind_it() -> None:
    assert run_ranks(make_and_destroy, 2, backend=BACKEND) == [(2, 4, 2, True)] * 2


def destroy_all() -> int:
    dist.destroy_process_group()
    return len(open_groups())


def test_all_end_together() -> None:
    assert run_ranks(destroy_all, 2, backend=BACKEND) == [0, 0]
