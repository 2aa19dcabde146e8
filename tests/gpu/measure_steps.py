"""Training steps on a GPU, timed and profiled: our engine beside torch's, in one process, taking turns."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lockstep
from gpu_context import Context, Skip, make_model
from gpu_resnet import resnet50

# A copy to pinned memory waits for nothing; to other memory it does.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "Memcpy DtoH")
_NO_WAITS = ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pinned)")
_WARM_UP = 5


def take_turns(run: Context, calls: dict[str, Callable[[], None]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per call, a sample per round; who begins changes from round to round.

    Args:
        run: where.
        calls: contestants.
        rounds: that count; one more warms up.
        steps: calls in each.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        names = list(calls)
        for name in names if number % 2 else reversed(names):
            run.synchronize()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                calls[name]()
            run.synchronize()
            if number:
                samples[name].append((time.perf_counter() - start) / steps)
    return samples


def _engines(run: Context, make: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    ids = [0] if run.is_cuda else None
    return {
        "lockstep": lockstep.DistributedDataParallel(make(), device_ids=ids),
        "torch": nn.parallel.DistributedDataParallel(make(), device_ids=ids, gradient_as_bucket_view=True),
    }


def _resnet(run: Context) -> nn.Module:
    torch.manual_seed(0)
    model = resnet50() if run.is_cuda else resnet50(width=4, num_classes=10)
    return model.to(run.device).to(memory_format=torch.channels_last)


def compare_engines(run: Context, kind: str, backend: str = "nccl") -> dict[str, Any]:
    """Steps of ResNet-50 with dummy data: forward, loss, backward, SGD with momentum."""
    world = run.init(backend, seed=0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True  # as it is by default
    batch, side = (64, 224) if run.is_cuda else (4, 64)
    if world.world_size > 1:
        batch //= 2
    images = torch.randn(batch, 3, side, side, device=run.device).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device=run.device)
    models = _engines(run, lambda: _resnet(run))

    def step_of(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(run.device.type, torch.bfloat16, enabled=kind == "bf16"):
                loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

        return step

    calls = {name: step_of(model) for name, model in models.items()}
    for call in calls.values():
        for _ in range(_WARM_UP if run.is_cuda else 1):
            call()
    rounds, steps = (14 if world.world_size == 1 else 6, 8) if run.is_cuda else (2, 1)
    samples = take_turns(run, calls, rounds, steps)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratios = [theirs / ours for ours, theirs in zip(samples["lockstep"], samples["torch"], strict=True)]
    world.shutdown()
    return {
        "ratio": statistics.median(ratios),
        "lockstep_ms": medians["lockstep"] * 1e3,
        "torch_ms": medians["torch"] * 1e3,
        "images_per_s": batch * world.world_size / medians["lockstep"],
        "batch": batch,
        "samples_ms": {name: [round(each * 1e3, 4) for each in values] for name, values in samples.items()},
    }


@contextlib.contextmanager
def ranks_that_move_nothing(count: int) -> Iterator[None]:
    """A group of some ranks in one process whose collectives do nothing: all that engines do beside them happens.

    nccl takes one rank on one GPU, and at one rank there is nothing to average.
    """
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise Skip(f"this torch has no group that moves nothing: {error}") from None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_host_syncs(run: Context) -> dict[str, Any]:
    """How often a step waits for the GPU, from a profile: ours less torch's, over ten steps."""
    facts: dict[str, Any] = {}
    added: dict[str, int] = {}
    for name, context in (
        ("nccl, 1 rank", _one_rank(run)),
        ("2 ranks that move nothing", ranks_that_move_nothing(2)),
    ):
        with context:
            counts = {engine: _waits_of(run, engine, from_loader=False) for engine in ("lockstep", "torch")}
            counts["lockstep with our loader"] = _waits_of(run, "lockstep", from_loader=True)
            counts["torch with our loader"] = _waits_of(run, "torch", from_loader=True)
        facts[name] = {engine: dict(found) for engine, found in counts.items()}
        for suffix in ("", " with our loader"):
            ours, theirs = (sum(counts[f"{engine}{suffix}"].values()) for engine in ("lockstep", "torch"))
            added[f"{name},{suffix}" if suffix else name] = ours - theirs
    facts["added per step"] = {name: count / _PROFILED for name, count in added.items()}
    assert all(count <= 0 for count in added.values()), f"our engine makes the host wait: {facts}"
    return facts


_PROFILED = 10


@contextlib.contextmanager
def _one_rank(run: Context) -> Iterator[None]:
    with run.init("nccl"):
        yield


def divide_only(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with classes
    """A hook of torch's DDP for a group that moves nothing, which has no result in its futures that C++ could take."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    future.set_result(buffer)
    return future


def _waits_of(run: Context, engine: str, from_loader: bool) -> Counter[str]:
    """Waits of the host in ten steps, by name."""
    inner = nn.Sequential(make_model(torch.float32, run.device), nn.BatchNorm1d(5).to(run.device))
    options: dict[str, Any] = {"device_ids": [0] if run.is_cuda else None}
    if dist.get_world_size() > 1:
        options["init_sync"] = False  # what comes back from a group that moves nothing is no model of anybody's
    kind: Any = lockstep.DistributedDataParallel if engine == "lockstep" else nn.parallel.DistributedDataParallel
    model = kind(inner, **options)
    if dist.get_world_size() > 1 and engine == "torch":
        model.register_comm_hook(None, divide_only)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(16 * 40 + 9, 12), torch.randint(5, (16 * 40 + 9,)))
    fixed = (torch.randn(16, 12, device=run.device), torch.randint(5, (16,), device=run.device))
    # One that is not read from would still have batches, of which the fixed one is none.
    loader = iter(lockstep.DataLoader(data, batch_size=32, device=run.device, prefetch=2)) if from_loader else None

    def step() -> None:
        inputs, targets = fixed if loader is None else next(loader)
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(_WARM_UP):
        step()
    run.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if run.is_cuda else []
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_PROFILED):
            step()
    found: Counter[str] = Counter()
    for event in profile.events():
        if event.name.startswith(_WAITS) and not event.name.startswith(_NO_WAITS):
            found[event.name] += 1
    if run.is_cuda:
        assert any(event.name.startswith("cudaLaunchKernel") for event in profile.events()), "the profile shows no GPU"
    # The profiler itself waits when it ends.
    found["cudaDeviceSynchronize"] -= min(found["cudaDeviceSynchronize"], 1)
    return +found


def _as_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's that can be put back on its class: what C++ has made is bound to no object there."""
    return lambda owner, *args, **kwargs: original(owner, *args, **kwargs)


def cost_of_record(run: Context) -> dict[str, Any]:
    """A call and a step of torch's engine on nccl, with the wrapped methods and with torch's own.

    What is added to a step is a handful of calls, far less than its time varies: the quartiles of the differences of
    each round say how well it is known, and `step_calls`, the recorded calls of a step, what to expect.
    """
    world = run.init("nccl", seed=0)
    wrapped: dict[str, Any] = {}
    for owner in (dist.ProcessGroup, torch._C._distributed_c10d.Work, torch._C._distributed_c10d.Reducer):
        for name in dir(owner):
            method = getattr(owner, name)
            if hasattr(method, "__wrapped__"):
                wrapped[f"{owner.__name__}.{name}"] = (owner, name, method, _as_method(method.__wrapped__))
    assert {"ProcessGroup.allreduce", "Work.wait"} <= set(wrapped), f"nothing is recorded: {sorted(wrapped)}"

    def use(recorded: bool) -> None:
        for owner, name, method, plain in wrapped.values():
            setattr(owner, name, method if recorded else plain)

    tensor = torch.ones(1, device=run.device)
    model = nn.parallel.DistributedDataParallel(_resnet(run), device_ids=[0] if run.is_cuda else None)
    images = torch.randn(8, 3, *((64, 64) if run.is_cuda else (32, 32)), device=run.device)

    def call(recorded: bool, work: Callable[[], None]) -> Callable[[], None]:
        def run_it() -> None:
            use(recorded)
            work()

        return run_it

    def reduce_often() -> None:
        for _ in range(200 if run.is_cuda else 5):
            dist.all_reduce(tensor)

    def step() -> None:
        model.zero_grad()
        model(images).sum().backward()

    facts: dict[str, Any] = {}
    for name, work, per_call in (("call", reduce_often, 200 if run.is_cuda else 5), ("step", step, 1)):
        contestants = {"recorded": call(True, work), "plain": call(False, work)}
        samples = take_turns(run, contestants, 40 if run.is_cuda else 2, 3 if run.is_cuda else 1)
        in_us = {kind: [value / per_call * 1e6 for value in values] for kind, values in samples.items()}
        facts |= {f"{name}_{kind}_us": statistics.median(values) for kind, values in in_us.items()}
        added = [one - other for one, other in zip(in_us["recorded"], in_us["plain"], strict=True)]
        facts[f"{name}_added_us"] = statistics.median(added)
        facts[f"{name}_added_quartiles_us"] = statistics.quantiles(added, n=4)[::2]
    facts["step_calls"] = _count_calls(wrapped, step)
    use(True)
    world.shutdown()
    return facts


def _count_calls(wrapped: dict[str, Any], work: Callable[[], None]) -> int:
    calls: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(owner, *args, **kwargs)

        return call

    for name, (owner, attribute, method, _) in wrapped.items():
        setattr(owner, attribute, counting(name, method))
    work()
    return calls.total()


def gain_of_prefetch(run: Context) -> dict[str, Any]:
    """Batches of 64 MiB beside a computation of about the time of their copy."""
    if not run.is_cuda:
        rows, columns, matmuls = 40, 64, 1
    else:
        rows, columns, matmuls = 40 * 64, 1 << 18, 24
    data = torch.ones(rows, columns)
    matrix = torch.ones(2048 if run.is_cuda else 8, 2048 if run.is_cuda else 8, device=run.device)

    def epoch(prefetch: int) -> None:
        found = matrix
        loader = lockstep.DataLoader(
            _Pinned(data),
            batch_size=rows // 40,
            device=run.device,
            prefetch=prefetch,
            pin_memory=False,
            collate_fn=_as_it_is,
        )
        for batch in loader:
            for _ in range(matmuls):
                found = (found @ matrix).clamp_(max=1.0)
            found[0, 0] += batch[0, 0]
        run.synchronize()

    calls = {"prefetch": lambda: epoch(2), "plain": lambda: epoch(0)}
    samples = take_turns(run, calls, 3 if run.is_cuda else 1, 1)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    facts: dict[str, Any] = {f"{name}_ms": value * 1e3 for name, value in medians.items()}
    facts["ratio"] = medians["plain"] / medians["prefetch"]
    if run.is_cuda:
        facts["streams"] = _streams_of(lambda: epoch(2))
    return facts


def _as_it_is(batch: torch.Tensor) -> torch.Tensor:
    return batch


class _Pinned(torch.utils.data.Dataset[torch.Tensor]):
    """Whole batches as views of pinned memory: what is measured are the copies to the GPU."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data.pin_memory() if torch.cuda.is_available() else data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._data[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self._data[indices[0] : indices[-1] + 1]


def _streams_of(call: Callable[[], None]) -> dict[str, list[int]]:
    """On which streams copies and kernels ran.

    Raises:
        AssertionError: a copy ran on the kernels' stream.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
    streams: dict[str, set[int]] = {"copies": set(), "kernels": set()}
    for event in profile.profiler.kineto_results.events():
        if "Memcpy HtoD" in event.name():
            streams["copies"].add(event.device_resource_id())
        elif "gemm" in event.name().lower() or "clamp" in event.name().lower():
            streams["kernels"].add(event.device_resource_id())
    assert all(streams.values()), f"the profile shows no copies or no kernels: {streams}"
    # One small copy is what the computation itself may ask for.
    assert streams["copies"] - streams["kernels"], f"copies run on the kernels' stream: {streams}"
    return {name: sorted(found) for name, found in streams.items()}
