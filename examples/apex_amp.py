"""An Apex script with mixed precision, as its users have it. It runs where Apex is not installed, on a CPU too.

    lockstep run --nproc 2 examples/apex_amp.py --opt-level O1

Under the launcher `from apex import amp` finds Lockstep's shim if, and only if, Apex itself is not there. Note the
order: the optimizer is made before `amp.initialize`, and the engine after it.
"""

import argparse
import os

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep  # noqa: F401 - brings the backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--loss-scale", default=None)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "lockstep", init_method="env://")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
        device = torch.device("cuda", args.local_rank)

    digits = load_digits()
    mine = slice(dist.get_rank(), 1792, dist.get_world_size())  # as many samples on each rank, of 1, 2, 4 or more
    images = (torch.tensor(digits.images, dtype=torch.float32) / 16)[mine].to(device)
    labels = torch.tensor(digits.target)[mine].to(device)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    model = convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale, verbosity=0
    )
    model = DistributedDataParallel(model)

    first = None
    for _ in range(20):
        optimizer.zero_grad()
        loss = cross_entropy(model(images).float(), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
    assert loss.item() < first
    if dist.get_rank() == 0:
        print(f"{args.opt_level}: loss {first:.4f} -> {loss.item():.4f} on {dist.get_world_size()} process(es)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
