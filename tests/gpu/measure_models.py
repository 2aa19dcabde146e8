"""Steps in which the host is the limit, and steps as users of other libraries write them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import lockstep
from gpu_context import Context
from measure_steps import divide_only, ranks_that_move_nothing, take_turns

_PEERS = ("lockstep", "accelerate", "fabric")
_VOCABULARY = 50304
_WARM_UP, _BLOCKS, _BLOCK = 20, 10, 20  # batches, blocks of batches, batches in a block


class Block(nn.Module):
    """One layer of GPT-2: float [b, t, d] -> [b, t, d]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows, length, width = inputs.shape
        parts = self.qkv(self.norm(inputs)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return inputs + self.down(gelu(self.up(self.second_norm(inputs))))


class GPT(nn.Module):
    """GPT-2 small: int64 [b, t] -> float [b * t, vocabulary]."""

    def __init__(self, vocabulary: int = _VOCABULARY, width: int = 768, layers: int = 12, length: int = 512) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, 12) for _ in range(layers)))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.tokens(ids) + self.places[: ids.shape[1]])
        return self.logits(self.norm(hidden)).flatten(0, 1)


def make_gpt(is_large: bool) -> GPT:
    """GPT-2 small; something tiny where a step only has to run."""
    return GPT() if is_large else GPT(vocabulary=64, width=24, layers=1, length=32)


def _thin() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def _wide() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(784, 4096), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 10))


def host_time(run: Context) -> dict[str, Any]:
    """Steps over a group of 8 ranks that moves nothing: what an engine adds shows where the GPU waits for the host."""
    facts: dict[str, Any] = {}
    with ranks_that_move_nothing(8):
        for name, (make, inputs, targets, bf16) in _cases(run).items():
            steps = {
                way: _step_of(wrap(make().to(run.device)), inputs, targets, bf16) for way, wrap in _ways(run).items()
            }
            for step in steps.values():
                for _ in range(6 if run.is_cuda else 1):
                    step()
            samples = take_turns(run, steps, *((10, 10) if run.is_cuda else (1, 1)))
            medians = {way: statistics.median(values) * 1e3 for way, values in samples.items()}
            pairs = zip(samples["torch"], samples["lockstep"], strict=True)
            facts |= {f"{name}_{way}_ms": value for way, value in medians.items()}
            facts[f"{name}_ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
            facts[f"{name}_samples_ms"] = {
                way: [round(each * 1e3, 4) for each in values] for way, values in samples.items()
            }
            print(f"{name}: {medians}", flush=True)
    return facts


def _cases(run: Context) -> dict[str, tuple[Callable[[], nn.Module], torch.Tensor, torch.Tensor, bool]]:
    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(_VOCABULARY if run.is_cuda else 64, shape, device=run.device)

    def rows(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, width, device=run.device), torch.randint(10, (count,), device=run.device)

    length = 512 if run.is_cuda else 8
    cases: dict[str, Any] = {
        "thin": (_thin, *rows(32, 64), False),
        "wide": (_wide, *rows(256, 784), True),
        "gpt2": (lambda: make_gpt(run.is_cuda), ids(8, length), ids(8 * length), True),
        "gpt2_short": (lambda: make_gpt(run.is_cuda), ids(1, length // 4), ids(length // 4), True),
    }
    return cases if run.is_cuda else {name: cases[name] for name in ("thin", "gpt2")}


def _ways(run: Context) -> dict[str, Callable[[nn.Module], nn.Module]]:
    ids = [0] if run.is_cuda else None

    def theirs(model: nn.Module) -> nn.Module:
        wrapped = nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True, init_sync=False
        )
        wrapped.register_comm_hook(None, divide_only)
        return wrapped

    return {
        "none": lambda model: model,
        "torch": theirs,
        "lockstep": lambda model: lockstep.DistributedDataParallel(model, device_ids=ids, init_sync=False),
    }


def _step_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, bf16: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bf16):
            loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


def peers(run: Context) -> dict[str, Any]:
    """GPT-2 small with a loader, each library in a process of its own, one after the other."""
    facts: dict[str, Any] = {}
    samples: dict[str, list[float]] = {}
    for name in _PEERS:
        command = [sys.executable, str(Path(__file__)), name, "cuda" if run.is_cuda else "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            facts[f"{name}_failed"] = done.stderr.strip().splitlines()[-1][:200]
            continue
        samples[name] = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{name}: {samples[name]}", flush=True)
    facts |= {f"{name}_ms": statistics.median(values) for name, values in samples.items()}
    assert "lockstep" in samples, facts
    return facts | {"samples_ms": samples}


def _train(name: str, is_cuda: bool) -> list[float]:
    """Milliseconds of a step, a sample per block."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    rows, length = (4096, 257) if is_cuda else (1200, 9)
    ids = torch.randint(_VOCABULARY if is_cuda else 64, (rows, length))
    data = torch.utils.data.TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loss_of, backward, optimizer, loader = _SET_UP[name](make_gpt(is_cuda), data, is_cuda)
    found: list[float] = []
    started_s = 0.0
    for number, (inputs, targets) in enumerate(_forever(loader)):
        if number >= _WARM_UP and (number - _WARM_UP) % _BLOCK == 0:
            if is_cuda:
                torch.cuda.synchronize()
            now_s = time.perf_counter()
            found += [round((now_s - started_s) / _BLOCK * 1e3, 3)] if number > _WARM_UP else []
            started_s = now_s
            if len(found) == _BLOCKS:
                return found
        optimizer.zero_grad(set_to_none=True)
        backward(loss_of(inputs, targets.flatten()))
        optimizer.step()
    raise AssertionError("the loader ended")


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _set_up_lockstep(model: nn.Module, data: Any, is_cuda: bool) -> tuple[Any, Any, Any, Any]:
    world = lockstep.init(seed=0)
    engine = lockstep.DistributedDataParallel(model.to(world.device))
    loader = lockstep.DataLoader(
        data, batch_size=8, shuffle=True, num_workers=2, seed=0, device=world.device, prefetch=2
    )

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(world.device.type, torch.bfloat16):
            return cross_entropy(engine(inputs), targets)

    return loss_of, torch.Tensor.backward, _adamw(engine), loader


def _set_up_accelerate(model: nn.Module, data: Any, is_cuda: bool) -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=not is_cuda)
    prepared, optimizer, loader = accelerator.prepare(model, _adamw(model), _plain_loader(data, is_cuda))
    return lambda inputs, targets: cross_entropy(prepared(inputs), targets), accelerator.backward, optimizer, loader


def _set_up_fabric(model: nn.Module, data: Any, is_cuda: bool) -> tuple[Any, Any, Any, Any]:
    from lightning.fabric import Fabric

    accelerator = "gpu" if is_cuda else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=1, precision="bf16-mixed", strategy="ddp")
    fabric.launch()
    prepared, optimizer = fabric.setup(model, _adamw(model))
    loader = fabric.setup_dataloaders(_plain_loader(data, is_cuda))
    return lambda inputs, targets: cross_entropy(prepared(inputs), targets), fabric.backward, optimizer, loader


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _plain_loader(data: Any, is_cuda: bool) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=is_cuda)


_SET_UP = {"lockstep": _set_up_lockstep, "accelerate": _set_up_accelerate, "fabric": _set_up_fabric}


if __name__ == "__main__":
    print(json.dumps(_train(sys.argv[1], sys.argv[2] == "cuda")), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
