"""Every collective once, with what each rank brings and gets. Initialised by `tcp://`.

    lockstep run --nproc 2 examples/collectives.py
    python examples/collectives.py --rank 0 --world-size 2 --url tcp://127.0.0.1:23456 &
    python examples/collectives.py --rank 1 --world-size 2 --url tcp://127.0.0.1:23456

With `tcp://` rank 0 listens at that address and each process says by itself who it is. `--backend gloo` runs the same
script on torch's own group.
"""

import argparse
import os

import torch
import torch.distributed as dist

import lockstep  # noqa: F401 - brings the backend

# torch 2.13 has new names for these two, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reductions(rank: int, size: int) -> None:
    """all_reduce leaves the result with everybody, reduce with one, reduce_scatter a part of it with each."""
    expected = {
        dist.ReduceOp.SUM: sum(range(1, size + 1)),
        dist.ReduceOp.PRODUCT: int(torch.arange(1, size + 1).prod()),
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.MAX: size,
    }
    for op, value in expected.items():
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor, op=op)
        assert tensor.item() == value
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    assert bits.item() == (1 << size) - 1

    tensor = torch.ones(2)
    dist.reduce(tensor, dst=0)
    if rank == 0:  # elsewhere its value is not defined
        assert tensor.tolist() == [size, size]

    parts = [torch.full((2,), float(peer)) for peer in range(size)]
    mine = torch.empty(2)
    dist.reduce_scatter(mine, parts)
    assert (mine == rank * size).all()


def movements(rank: int, size: int) -> None:
    """From one to all, from all to one, from all to all."""
    tensor = torch.arange(3.0) if rank == 0 else torch.empty(3)
    dist.broadcast(tensor, src=0)
    assert tensor.tolist() == [0, 1, 2]

    own = torch.full((2,), float(rank))
    gathered = [torch.empty(2) for _ in range(size)]
    dist.all_gather(gathered, own)
    assert [part[0].item() for part in gathered] == list(range(size))

    at_root = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(own, at_root, dst=0)
    if at_root is not None:
        assert [part[0].item() for part in at_root] == list(range(size))

    dist.scatter(own, at_root, src=0)  # and back
    assert (own == rank).all()

    outgoing = [torch.tensor([rank * size + peer]) for peer in range(size)]
    incoming = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(incoming, outgoing)
    assert [part.item() for part in incoming] == [peer * size + rank for peer in range(size)]


def whole_tensors(rank: int, size: int) -> None:
    """The forms that take one tensor instead of a list."""
    rows = torch.empty(size, 2)
    all_gather_single(rows, torch.full((1, 2), float(rank)))
    assert rows[:, 0].tolist() == list(range(size))
    row = torch.empty(1, 2)
    reduce_scatter_single(row, rows)
    assert (row == rank * size).all()
    column = torch.empty(size, 2)
    dist.all_to_all_single(column, rows)
    assert (column == rank).all()


def objects(rank: int, size: int) -> None:
    """Anything that can be pickled."""
    names = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    assert names == [f"rank {peer}" for peer in range(size)]
    settings = [{"lr": 0.1}] if rank == 0 else [None]
    dist.broadcast_object_list(settings, src=0)
    assert settings == [{"lr": 0.1}]


def asynchronous(rank: int) -> None:
    """`async_op=True` returns at once; the tensor belongs to the collective until `wait`."""
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    busy = sum(range(1000))  # anything that leaves the tensor alone
    work.wait()
    assert work.is_completed()
    assert busy == 499500
    assert (tensor == dist.get_world_size()).all()
    dist.barrier()  # nobody gets past it before all have come


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", 0)))
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
    parser.add_argument("--url", default=f"tcp://127.0.0.1:{os.environ.get('MASTER_PORT', 23456)}")
    parser.add_argument("--backend", default="lockstep")
    options = parser.parse_args()
    dist.init_process_group(options.backend, init_method=options.url, rank=options.rank, world_size=options.world_size)
    rank, size = dist.get_rank(), dist.get_world_size()
    reductions(rank, size)
    movements(rank, size)
    whole_tensors(rank, size)
    objects(rank, size)
    asynchronous(rank)
    if rank == 0:
        print(f"every collective did what it says, with {size} process(es) on {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
