"""A model whose layers lie on two devices, alone and inside of DistributedDataParallel.

    lockstep run --nproc 2 examples/model_parallel.py

With two GPUs per rank each takes a half of the layers; without, both halves are on the CPU and the script is the
same. Only the places where data changes device differ from an ordinary model; autograd finds its own way back.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import lockstep


class TwoDevices(nn.Module):
    """The first layer on one device, the second on another.

    Args:
        first: device of the first layer.
        second: device of the second layer, and of the outputs.
    """

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.layer_1 = nn.Linear(10, 10).to(first)
        self.layer_2 = nn.Linear(10, 5).to(second)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.layer_1(inputs.to(self.first)))
        return self.layer_2(hidden.to(self.second))


def choose_devices(world: lockstep.World) -> tuple[torch.device, torch.device]:
    """Two GPUs of this rank's own; where there are too few for that, one or the CPU twice, alike on all ranks."""
    per_rank = min(2, torch.cuda.device_count() // world.local_world_size)
    if per_rank == 0:
        return torch.device("cpu"), torch.device("cpu")
    first = per_rank * world.local_rank
    return torch.device("cuda", first), torch.device("cuda", first + per_rank - 1)


def train(model: nn.Module, second: torch.device, seed: int) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), labels.to(second))  # labels are where the outputs are
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    with lockstep.init() as world:
        first, second = choose_devices(world)
        torch.manual_seed(0)
        alone = train(TwoDevices(first, second), second, seed=world.rank)
        assert alone[-1] < alone[0]
        torch.manual_seed(0)
        # No device_ids: a module on several devices is moved by its own forward.
        engine = lockstep.DistributedDataParallel(TwoDevices(first, second))
        together = train(engine, second, seed=world.rank)
        assert together[-1] < together[0]
        # Ranks have other inputs: their weights are the same because gradients were averaged.
        weights = engine.module.layer_2.weight.detach()
        assert all(torch.equal(other, weights) for other in lockstep.all_gather(weights).split(len(weights)))
        if world.rank == 0:
            print(
                f"loss {together[0]:.4f} -> {together[-1]:.4f} on {first} and {second}, {world.world_size} process(es)"
            )


if __name__ == "__main__":
    main()
