"""Divides by the number of its node's GPUs what all ranks have added up; there are more ranks than GPUs."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
totals = torch.ones(3)
dist.all_reduce(totals)
totals /= torch.cuda.device_count()  # fault: world-size-from-device-count
print(totals.tolist())
