"""Tensors before anything is distributed, and the mean and spread of a data set over all ranks.

    python examples/tensors.py
    lockstep run --nproc 2 examples/tensors.py

Making tensors, joining and cutting them, NumPy and back, files; then a statistic over a data set of which each rank
reads its own part: sums and counts are added up, and only then divided.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import lockstep


def make() -> None:
    """From data, from a size, from a rule."""
    data = [[1.0, 2.0], [3.0, 4.0]]
    copied = torch.tensor(data)
    array = np.ones((2, 2), dtype=np.float32)
    shared = torch.as_tensor(array)  # no copy: the dtype fits
    array[0, 0] = 7
    assert shared[0, 0] == 7
    assert torch.is_tensor(copied)
    assert torch.equal(copied.clone().detach(), copied)  # what torch.tensor(tensor) would do, without its warning

    assert torch.zeros(2, 3).shape == torch.ones(2, 3).shape
    assert torch.zeros_like(copied).sum() == 0
    assert torch.ones_like(copied).sum() == 4
    assert torch.empty_like(copied).shape == torch.empty((2, 2)).shape  # whatever was in memory
    assert torch.arange(1, 2.5, 0.5).tolist() == [1.0, 1.5, 2.0]
    assert torch.linspace(-10, 10, steps=5).tolist() == [-10.0, -5.0, 0.0, 5.0, 10.0]
    assert torch.logspace(0, 3, steps=4, base=2.0).tolist() == [1.0, 2.0, 4.0, 8.0]
    assert torch.eye(2, 3).tolist() == [[1, 0, 0], [0, 1, 0]]
    torch.manual_seed(0)
    first = torch.rand(3), torch.randn(3), torch.randint(10, (3,)), torch.randperm(3)
    torch.manual_seed(0)
    again = torch.rand_like(first[0]), torch.randn_like(first[1]), torch.randint(10, (3,)), torch.randperm(3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    points = torch.ones(10, 2, dtype=torch.double)
    assert points.short().dtype == points.to(torch.int16).dtype == torch.short


def quantize(values: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """round(x / scale + zero_point), kept within 0 … 255: what `torch.quantize_per_tensor`, now deprecated, stored."""
    return (values / scale + zero_point).round().clamp(0, 255).to(torch.uint8)


def join() -> None:
    """Cutting is the opposite of joining; a dimension that is reduced goes away."""
    whole = torch.arange(10).view(5, 2)
    parts = torch.chunk(whole, 3)  # 2 + 2 + 1 rows: the last one takes what is left
    assert [len(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat(parts, dim=0), whole)
    assert torch.stack([whole, whole], dim=2).shape == (5, 2, 2)
    assert torch.equal(whole.transpose(0, 1), torch.transpose(whole, 0, 1))
    largest, position = whole.max(dim=0)
    assert (largest.tolist(), position.tolist()) == ([8, 9], [4, 4])
    assert whole.double().mean(dim=1).shape == whole.sum(dim=1).shape == (5,)
    assert quantize(torch.tensor([-1.0, 0.0, 1.0, 2.0]), scale=0.1, zero_point=10).tolist() == [0, 10, 20, 30]


def exchange() -> None:
    """NumPy shares memory in both directions; files are read back as plain data."""
    points = torch.ones(3, 4)
    array = points.numpy()
    array[0, 0] = 5
    assert points[0, 0] == 5
    assert torch.from_numpy(array).data_ptr() == points.data_ptr()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "points.pt")
        torch.save(points, path)
        assert torch.equal(torch.load(path, map_location="cpu", weights_only=True), points)
        with path.open("wb") as file:
            torch.save({"points": points}, file)
        with path.open("rb") as file:
            assert torch.equal(torch.load(file, map_location="cpu", weights_only=True)["points"], points)


def statistics(world: lockstep.World) -> tuple[float, float]:
    """Mean and standard deviation of all pixels; every rank has read a part of the images.

    The mean of the ranks' means would be wrong where parts differ in size, and the mean of their standard deviations
    always. Sums and counts can be added up.
    """
    images = torch.from_numpy(load_digits().images)[world.rank :: world.world_size]  # (n, 8, 8) float64
    sums = torch.tensor([images.numel(), images.sum(), images.square().sum()], dtype=torch.float64)
    dist.all_reduce(sums)
    count, total, total_of_squares = sums.tolist()
    mean = total / count
    variance = (total_of_squares - count * mean**2) / (count - 1)
    return mean, variance**0.5


def main() -> None:
    make()
    join()
    exchange()
    with lockstep.init(device="cpu") as world:  # the statistics are those of arrays in memory
        mean, deviation = statistics(world)
        if world.rank == 0:
            everything = torch.from_numpy(load_digits().images)
            assert abs(mean - everything.mean().item()) < 1e-12
            assert abs(deviation - everything.std().item()) < 1e-9  # squares of 115 thousand pixels were added up
            print(
                f"digits: mean {mean:.4f}, standard deviation {deviation:.4f}, read by {world.world_size} process(es)"
            )


if __name__ == "__main__":
    main()
