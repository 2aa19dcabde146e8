"""A Horovod script, as its users have it. It runs where Horovod is not installed.

    lockstep run --nproc 2 examples/horovod_sgd.py
    lockstep horovodrun -np 2 -H localhost:2 python examples/horovod_sgd.py

Under the launcher `import horovod.torch` finds Lockstep's shim if, and only if, Horovod itself is not there.
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda", hvd.local_rank())

    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
    loader = DataLoader(data, batch_size=64 // hvd.size(), sampler=sampler)

    torch.manual_seed(hvd.rank())  # different on purpose: the broadcast below makes them one
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # Averages over the ranks, and is a barrier as well.
        mean = hvd.allreduce(torch.tensor(losses).mean(), name=f"loss of epoch {epoch}")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f} on {hvd.size()} process(es)")
    hvd.shutdown()


if __name__ == "__main__":
    main()
