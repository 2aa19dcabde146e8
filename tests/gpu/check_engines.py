"""Gradients, statistics and losses: two ranks that share a GPU, or one on nccl, against one process."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import lockstep
from gpu_context import Context, Skip, close, make_model, same
from lockstep.errors import CollectiveMismatch

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
_ROWS = 24


def batches(count: int, dtype: torch.dtype, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches: float [24, 12], targets int64 [24]."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(_ROWS, 12, generator=generator, dtype=torch.float64).to(device, dtype),
            torch.randint(5, (_ROWS,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def wrap(engine: str, model: nn.Module, run: Context, **options: Any) -> nn.Module:
    """The model in Lockstep's engine or torch's."""
    kind: Any = lockstep.DistributedDataParallel if engine == "lockstep" else nn.parallel.DistributedDataParallel
    return kind(model, device_ids=[0] if run.is_cuda else None, **options)


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's even part of a global batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def train_like_one_process(run: Context, engine: str, backend: str) -> dict[str, Any]:
    """Five steps of momentum, in float64 to 1e-12 and in float32 to rounding; then accumulation under no_sync."""
    world = run.init(backend)
    facts = {}
    for dtype, tolerance in _TOLERANCE.items():
        reference = make_model(dtype, run.device)
        model = wrap(engine, make_model(dtype, run.device, seed=world.rank), run)  # rank 0's is given to all
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (reference, model)]
        worst = 0.0
        for inputs, targets in batches(5, dtype, run.device):
            for optimizer in optimizers:
                optimizer.zero_grad()
            cross_entropy(reference(inputs), targets).backward()
            cross_entropy(model(mine(inputs)), mine(targets)).backward()
            worst = max(worst, _compare(model, reference, tolerance))
            for optimizer in optimizers:
                optimizer.step()
        _accumulate(model, reference, dtype, run, tolerance)
        facts[str(dtype)] = worst
    _unused(run, engine)
    world.shutdown()
    return facts


def _compare(model: nn.Module, reference: nn.Module, tolerance: float) -> float:
    found = dict(model.module.named_parameters())
    worst = 0.0
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        grad = found[name].grad
        assert grad is not None, f"{name} has no gradient"
        worst = max(worst, close(grad, parameter.grad, tolerance, f"gradient of {name}"))
        close(found[name].detach(), parameter.detach(), tolerance, name)
    return worst


def _accumulate(model: nn.Module, reference: nn.Module, dtype: torch.dtype, run: Context, tolerance: float) -> None:
    reference.zero_grad()
    model.zero_grad()
    (first, labels), (second, more) = batches(2, dtype, run.device)
    for inputs, targets in ((first, labels), (second, more)):
        cross_entropy(reference(inputs), targets).backward()
    with model.no_sync():
        cross_entropy(model(mine(first)), mine(labels)).backward()
    cross_entropy(model(mine(second)), mine(more)).backward()
    _compare(model, reference, tolerance * 10)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs: torch.Tensor, second: bool) -> torch.Tensor:
        self.seen.add_(1.0)
        return self.two(inputs) if second else self.one(inputs)


def _unused(run: Context, engine: str) -> None:
    """Ranks may use different branches; buffers are those of rank 0."""
    torch.manual_seed(0)
    model = wrap(engine, _Branches().to(run.device), run, find_unused_parameters=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = torch.ones(2, 3, device=run.device)
    for _ in range(3):
        model.zero_grad()
        model(inputs, rank == 1).sum().backward()
    grad = model.module.one.weight.grad
    assert grad is not None
    close(grad, torch.full((2, 3), 2.0 / size, device=run.device), 1e-6, "gradient of a branch of rank 0")
    if engine == "lockstep":
        assert model.module.never.weight.grad is None
    same(model.module.seen.tolist(), [3.0, 3.0], "a buffer")


class _Columns(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(rows, 12, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(5, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


def uneven_batches(run: Context, backend: str) -> dict[str, Any]:
    """Global batches of 7, the last of 1: a filler on rank 1; weighted by tags, and by sizes where tags are lost."""
    world = run.init(backend, seed=0)
    data = _Columns(22)
    reference = make_model(torch.float64, run.device)
    model = lockstep.DistributedDataParallel(make_model(torch.float64, run.device))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    loader = lockstep.DataLoader(data, batch_size=7, device=run.device, prefetch=2)
    worst = 0.0
    for epoch in range(2):
        for number, (inputs, targets) in enumerate(loader):
            for optimizer in optimizers:
                optimizer.zero_grad()
            rows = slice(7 * number, 7 * number + 7)
            whole, labels = data.inputs[rows].to(run.device), data.targets[rows].to(run.device)
            cross_entropy(reference(whole), labels).backward()
            inputs = inputs if epoch == 0 else inputs * 1.0  # memory of its own, which has no tag
            cross_entropy(model(inputs), targets).backward()
            worst = max(worst, _compare(model, reference, 1e-12))
            for optimizer in optimizers:
                optimizer.step()
    world.shutdown()
    return {"worst": worst}


def batchnorm(run: Context, backend: str) -> dict[str, Any]:
    """SyncBatchNorm in our engine: outputs, gradients and running statistics of one process."""
    world = run.init(backend)
    facts = {}
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 5e-5)):
        torch.manual_seed(0)
        reference = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
        )
        reference = reference.to(run.device, dtype)
        synced = lockstep.convert_sync_batchnorm(copy.deepcopy(reference))
        model = lockstep.DistributedDataParallel(synced)
        inputs = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(3)).to(run.device, dtype)
        for _ in range(3):
            reference.zero_grad()
            model.zero_grad()
            expected = reference(inputs)
            expected.square().mean().backward()
            output = model(mine(inputs))
            output.square().mean().backward()
            close(output.detach(), mine(expected.detach()), tolerance, "output")
            facts[str(dtype)] = _compare(model, reference, tolerance)
        for name, buffer in reference.named_buffers():
            if buffer.is_floating_point():
                close(dict(synced.named_buffers())[name], buffer, tolerance, name)
    half = lockstep.SyncBatchNorm(8).to(run.device)
    for layout in (torch.contiguous_format, torch.channels_last):
        values = torch.randn(4, 8, 5, 5, device=run.device, dtype=torch.bfloat16).to(memory_format=layout)
        values.requires_grad_()
        with torch.autocast(run.device.type, torch.bfloat16):
            out = half(values)
        out.float().square().mean().backward()
        same(out.dtype, torch.bfloat16, "dtype under autocast")
        assert values.grad is not None
        assert half.weight.grad is not None
        same((values.grad.dtype, half.weight.grad.dtype), (torch.bfloat16, torch.float32), "dtypes of gradients")
        assert values.grad.isfinite().all()
    world.shutdown()
    return facts


def claims(run: Context, backend: str) -> dict[str, Any]:
    """Ranks with unequal numbers of rows and no loader: after steps that are alike, an error on both, if late."""
    world = run.init(backend)
    model = lockstep.DistributedDataParallel(make_model(torch.float32, run.device))
    found, step = "", 0
    try:
        for step in range(60):
            rows = 6 + (world.rank if step >= 20 else 0)
            model(torch.ones(rows, 12, device=run.device)).square().mean().backward()
            model.zero_grad()
    except CollectiveMismatch as error:
        found = str(error)
    assert "different batches" in found, f"nobody noticed: {found}"
    assert step >= 20, f"too soon, in step {step}: {found}"
    return {"in step": step}


def losses(run: Context, backend: str) -> dict[str, Any]:
    """Losses that are no mean over samples: one process's value and gradients."""
    world = run.init(backend)
    reference = make_model(torch.float64, run.device)
    model = lockstep.DistributedDataParallel(make_model(torch.float64, run.device))
    ((inputs, targets),) = batches(1, torch.float64, run.device)
    counted = torch.arange(_ROWS, device=run.device) % 5 < 2  # unequal numbers on the ranks

    def masked_mean(outputs: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, total: Any, mean: Any) -> Any:
        return mean((cross_entropy(outputs, labels, reduction="none") * mask).sum(), mask.sum())

    def plain_sum(outputs: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, total: Any, mean: Any) -> Any:
        return total(outputs.square().sum())

    def focal(outputs: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, total: Any, mean: Any) -> Any:
        # Every sample is in the total, and only the first rank has positives to divide by.
        is_first = torch.tensor(world.rank == 0 or len(outputs) == _ROWS, device=run.device)
        return mean(cross_entropy(outputs, labels, reduction="sum"), 3.0 * is_first)

    facts = {}
    for form in (masked_mean, plain_sum, focal):
        reference.zero_grad()
        model.zero_grad()
        expected = form(reference(inputs), targets, counted, lambda loss: loss, lambda loss, count: loss / count)
        expected.backward()
        loss = form(model(mine(inputs)), mine(targets), mine(counted), lockstep.sum, lockstep.mean)
        loss.backward()
        close(loss.detach(), expected.detach(), 1e-12, form.__name__)
        facts[form.__name__] = _compare(model, reference, 1e-12)
    reference.zero_grad()
    model.zero_grad()
    features = reference(inputs)
    (features @ features.t()).logsumexp(1).mean().backward()
    own = model(mine(inputs))
    (own @ lockstep.all_gather(own).t()).logsumexp(1).mean().backward()
    facts["all_gather"] = _compare(model, reference, 1e-11)
    reference.zero_grad()
    model.zero_grad()
    mse_loss(reference(inputs), torch.zeros_like(features)).backward()
    share = mse_loss(model(mine(inputs)), torch.zeros_like(own), reduction="sum") / features.numel()
    lockstep.global_loss(share * world.world_size).backward()
    facts["global_loss"] = _compare(model, reference, 1e-12)
    number, names = torch.tensor(world.rank + 1.0), torch.tensor([world.rank])  # on the CPU, as scripts count
    mean = sum(range(1, world.world_size + 1)) / (2 * world.world_size)
    close(lockstep.mean(number, 2), torch.tensor(mean), 1e-6, "mean of numbers on the CPU")
    same(lockstep.all_gather(names).tolist(), list(range(world.world_size)), "rows on the CPU")
    world.shutdown()
    return facts


def scaled_step(
    model: nn.Module,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """One step in half precision, clipped: float [n, 12], targets int64 [n]."""
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype):
        loss = cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def grad_scaler(run: Context) -> dict[str, Any]:
    """Half precision with a scaler, and bfloat16: ours and torch's engine take the same steps."""
    world = run.init("nccl")
    facts = {}
    for dtype in (torch.float16, torch.bfloat16):
        models, scalers, optimizers = [], [], []
        for engine in ("lockstep", "torch"):
            models.append(wrap(engine, make_model(torch.float32, run.device), run))
            scalers.append(torch.amp.GradScaler(run.device.type, init_scale=2.0**40, enabled=dtype is torch.float16))
            optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.1))
        for inputs, targets in batches(30, torch.float32, run.device):
            for model, scaler, optimizer in zip(models, scalers, optimizers, strict=True):
                scaled_step(model, optimizer, scaler, inputs, targets, dtype)
        same(scalers[0].get_scale(), scalers[1].get_scale(), "scale")
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            close(one.detach(), other.detach(), 1e-5, f"weights after {dtype}")
        facts[f"scale {dtype}"] = scalers[0].get_scale()
    if run.is_cuda:
        assert facts["scale torch.float16"] < 2.0**40, "no step overflowed, though the scale began too high"
    world.shutdown()
    return facts


def data_parallel(run: Context) -> dict[str, Any]:
    """One device: outputs and gradients are the module's."""
    reference = make_model(torch.float32, run.device)
    model = lockstep.DataParallel(make_model(torch.float32, run.device), device_ids=[0] if run.is_cuda else ["cpu"])
    ((inputs, targets),) = batches(1, torch.float32, run.device)
    cross_entropy(reference(inputs), targets).backward()
    cross_entropy(model(inputs.cpu()), targets).backward()
    return {"worst": _compare(model, reference, 1e-6)}


def compiled(run: Context) -> dict[str, Any]:
    """torch.compile around both engines, and inside of ours: gradients of eager mode."""
    world = run.init("nccl")
    ((inputs, targets),) = batches(1, torch.float32, run.device)
    reference = make_model(torch.float32, run.device)
    cross_entropy(reference(inputs), targets).backward()
    compilers = ["aot_eager", *(["inductor"] if run.is_cuda and _has_triton() else [])]
    forms: dict[str, Callable[[str], tuple[Any, nn.Module]]] = {
        "around ours": lambda compiler: _around("lockstep", compiler, run),
        "around torch's": lambda compiler: _around("torch", compiler, run),
        "inside ours": lambda compiler: _inside(compiler, run),
    }
    facts: dict[str, Any] = {"compilers": ", ".join(compilers)}
    for compiler in compilers:
        for form, make in forms.items():
            torch._dynamo.reset()
            call, model = make(compiler)
            for _ in range(3):
                model.zero_grad()
                cross_entropy(call(inputs), targets).backward()
            facts[f"{form}, {compiler}"] = _compare(_Holder(model), reference, 1e-5)
    world.shutdown()
    return facts


class _Holder:
    """Something with a `module`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _around(engine: str, compiler: str, run: Context) -> tuple[Any, nn.Module]:
    model = wrap(engine, make_model(torch.float32, run.device), run)
    return torch.compile(model, backend=compiler), model.module


def _inside(compiler: str, run: Context) -> tuple[Any, nn.Module]:
    inner = make_model(torch.float32, run.device)
    return wrap("lockstep", torch.compile(inner, backend=compiler), run), inner


def cuda_graph(run: Context) -> dict[str, Any]:
    """Steps of torch's engine and of ours at one rank on nccl, captured and replayed: as in eager mode.

    As torch's notes on CUDA graphs have it for DDP: the engine is made on a side stream, and 11 steps are taken there.
    The nodes that accumulate gradients, which an engine holds, keep the stream that they were made on. Made on the
    default stream, which may not wait for one that is capturing, they fail every capture of a backward pass.
    """
    if not run.is_cuda:
        raise Skip("needs a GPU")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    world = run.init("nccl")
    facts = {}
    for engine in ("torch", "lockstep"):
        print(f"capturing a step of {engine}'s", flush=True)
        facts[engine] = _captured(engine, run)
    world.shutdown()
    return facts


def _captured(engine: str, run: Context) -> float:
    """How far a replayed training is from one in eager mode."""
    data = batches(8, torch.float32, run.device)
    reference = make_model(torch.float32, run.device)
    eager = torch.optim.SGD(reference.parameters(), lr=0.1)
    inputs, targets = (each.clone() for each in data[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = wrap(engine, make_model(torch.float32, run.device), run)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = copy.deepcopy(model.module.state_dict())

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        for _ in range(11):
            step()
        model.module.load_state_dict(start)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for each, labels in data:
        inputs.copy_(each)
        targets.copy_(labels)
        graph.replay()
        eager.zero_grad()
        cross_entropy(reference(each), labels).backward()
        eager.step()
    torch.cuda.synchronize()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(close(one.detach(), other.detach(), 1e-5, "weights") for one, other in pairs)


def fsdp(run: Context) -> dict[str, Any]:
    """fully_shard over "cpu:lockstep,cuda:nccl": what FSDP2 asks of a group."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(run.backend("cpu:lockstep,cuda:nccl"))
    ((inputs, targets),) = batches(1, torch.float32, run.device)
    reference = make_model(torch.float32, run.device)
    model = make_model(torch.float32, run.device)
    mesh = dist.device_mesh.init_device_mesh(run.device.type, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    worst = 0.0
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        cross_entropy(reference(inputs), targets).backward()
        cross_entropy(model(inputs), targets).backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            grad: Any = one.grad
            assert other.grad is not None
            worst = max(worst, close(grad.full_tensor(), other.grad, 1e-5, "gradient"))
    dist.destroy_process_group()
    return {"worst": worst}


def memory(run: Context) -> dict[str, Any]:
    """At one rank nobody needs buckets: the greatest memory of a step is that without an engine."""
    world = run.init("nccl")
    peaks = {}
    # The first takes cuBLAS's workspace besides, which stays.
    wraps = {"first": nn.Sequential, "none": nn.Sequential, "lockstep": lockstep.DistributedDataParallel}
    for name, wrap in wraps.items():
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = wrap(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).to(run.device))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 1024, device=run.device)).mean().backward()
            optimizer.step()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        del model, optimizer
    close(torch.tensor(peaks["lockstep"]), torch.tensor(peaks["none"]), 0.02, "MiB of a step")
    world.shutdown()
    return {f"{name}_mib": round(peak, 1) for name, peak in peaks.items()}
