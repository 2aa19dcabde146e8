"""Groups: collectives among some of the ranks. Initialised by `file://`.

    lockstep run --nproc 2 examples/groups.py --file /tmp/groups-of-job-1
    lockstep run --nproc 4 examples/groups.py --file /tmp/groups-of-job-2

The ranks meet through a file that must not be there before, in a folder that all of them see.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

import lockstep  # noqa: F401 - brings the backend


def halves(rank: int, size: int) -> None:
    """Every rank makes every group, in one order, whether it is in it or not."""
    even = dist.new_group(list(range(0, size, 2)))
    odd = dist.new_group(list(range(1, size, 2))) if size > 1 else None
    group = even if rank % 2 == 0 else odd
    members = range(rank % 2, size, 2)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(members)
    assert dist.get_world_size(group) == len(members)
    assert dist.get_rank(group) == rank // 2
    assert dist.get_global_rank(group, rank // 2) == rank
    root = members[-1]  # roots are named by their rank in the world
    dist.broadcast(tensor, src=root, group=group)


def neighbours(rank: int, size: int) -> None:
    """Groups may overlap: here each rank is in two of them."""
    pairs = [dist.new_group(sorted({left, (left + 1) % size})) for left in range(size)]
    for left in sorted({rank, (rank - 1) % size}):  # one order for both partners
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=pairs[left])
        assert tensor.item() == min(2, size)
    assert dist.get_rank(dist.new_group([0])) == (0 if rank == 0 else -1)  # not in it: -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True, help="a path where nothing is yet")
    options = parser.parse_args()
    dist.init_process_group(
        "lockstep",
        init_method=options.file.resolve().as_uri(),  # file:///…: three slashes, an absolute path
        rank=int(os.environ.get("RANK", 0)),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    halves(rank, size)
    neighbours(rank, size)
    dist.barrier()
    if rank == 0:
        print(f"groups agree among {size} process(es)")
    dist.destroy_process_group()  # torch removes the file, unless two ranks get here at the same moment


if __name__ == "__main__":
    main()
