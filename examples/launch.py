"""A script for torch.distributed.launch, as they were written from 2018 to 2021: it declares `--local_rank`.

    lockstep launch --nproc_per_node=2 examples/launch.py --lr 0.1
    lockstep run --nproc 2 examples/launch.py --lr 0.1

torch 2 passes `--local-rank`, with a dash, which a parser like this one refuses. `lockstep launch` passes what the
script declares. Other launchers say it in LOCAL_RANK only.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep  # noqa: F401 - brings the backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="set by the launcher"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "lockstep", init_method="env://")
    assert args.local_rank == int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
        device = torch.device("cuda", args.local_rank)

    torch.manual_seed(0)
    net = nn.Linear(10, 1).to(device)
    model = DistributedDataParallel(net, device_ids=[args.local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(32, 10, generator=generator).to(device)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    # Ranks have other inputs: their weights are the same because gradients were averaged.
    weights = [torch.empty_like(net.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, net.weight.detach())
    assert all(torch.equal(other, net.weight) for other in weights)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {args.local_rank}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
