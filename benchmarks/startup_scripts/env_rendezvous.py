"""First all_reduce of a script written for torchrun: plain `env://` and gloo."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
finished_s = time.clock_gettime(time.CLOCK_MONOTONIC)  # one clock for all processes of a host
if tensor.item() != dist.get_world_size():
    raise SystemExit(f"the sum of ones is {tensor.item()}, expected {dist.get_world_size()}")
sys.stdout.write(f"first_all_reduce_finished={finished_s:.6f}\n")  # one write: lines of two ranks stay apart
dist.destroy_process_group()
