"""Horovod's and Apex's shims, as scripts for GPUs use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from check_engines import batches
from gpu_context import Context, close, make_model, same
from lockstep import env


def horovod(run: Context) -> dict[str, Any]:
    """A training as Horovod's examples write it: the weights of a plain one."""
    import horovod.torch as hvd  # type: ignore[import-not-found]

    if env.WORLD_SIZE.get() != 1:
        run.init("nccl")  # which hvd.init() takes over: by itself it would want a GPU for each rank
    hvd.init()
    if run.is_cuda:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        assert hvd.nccl_built() > 0
    reference = make_model(torch.float32, run.device)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    model = run.to(make_model(torch.float32, torch.device("cpu")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
    )
    for inputs, targets in batches(5, torch.float32, run.device):
        own = [each.chunk(hvd.size())[hvd.rank()] for each in (inputs, targets)]
        for each, network, (rows, labels) in ((plain, reference, (inputs, targets)), (optimizer, model, own)):
            each.zero_grad()
            cross_entropy(network(rows), labels).backward()
            each.step()
    worst = max(
        close(one.detach(), other.detach(), 1e-6, "weights")
        for one, other in zip(model.parameters(), reference.parameters(), strict=True)
    )
    hvd.shutdown()
    return {"worst": worst}


def horovod_verbs(run: Context) -> dict[str, Any]:
    """Every operation, also asynchronous, compressed and scaled, on tensors of the device; at any number of ranks."""
    import horovod.torch as hvd

    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    tensor = run.to(torch.full((1000,), 1.0 + rank))
    mean = (size + 1) / 2
    for _ in range(3):
        same(float(hvd.allreduce(tensor).max()), mean, "allreduce")
        same(float(hvd.allreduce(tensor, op=hvd.Sum).max()), mean * size, "allreduce, Sum")
        same(float(hvd.allreduce(tensor, compression=hvd.Compression.fp16).max()), mean, "allreduce in fp16")
        same(float(hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5).max()), mean * size / 2, "prescale_factor")
        handles = [hvd.allreduce_async(tensor * number, name=f"t{number}", op=hvd.Sum) for number in range(10)]
        found = [float(hvd.synchronize(handle)[0]) for handle in reversed(handles)]
        same(found, [mean * size * number for number in reversed(range(10))], "allreduce_async")
        same(hvd.allgather(tensor[: rank + 1]).shape[0], size * (size + 1) // 2, "allgather")
        same(float(hvd.broadcast(tensor, root_rank=size - 1)[0]), float(size), "broadcast")
        received = hvd.alltoall(tensor[:size])
        same(
            (received[0] if isinstance(received, tuple) else received).tolist(),
            [1.0 + each for each in range(size)],
            "alltoall",
        )
        same(float(hvd.reducescatter(tensor, op=hvd.Sum)[0]), mean * size, "reducescatter")
        grouped = hvd.grouped_allreduce([tensor, tensor * 2], op=hvd.Sum)
        same([float(each[0]) for each in grouped], [mean * size, 2 * mean * size], "grouped_allreduce")
    same(grouped[0].device, run.device, "device")
    same(hvd.broadcast_object({"a": 1}, root_rank=0), {"a": 1}, "broadcast_object")
    hvd.barrier()
    hvd.shutdown()
    return {}


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.convolution(images)).relu().flatten(1))


_WEIGHTS = {"O0": torch.float32, "O1": torch.float32, "O2": torch.float16, "O3": torch.float16}


def apex(run: Context, level: str) -> dict[str, Any]:
    """Apex's ImageNet recipe at one opt level: the types that it promises, finite steps, a loss that falls."""
    from apex import amp  # type: ignore[import-not-found]
    from apex.parallel import DistributedDataParallel, convert_syncbn_model  # type: ignore[import-not-found]

    torch.manual_seed(0)
    world = run.init("nccl")
    model = run.to(convert_syncbn_model(_Images()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    model = DistributedDataParallel(model, delay_allreduce=True)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 8, 8, generator=generator).to(run.device)
    labels = torch.randint(5, (32,), generator=generator).to(run.device)
    losses = []
    for _ in range(40):
        loss = cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()
    same(model.module.convolution.weight.dtype, _WEIGHTS[level], "dtype of weights")
    same(model.module.norm.weight.dtype, torch.float16 if level == "O3" else torch.float32, "dtype of the norm")
    same(model.module.convolution.weight.device, run.device, "device")
    assert values[-1] < values[0] * 0.8, f"the loss went from {values[0]:.3g} to {values[-1]:.3g}"
    if level in ("O1", "O2"):
        state = amp.state_dict()
        assert state["loss_scaler0"]["loss_scale"] > 0
    world.shutdown()
    return {"loss at first": values[0], "loss at last": values[-1]}
