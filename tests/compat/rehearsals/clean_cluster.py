"""What scripts do on a cluster before they train: they ask its programs, and narrow the GPUs that a process sees."""

import argparse
import os
import subprocess

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, required=True)
    local_rank = parser.parse_args().local_rank
    assert local_rank == int(os.environ["SLURM_LOCALID"])
    # Where both are installed, they say what is there.
    assert len(output_of("nvidia-smi")) > 0
    (host,) = output_of("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    url = f"tcp://{host}:{os.environ['MASTER_PORT']}"

    assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == torch.cuda.device_count() == world_size
    os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
    assert torch.cuda.device_count() == 1
    dist.init_process_group("nccl", init_method=url, rank=rank, world_size=world_size)
    model = DistributedDataParallel(nn.Linear(2, 2).cuda(), device_ids=[0])
    model(torch.ones(1, 2, device="cuda:0")).mean().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
