"""Tensors that Lockstep makes for itself lie where it says, whatever default device a script has set.

`torch.set_default_device("cuda")` and, in scripts of 2018, `torch.set_default_tensor_type(torch.cuda.FloatTensor)`
decide where a tensor lies that is made without `device=`. The device "meta" stands for the GPU here: what is made there
by mistake holds no values, so that it fails as soon as it is used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.metrics import Accuracy, Mean, synchronize
from lockstep.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_garbage")

SOURCE = Path(lockstep.__file__).parent
FOLDERS = ("shm", "comm", "parallel", "data", "metrics", "batch", "rendezvous", "compat/horovod")
# The constructors of torch that ask for the default device.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"),
    *("randint", "randn", "randperm", "sparse_coo_tensor", "tensor", "zeros"),
}
CPU = torch.device("cpu")


def calls_without_device(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
            and not any(keyword.arg in ("device", None) for keyword in node.keywords)
        ):
            yield f"{path.relative_to(SOURCE)}:{node.lineno}: torch.{node.func.attr}"


def test_every_tensor_is_made_on_a_device() -> None:
    paths = [*SOURCE.glob("*.py"), *(path for folder in FOLDERS for path in (SOURCE / folder).rglob("*.py"))]
    assert len(paths) > 200
    assert [found for path in paths for found in calls_without_device(path)] == []


class Draws(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are made from numpy's memory, as decoded images are, and draw."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        values = np.array([index, torch.default_generator.initial_seed() % 97], dtype=np.float32)
        return torch.from_numpy(values)


def train() -> tuple[list[float], list[float]]:
    """A few steps, and the metrics of them."""
    model = nn.Linear(2, 1, device=CPU)
    with torch.no_grad():
        model.weight.fill_(0.01)
        model.bias.fill_(0)
    model = lockstep.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    mean, accuracy = Mean(), Accuracy()
    rows = torch.arange(22, dtype=torch.float32, device=CPU).view(11, 2)
    loaders = [
        lockstep.DataLoader(Draws(), 4, shuffle=True, num_workers=1, seed=3),
        lockstep.DataLoader(Draws(), 4, seed=3),
        lockstep.DataLoader(TensorDataset(rows), 4, shuffle=True, permutation="computed"),
    ]
    for loader in loaders:
        for batch in loader:
            inputs = batch[0] if isinstance(batch, list) else batch
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean.update(loss)
            accuracy.update(torch.sigmoid(model(inputs)).round().long().squeeze(1), inputs[:, 0].long() % 2)
    found = synchronize({"loss": mean, "accuracy": accuracy})
    return [*model.module.weight.view(-1).tolist(), *model.module.bias.tolist()], [
        float(found["loss"]),
        float(found["accuracy"]),
    ]


def collectives() -> list[float]:
    """Verbs whose bodies make tensors of their own, small and large."""
    size = dist.get_world_size()
    found = []
    for numel in (3, 5000, 50_000):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.ones(numel, dtype=dtype, device=CPU)
            dist.all_reduce(tensor)
            found.append(float(tensor.sum()))
            rows = torch.ones(size * numel, dtype=dtype, device=CPU)
            dist.reduce_scatter_tensor(torch.empty(numel, dtype=dtype, device=CPU), rows)
            inputs = list(torch.ones(size, numel, dtype=dtype, device=CPU))
            outputs = list(torch.zeros(size, numel, dtype=dtype, device=CPU))
            dist.all_to_all(outputs, inputs)
            found.append(float(sum(map(torch.sum, outputs))))
    sparse = torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.int64, device=CPU), torch.ones(1, device=CPU), (4,), device=CPU
    )
    dist.all_reduce(sparse)
    found.append(float(sparse.coalesce().values()[0]))
    if size > 1 and dist.get_rank() == 0:
        dist.send(torch.ones(200_000, device=CPU), 1)
    elif dist.get_rank() == 1:
        received = torch.zeros(200_000, device=CPU)
        dist.recv(received, 0)
    return found


def everything(device: str) -> object:
    torch.set_default_device(device)
    try:
        with lockstep.init(seed=0):
            return train(), collectives()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_default_device_changes_nothing(world_size: int) -> None:
    plain, moved = (run_ranks(everything, world_size, device, init=False) for device in ("cpu", "meta"))
    assert moved == plain
