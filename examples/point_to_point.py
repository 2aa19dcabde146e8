"""From one rank to another: blocking and not, with tags, from anybody, several at once, and objects.

    lockstep run --nproc 2 examples/point_to_point.py

Initialised by `env://`: the launcher (this one, torchrun, srun …) has set RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Each rank sends to the next one round a ring, so that the script runs at any number of ranks; one alone
has nobody to talk to.
"""

import torch
import torch.distributed as dist

import lockstep  # noqa: F401 - brings the backend


def blocking(rank: int, size: int) -> None:
    """Rank 0 begins; whoever has received sends on. `send` and `recv` return when the tensor may be used again."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    else:
        dist.recv(tensor, src=rank - 1)
        if rank + 1 < size:
            dist.send(tensor, dst=rank + 1)
    print(f"rank {rank} has {tensor.item()}")
    assert tensor.item() == 1


def not_blocking(rank: int, size: int) -> None:
    """Both are under way at once, so a ring cannot lock up; neither tensor may be touched before `wait`."""
    outgoing, incoming = torch.full((3,), float(rank)), torch.empty(3)
    requests = [dist.isend(outgoing, dst=(rank + 1) % size), dist.irecv(incoming, src=(rank - 1) % size)]
    for request in requests:
        request.wait()
        assert request.is_completed()
    assert (incoming == (rank - 1) % size).all()


def tagged(rank: int, size: int) -> None:
    """Messages with different tags may be received in another order than they were sent."""
    if rank == 0:
        requests = [dist.isend(torch.tensor([tag]), dst=1, tag=tag) for tag in (1, 2, 3)]
        for request in requests:
            request.wait()
    elif rank == 1:
        received = torch.zeros(3, dtype=torch.int64)
        for tag in (3, 1, 2):
            dist.recv(received[tag - 1 : tag], src=0, tag=tag)
        assert received.tolist() == [1, 2, 3]


def from_anybody(rank: int, size: int) -> None:
    """Without `src`, `recv` takes what comes first and returns who sent it."""
    if rank != 0:
        dist.send(torch.tensor([rank]), dst=0)
        return
    tensor, senders = torch.empty(1, dtype=torch.int64), set()
    for _ in range(size - 1):
        sender = dist.recv(tensor)
        assert tensor.item() == sender
        senders.add(sender)
    assert senders == set(range(1, size))


def several(rank: int, size: int) -> None:
    """A halo exchange: to both neighbours and from both, in one call."""
    left, right = (rank - 1) % size, (rank + 1) % size
    from_left, from_right = torch.empty(1), torch.empty(1)
    operations = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), right, tag=1),
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), left, tag=2),
        dist.P2POp(dist.irecv, from_left, left, tag=1),
        dist.P2POp(dist.irecv, from_right, right, tag=2),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert (from_left.item(), from_right.item()) == (left, right)


def objects(rank: int, size: int) -> None:
    """Anything that can be pickled. Receive objects only from ranks you trust: unpickling runs what they say."""
    if rank == 0:
        dist.send_object_list([{"step": 7}, "ready"], dst=1)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == [{"step": 7}, "ready"]


def main() -> None:
    dist.init_process_group("lockstep", init_method="env://")
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        for part in (blocking, not_blocking, tagged, from_anybody, several, objects):
            part(rank, size)
    dist.destroy_process_group()
    if rank == 0:
        print(f"all messages arrived between {size} process(es)")


if __name__ == "__main__":
    main()
