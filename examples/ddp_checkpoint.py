"""Saving and loading: by hand, with one writer; and with `lockstep.checkpoint`, which a kill cannot spoil.

lockstep run --nproc 2 examples/ddp_checkpoint.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import lockstep
from lockstep import checkpoint


def step(engine: nn.Module, optimizer: torch.optim.Optimizer, seed: int, world: lockstep.World) -> float:
    """One step on random data; the loss."""
    generator = torch.Generator().manual_seed(1000 * seed + world.rank)
    inputs, targets = torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)
    optimizer.zero_grad()
    loss = mse_loss(engine(inputs.to(world.device)), targets.to(world.device))
    loss.backward()
    optimizer.step()
    return loss.item()


def by_hand(path: Path, model: nn.Module, world: lockstep.World) -> None:
    """Rank 0 writes what all have; nobody reads before it has."""
    if world.rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # to see that it comes back
    # Where each tensor is to go is said here: it was on rank 0's device when it was saved.
    state = torch.load(path, map_location=world.device, weights_only=True)
    model.load_state_dict(state)
    assert all(map(torch.equal, before, model.parameters()))
    dist.barrier()  # all have read: only now may rank 0 remove it
    if world.rank == 0:
        path.unlink()


def main() -> None:
    with lockstep.init() as world, tempfile.TemporaryDirectory() as own_folder:
        shared = [own_folder]
        dist.broadcast_object_list(shared, src=0)  # all use rank 0's
        folder = Path(shared[0])

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)).to(world.device)
        engine = lockstep.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step(engine, optimizer, 0, world)
        by_hand(folder / "model.pt", model, world)

        # Whole files under their final names only, checksums, the last few kept, the newest good one loaded.
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save(folder / "checkpoints", state, step=1)
        expected = step(engine, optimizer, 1, world)

        loaded = checkpoint.load(folder / "checkpoints", map_location=world.device)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        assert step(engine, optimizer, 1, world) == expected, "the same step again, to the bit"
        dist.barrier()  # before rank 0's folder goes
        if world.rank == 0:
            print(f"resumed with the same bits on {world.world_size} process(es)")


if __name__ == "__main__":
    main()
