"""Names that torch had: the functions over several tensors of one process, on every group; and the rest in a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launching import Launches
from lockstep.compat import legacy
from lockstep.errors import InputError, InputTypeError
from lockstep.testing import run_ranks

NUM_DEVICES = 3


def value(rank: int, device: int, size: int = 2) -> torch.Tensor:
    """What device `device` of process `rank` holds: small whole numbers, whose sums are exact."""
    return torch.arange(size, dtype=torch.float32) + 10 * rank + 3 * device


def held(rank: int) -> list[torch.Tensor]:
    return [value(rank, device) for device in range(NUM_DEVICES)]


def everything(world_size: int) -> list[torch.Tensor]:
    return [tensor for rank in range(world_size) for tensor in held(rank)]


def as_lists(tensors: Any) -> Any:
    return tensors.tolist() if isinstance(tensors, torch.Tensor) else [as_lists(each) for each in tensors]


def call(run: Callable[..., Any], is_async: bool) -> None:
    handle = run(async_op=is_async)
    assert (handle is not None) is is_async
    if handle is not None:
        assert handle.wait() is True
        assert handle.is_completed()
        handle.wait()


def reductions(is_async: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    found = {}
    for name in ("SUM", "MAX", "MIN", "PRODUCT", "AVG"):
        op = getattr(dist.ReduceOp, name)
        tensors = held(rank)
        call(lambda tensors=tensors, op=op, **how: legacy.all_reduce_multigpu(tensors, op, **how), is_async)
        found[name] = as_lists(tensors)
    tensors = held(rank)
    call(lambda **how: legacy.reduce_multigpu(tensors, dst=0, dst_tensor=2, **how), is_async)
    found["reduce"] = as_lists(tensors)
    return found


def movements(is_async: bool) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors = held(rank)
    call(lambda **how: legacy.broadcast_multigpu(tensors, src=world_size - 1, src_tensor=1, **how), is_async)
    gathered = [[torch.empty(2) for _ in range(world_size * NUM_DEVICES)] for _ in range(NUM_DEVICES)]
    call(lambda **how: legacy.all_gather_multigpu(gathered, held(rank), **how), is_async)
    outputs = [torch.empty(2) for _ in range(NUM_DEVICES)]
    inputs = [
        [value(rank, device) * (1 + number) for number in range(world_size * NUM_DEVICES)]
        for device in range(NUM_DEVICES)
    ]
    call(lambda **how: legacy.reduce_scatter_multigpu(outputs, inputs, **how), is_async)
    return {"broadcast": as_lists(tensors), "gathered": as_lists(gathered), "scattered": as_lists(outputs)}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("backend", "world_size"), [("lockstep", 1), ("lockstep", 3), ("gloo", 2)])
def test_each_device_counts_as_a_rank(backend: str, world_size: int, is_async: bool) -> None:
    stacked = torch.stack(everything(world_size))
    expected = {
        "SUM": stacked.sum(0),
        "MAX": stacked.amax(0),
        "MIN": stacked.amin(0),
        "PRODUCT": stacked.prod(0),
        "AVG": stacked.sum(0) / len(stacked),
    }
    for rank, found in enumerate(run_ranks(reductions, world_size, is_async, backend=backend)):
        for name, result in expected.items():
            assert found[name] == [result.tolist()] * NUM_DEVICES, name
        own = as_lists(held(rank))
        assert found["reduce"] == ([*own[:2], stacked.sum(0).tolist()] if rank == 0 else own)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_tensors_are_numbered_by_process_and_device(world_size: int, is_async: bool) -> None:
    stacked = torch.stack(everything(world_size))
    for rank, found in enumerate(run_ranks(movements, world_size, is_async)):
        assert found["broadcast"] == [value(world_size - 1, 1).tolist()] * NUM_DEVICES
        assert found["gathered"] == [stacked.tolist()] * NUM_DEVICES
        total = stacked.sum(0)
        places = [rank * NUM_DEVICES + device for device in range(NUM_DEVICES)]
        assert found["scattered"] == [(total * (1 + place)).tolist() for place in places]


def in_a_group() -> Any:
    group = dist.new_group([1])
    tensors = held(dist.get_rank())
    legacy.all_reduce_multigpu(tensors, group=group)
    handle = legacy.all_reduce_multigpu(held(dist.get_rank()), group=group, async_op=True)
    assert handle.wait()
    return as_lists(tensors)


def test_processes_outside_the_group_are_left_alone() -> None:
    outside, inside = run_ranks(in_a_group, 2)
    assert outside == as_lists(held(0))
    assert inside == [torch.stack(held(1)).sum(0).tolist()] * NUM_DEVICES


def refusals() -> list[str]:
    one, other = torch.ones(2), torch.ones(3)
    calls = [
        lambda: legacy.all_reduce_multigpu(one),
        lambda: legacy.all_reduce_multigpu([]),
        lambda: legacy.all_reduce_multigpu([one, other]),
        lambda: legacy.all_reduce_multigpu([one > 0, one]),
        lambda: legacy.broadcast_multigpu([one], 0, src_tensor=1),
        lambda: legacy.reduce_multigpu([one], 0, dst_tensor=-1),
        lambda: legacy.all_gather_multigpu([[one]], [one, one]),
        lambda: legacy.all_gather_multigpu([[one, one]], [one]),
        lambda: legacy.reduce_scatter_multigpu([one], [[other, one]]),
        lambda: legacy.reduce_scatter_multigpu([one], []),
    ]
    found = []
    for each in calls:
        with pytest.raises((InputError, InputTypeError)) as caught:
            each()
        found.append(str(caught.value))
    return found


def test_what_cannot_be_is_turned_away_before_anybody_waits() -> None:
    expected = [
        "must be a list of tensors",
        "must be a list of tensors",
        "one shape and dtype, got (2,) torch.float32, (3,) torch.float32",
        "torch.bool",
        "src_tensor=1, but there are 1 tensors",
        "dst_tensor=-1",
        "needs 2 lists",
        "needs 1 tensors",
        "one shape and dtype",
        "needs 1 lists",
    ]
    (found,) = run_ranks(refusals, 1)
    assert all(words in text for words, text in zip(expected, found, strict=True)), found


def test_old_script_runs_unedited(launches: Launches) -> None:
    """Everything in the table of `lockstep.compat.legacy`, in one script, as such scripts said it."""
    script = launches.script(
        """
        import warnings
        warnings.simplefilter('ignore')
        import torch
        import torch.distributed as dist
        from torch._six import container_abcs, inf, int_classes, string_classes
        from torch.autograd import Variable
        from torch.utils.data import BatchSampler, DataLoader, Sampler
        from torch.utils.data.distributed import DistributedSampler
        import torch.distributed.deprecated as old_dist
        import torch.cuda.comm

        assert isinstance('x', string_classes) and inf > 1e9 and hasattr(container_abcs, 'Mapping')
        world = int(os.environ['WORLD_SIZE'])
        dist.init_process_group('tcp', init_method='file://meeting', world_size=world, rank=RANK, group_name='all')
        assert os.path.exists('meeting') or RANK, os.listdir('.')
        assert old_dist.get_rank() == RANK and dist.get_backend() == 'gloo'

        tensors = [torch.ones(1), torch.ones(1)]
        dist.all_reduce_multigpu(tensors, op=dist.reduce_op.SUM)
        old_dist.all_reduce(tensors[0], op=dist.reduce_op.MAX, group=dist.group.WORLD)
        print('sum', [each.item() for each in tensors])

        class Halves(Sampler):
            def __init__(self, data):
                super(Halves, self).__init__(data)
                self.data = data
            def __iter__(self):
                return iter(range(len(self.data) // 2))
            def __len__(self):
                return len(self.data) // 2

        data = list(range(16))
        sizes = [len(batch) for batch in DataLoader(data, batch_size=16 / float(world), shuffle=True)]
        halves = [len(batch) for batch in BatchSampler(Halves(data), 4.0, False)]
        print('batches', sizes, [len(b) for b in DataLoader(data, 8.0, sampler=Halves(data))], halves)
        for wrong in (lambda: DataLoader(data, batch_size=2.5), lambda: BatchSampler(data, 2.5, False)):
            try:
                wrong()
            except ValueError as error:
                print('refused', 'int(2.5)' in str(error))

        output, target = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]]), torch.tensor([1, 2])
        pred = output.topk(2, 1, True, True)[1].t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        print('accuracy', [correct[:k].view(-1).float().sum(0).item() for k in (1, 2)])
        import argparse, numpy, pickle
        held = {'args': argparse.Namespace(lr=0.1, arch='resnet18'), 'best': numpy.float64(0.5), 'mean': numpy.ones(2)}
        held.update(count=numpy.int64(3), flag=numpy.bool_(True))
        torch.save(held, f'checkpoint-{RANK}.pth.tar')
        again = torch.load(f'checkpoint-{RANK}.pth.tar', map_location='cpu')
        assert again['args'].arch == 'resnet18' and again['best'] == 0.5 and again['mean'].sum() == 2 and again['flag']
        class Other: pass
        torch.save(Other(), f'other-{RANK}')
        try:
            torch.load(f'other-{RANK}')
        except pickle.UnpicklingError:
            print('refused True')
        v = Variable(torch.ones(2), volatile=True)
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        schedulers = torch.optim.lr_scheduler
        schedulers.ReduceLROnPlateau(optimizer, 'min', patience=2, verbose=True).step(1.0)
        step = schedulers.StepLR(optimizer, 1, gamma=0.5, verbose=True)
        optimizer.step()
        step.step()
        assert optimizer.param_groups[0]['lr'] == 0.5
        dist.destroy_process_group()
        """
    )
    done = launches.run("--nproc=2", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == sorted(
        [
            "sum [4.0, 4.0]",
            "batches [8, 8] [8] [4, 4]",
            "refused True",
            "refused True",
            "refused True",
            "accuracy [1.0, 2.0]",
        ]
        * 2
    )
