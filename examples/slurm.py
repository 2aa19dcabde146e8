"""Under Slurm without any launcher: one task per node, which starts a process for each of its GPUs.

    srun -N2 --ntasks-per-node=1 --gpus-per-node=4 python examples/slurm.py
    python examples/slurm.py --per-node 2                        # no Slurm: a job of one node

SLURM_PROCID numbers the tasks, and a task is a node here: the rank of a process is procid * (processes per node) +
its number on the node, and there are (tasks) * (processes per node) of them. Where every rank is a task of its own
(`--ntasks-per-node=4`) none of this is needed: `lockstep.init()` reads it all from Slurm.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep  # noqa: F401 - brings the backend


def work(local_rank: int, per_node: int, node: int, num_nodes: int, url: str) -> None:
    """One rank."""
    rank, world_size = node * per_node + local_rank, num_nodes * per_node
    dist.init_process_group("lockstep", init_method=url, rank=rank, world_size=world_size)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    net = nn.Linear(10, 1).to(device)
    model = DistributedDataParallel(net, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(32, 10, generator=torch.Generator().manual_seed(rank)).to(device)
    for _ in range(5):
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    # Ranks have other inputs: their weights are the same because gradients were averaged.
    weights = [torch.empty_like(net.weight) for _ in range(world_size)]
    dist.all_gather(weights, net.weight.detach())
    assert all(torch.equal(other, net.weight) for other in weights)
    if rank == 0:
        print(f"{len(weights)} rank(s) on {num_nodes} node(s) trained together")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-node", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--folder", type=Path, help="where all nodes see it; default: this folder under Slurm")
    options = parser.parse_args()
    # Variables are text: without int(), procid * per_node would repeat it.
    node, num_nodes = int(os.environ.get("SLURM_PROCID", 0)), int(os.environ.get("SLURM_NTASKS", 1))
    job = os.environ.get("SLURM_JOB_ID")
    folder = options.folder or (Path.cwd() if job else Path(tempfile.mkdtemp()))
    meeting = (folder / f".meeting-{job or os.getpid()}").resolve()
    arguments = (options.per_node, node, num_nodes, meeting.as_uri())
    torch.multiprocessing.spawn(work, args=arguments, nprocs=options.per_node)
    if node == 0:
        meeting.unlink(missing_ok=True)
        if not (options.folder or job):
            folder.rmdir()


if __name__ == "__main__":
    main()
