"""What ranks run in the test of restarts: two groups are made, then one of the ranks kills itself, twenty times."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import lockstep
from lockstep.testing import limit_s

RESTARTS = 20


def sum_of_ranks() -> float:
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def main() -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    total = sum_of_ranks()
    rank = dist.get_rank()
    dist.destroy_process_group()
    with lockstep.init(timeout=limit_s(60)) as world:
        total += sum_of_ranks()
        dist.barrier()
        if rank == 0:
            print(f"attempt {attempt}: {total:g} on {world.backend}", flush=True)
        if attempt < RESTARTS and rank == attempt % world.world_size:
            # Where the other rank waits for it in the next collective.
            os.kill(os.getpid(), signal.SIGKILL)
        sum_of_ranks()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
