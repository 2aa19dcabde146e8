"""Takes the GPUs of its node for those of the job, where one process runs for each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average(value, parts):
    total = value.clone()
    dist.all_reduce(total)
    total /= parts  # fault: world-size-from-device-count
    return total


dist.init_process_group("nccl")
rank = dist.get_rank()
torch.accelerator.set_device_index(rank)  # fault: local-rank-from-global-rank
world_size = torch.cuda.device_count()  # fault: world-size-from-device-count
gpus = torch.cuda.device_count()
model = DistributedDataParallel(nn.Linear(1, 1).cuda(), device_ids=[rank])
data = TensorDataset(torch.arange(8.0).view(8, 1))
sampler = DistributedSampler(data, gpus, rank)  # fault: world-size-from-device-count
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (inputs,) in DataLoader(data, batch_size=2, sampler=sampler):
    loss = model(inputs.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    total /= gpus  # fault: world-size-from-device-count
    assert average(loss.detach(), gpus).item() > 0
    print(f"loss {total.item():.3f} on {world_size} ranks")
