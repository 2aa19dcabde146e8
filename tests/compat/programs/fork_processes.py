"""The tutorial on writing distributed applications: a program that forks its processes itself."""

import os
import sys

import torch
import torch.distributed as dist
from torch.multiprocessing import Process


def say(words, rank, tensor):
    sys.stdout.write(f"{words}: rank {rank} has data {tensor[0]}\n")
    sys.stdout.flush()


def blocking(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    say("send", rank, tensor)


def non_blocking(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        request = dist.isend(tensor=tensor, dst=1)
    else:
        request = dist.irecv(tensor=tensor, src=0)
    request.wait()
    say("isend", rank, tensor)


def all_reduce(rank, size):
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.reduce_op.SUM, group=group)
    say("sum", rank, tensor)


def init_process(rank, size, functions, port, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group(backend, rank=rank, world_size=size)
    for function in functions:
        function(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    size = 2
    processes = []
    for rank in range(size):
        functions = (blocking, non_blocking, all_reduce)
        process = Process(target=init_process, args=(rank, size, functions, sys.argv[1]))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode for process in processes))
