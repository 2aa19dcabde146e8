"""The loader's copies to the device, metrics on it, and checkpoints of what lies there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, TensorDataset

import lockstep
from gpu_context import Context, close, make_model, same
from lockstep import checkpoint
from lockstep.metrics import Accuracy, Mean, Sum, synchronize


def _numbered(rows: int, columns: int) -> TensorDataset:
    """Row i is full of i."""
    numbers = torch.arange(rows, dtype=torch.float32)
    return TensorDataset(numbers[:, None].expand(rows, columns).contiguous(), torch.arange(rows))


def loader(run: Context) -> dict[str, Any]:
    """Every batch is right, whatever is prefetched, with workers and without; and it is tagged."""
    world = run.init("nccl", seed=0)
    data = _numbered(103, 64)
    number = 0
    for prefetch in (0, 1, 3):
        for num_workers in (0, 2):
            batches = lockstep.DataLoader(
                data, batch_size=10, shuffle=True, seed=3, device=run.device, prefetch=prefetch, num_workers=num_workers
            )
            plain = lockstep.DataLoader(data, batch_size=10, shuffle=True, seed=3)
            for (rows, labels), (expected, names) in zip(batches, plain, strict=True):
                same((rows.device, labels.device), (run.device, run.device), "device")
                same(labels.tolist(), names.tolist(), f"labels with prefetch={prefetch}, num_workers={num_workers}")
                assert torch.equal(rows.cpu(), expected), f"rows with prefetch={prefetch}, num_workers={num_workers}"
                number += 1
            same(lockstep.is_filler(rows), False, "filler")
    world.shutdown()
    return {"batches": number}


def loader_under_load(run: Context) -> dict[str, Any]:
    """Copies run ahead of a busy stream; batches are kept, dropped and read late, as memory is given away."""
    world = run.init("nccl", seed=0)
    data = _numbered(4000, 16384)  # 64 KiB a row
    sums = []
    kept = []
    matrix = torch.ones(1024, 1024, device=run.device)
    for number, (rows, labels) in enumerate(lockstep.DataLoader(data, batch_size=100, device=run.device, prefetch=3)):
        for _ in range(30 if run.is_cuda else 1):
            matrix = (matrix @ matrix).clamp_(max=1.0)
        sums.append((rows.double().mean(1) - labels).abs().max())  # queued behind the load
        if number % 7 == 0:
            kept.append((rows, labels))
        del rows, labels
        torch.full((100, 16384), -1.0, device=run.device)  # may take the memory of a batch that was dropped
    same(float(torch.stack(sums).max()), 0.0, "greatest error of a batch")
    for rows, labels in kept:
        same(float((rows.double().mean(1) - labels).abs().max()), 0.0, "error of a batch that was kept")
    other = torch.cuda.Stream() if run.is_cuda else None
    with torch.cuda.stream(other):
        for rows, labels in lockstep.DataLoader(data, batch_size=500, device=run.device, prefetch=1):
            same(float((rows.double().mean(1) - labels).abs().max()), 0.0, "error on another stream")
    world.shutdown()
    return {"batches": len(sums)}


class _Noisy(Dataset[torch.Tensor]):
    """Rows that lie on the device, and noise that is drawn there."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.arange(24.0, device=device)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + torch.rand((), device=self.rows.device)


def loader_draws(run: Context) -> dict[str, Any]:
    """What samples draw on the device is the same on any number of ranks, and what the training draws stays."""
    world = run.init("nccl", seed=0)
    data = _Noisy(run.device)
    state = torch.cuda.get_rng_state() if run.is_cuda else torch.get_rng_state()
    found = [
        torch.cat([*lockstep.DataLoader(data, 6, shuffle=True, seed=3, rank=rank, world_size=size)]).sort()[0]
        for size in (1, 3)
        for rank in range(size)
    ]
    after = torch.cuda.get_rng_state() if run.is_cuda else torch.get_rng_state()
    assert torch.equal(state, after), "the training's stream was moved"
    whole, *parts = found
    close(torch.cat(parts).sort()[0], whole, 0.0, "samples of three ranks")
    world.shutdown()
    return {}


def metrics(run: Context, backend: str) -> dict[str, Any]:
    """Sums and counts over ranks, from values on the device."""
    world = run.init(backend, seed=0)
    data = _numbered(37, 3)
    mean, accuracy, total = Mean(), Accuracy(), Sum()
    for rows, labels in lockstep.DataLoader(data, batch_size=8, device=run.device, evaluation=True):
        mean.update(rows.mean())
        logits = torch.nn.functional.one_hot(labels.where(labels % 3 == 0, labels + 1) % 40, 40).float()
        accuracy.update(logits, labels)
        total.update(rows[:, 0].sum())
    found = synchronize({"mean": mean, "accuracy": accuracy, "total": total})
    same(round(found["mean"], 9), 18.0, "mean")
    same(round(found["accuracy"], 9), round(13 / 37, 9), "accuracy")
    same(found["total"], float(sum(range(37))), "sum")
    world.shutdown()
    return dict(found)


def checkpoints(run: Context) -> dict[str, Any]:
    """A training that continues from a checkpoint takes the steps of one that was not interrupted."""
    world = run.init("nccl", seed=0)
    folder = Path(tempfile.mkdtemp())
    inputs = torch.randn(6, 12, generator=torch.Generator().manual_seed(0)).to(run.device)

    def make() -> tuple[Any, Any]:
        model = lockstep.DistributedDataParallel(make_model(torch.float32, run.device))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def steps(model: Any, optimizer: Any) -> torch.Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.dropout(model(inputs)).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    model, optimizer = make()
    steps(model, optimizer)
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": checkpoint.gather_rng(),
    }
    checkpoint.save(folder, state, step=3)
    expected = steps(model, optimizer)
    for place in ("cpu", str(run.device)):
        loaded = checkpoint.load(folder, map_location=place)
        same(str(loaded["model"]["0.weight"].device), place, "map_location")
        model, optimizer = make()
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        checkpoint.restore_rng(loaded["random"])
        close(steps(model, optimizer), expected, 1e-6, f"weights after loading to {place}")
    kinds = sorted(state["random"])
    same(kinds, ["cpu", "cuda"] if run.is_cuda else ["cpu"], "random states")
    dist.barrier()
    world.shutdown()
    return {"random": ", ".join(kinds)}
