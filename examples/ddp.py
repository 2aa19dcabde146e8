"""DistributedDataParallel step by step, with torch's own parts on the lockstep group.

    lockstep run --nproc 2 examples/ddp.py
    torchrun --nproc_per_node 2 examples/ddp.py

As most scripts have it: a sampler that deals the data set out, an epoch that is told to it, a model from a file on
rank 0. `train.py` beside this file is what remains of it with Lockstep's own loader.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep  # noqa: F401 - brings the backend


def load_data() -> TensorDataset:
    digits = load_digits()
    return TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pretrained", type=Path, help="parameters to begin with")
    parser.add_argument("--save", type=Path, help="where to put the parameters after each epoch")
    options = parser.parse_args()

    # 1. Nobody gets past this line before all have come.
    dist.init_process_group("cpu:lockstep,cuda:nccl" if torch.cuda.is_available() else "lockstep")
    local_rank = int(os.environ["LOCAL_RANK"])  # the launcher says which GPU of this host is ours
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)

    # 2. Each rank sees its own part. The batch size is per rank; the global batch is all of them together.
    data = load_data()
    sampler = DistributedSampler(data, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)

    # 3. A file is needed on rank 0 only, before the engine is made: making it copies rank 0's parameters to all.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    if options.pretrained is not None and dist.get_rank() == 0:
        model.load_state_dict(torch.load(options.pretrained, map_location=device, weights_only=True))
    engine = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # another order; without it every epoch has the first one's
        total = torch.zeros(2, dtype=torch.float64)
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = cross_entropy(engine(images), labels)
            loss.backward()  # gradients are averaged while it runs
            optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)], dtype=torch.float64)
        dist.all_reduce(total)  # sums and counts, in one collective
        # 4. One writer, and the model inside the engine: its names have no `module.` in front.
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f} on {dist.get_world_size()} process(es)")
            if options.save is not None:
                torch.save(model.state_dict(), options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
