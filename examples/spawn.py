"""One command without a launcher: the script starts its ranks itself, with torch's `spawn` or Lockstep's.

    python examples/spawn.py --nproc 2

`torch.multiprocessing.spawn` hands each process its number and nothing else, so it must be told where to meet.
`lockstep.spawn` takes care of that, returns what each rank returned, and raises the first failing rank's exception.
"""

import argparse
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train() -> float:
    """Three steps; the sum of the parameters, which is the same on all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        inputs, labels = torch.randn(2, 20, 10, generator=generator)
        nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
    return sum(parameter.sum().item() for parameter in model.parameters())


def spawned_by_torch(rank: int, world_size: int, url: str) -> None:
    """What torch calls in each process; its return value is lost."""
    dist.init_process_group("lockstep", init_method=url, rank=rank, world_size=world_size)
    print(f"rank {rank} of {world_size}: {train():.6f}")
    dist.destroy_process_group()


def spawned_by_lockstep() -> float:
    with lockstep.init(device="cpu"):  # where `train` has its model
        return train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    options = parser.parse_args()
    url = f"tcp://127.0.0.1:{free_port()}"
    torch.multiprocessing.spawn(spawned_by_torch, args=(options.nproc, url), nprocs=options.nproc)
    sums = lockstep.spawn(spawned_by_lockstep, nproc=options.nproc)
    assert len(set(sums)) == 1, "one answer"
    print(f"spawned {options.nproc} process(es) twice; every rank ended at {sums[0]:.6f}")


if __name__ == "__main__":
    main()
