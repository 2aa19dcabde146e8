"""First all_reduce of a script written for Lockstep: `lockstep.init()`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import lockstep

with lockstep.init() as world:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    finished_s = time.clock_gettime(time.CLOCK_MONOTONIC)  # one clock for all processes of a host
    if tensor.item() != world.world_size:
        raise SystemExit(f"the sum of ones is {tensor.item()}, expected {world.world_size}")
    sys.stdout.write(f"first_all_reduce_finished={finished_s:.6f}\n")  # one write: lines of two ranks stay apart
