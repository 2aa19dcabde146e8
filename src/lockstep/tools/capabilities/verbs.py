"""A small program per operation of torch.distributed, which checks whether it works on this group.

Every program is called on all ranks, with a new default group; it creates tensors on the given device, and
returns whether the result is right. An exception means that the group does not support the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["CLASSIC", "VERBS", "Verb"]

Verb = Callable[[torch.device], bool]


def _own(device: torch.device) -> torch.Tensor:
    """This rank's number, shape (3,)."""
    return torch.full((3,), float(dist.get_rank()), device=device)


def _blank(device: torch.device) -> torch.Tensor:
    return torch.full((3,), -1.0, device=device)


def _blanks(device: torch.device) -> list[torch.Tensor]:
    """One blank tensor per rank."""
    return [_blank(device) for _ in range(dist.get_world_size())]


def _ranks() -> list[float]:
    return [float(rank) for rank in range(dist.get_world_size())]


def _holds(tensors: Sequence[torch.Tensor], values: Sequence[float]) -> bool:
    return all(bool((tensor == value).all()) for tensor, value in zip(tensors, values, strict=True))


# ---- point to point: from rank 0 to the last rank ----------------------------------------------------------------


def _pass_on(
    device: torch.device, send: Callable[[torch.Tensor, int], object], receive: Callable[[torch.Tensor, int], object]
) -> bool:
    last = dist.get_world_size() - 1
    if last == 0:
        raise RuntimeError("a message needs two ranks")
    if dist.get_rank() == 0:
        send(_own(device), last)
        return True
    if dist.get_rank() != last:
        return True
    tensor = _blank(device)
    receive(tensor, 0)
    return _holds([tensor], [0.0])


def _send(device: torch.device) -> bool:
    return _pass_on(device, dist.send, dist.recv)


def _recv_any(device: torch.device) -> bool:
    return _pass_on(device, dist.send, lambda tensor, _: dist.recv(tensor))


def _tags(device: torch.device) -> bool:
    def send(tensor: torch.Tensor, peer: int) -> None:
        requests = [dist.isend(tensor + tag, peer, tag=tag) for tag in (1, 2)]
        for request in requests:
            if request is not None:
                request.wait()

    def receive(tensor: torch.Tensor, peer: int) -> None:
        dist.recv(tensor, peer, tag=2)
        second = tensor.clone()
        dist.recv(tensor, peer, tag=1)
        tensor += 1 - second  # 1 + 1 - 2, if tags are respected

    return _pass_on(device, send, receive)


def _isend(device: torch.device) -> bool:
    def wait(request: dist.Work | None) -> None:
        if request is not None:
            request.wait()

    return _pass_on(
        device,
        lambda tensor, peer: wait(dist.isend(tensor, peer)),
        lambda tensor, peer: wait(dist.irecv(tensor, peer)),
    )


def _batch(device: torch.device) -> bool:
    def run(kind: Callable[..., object], tensor: torch.Tensor, peer: int) -> None:
        for request in dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer)]):
            request.wait()

    return _pass_on(
        device,
        lambda tensor, peer: run(dist.isend, tensor, peer),
        lambda tensor, peer: run(dist.irecv, tensor, peer),
    )


def _send_object(device: torch.device) -> bool:
    def receive(tensor: torch.Tensor, peer: int) -> None:
        received = [None]
        dist.recv_object_list(received, peer, device=device)
        tensor.fill_(0.0 if received == [{"a": 1}] else -1.0)

    return _pass_on(device, lambda _, peer: dist.send_object_list([{"a": 1}], peer, device=device), receive)


# ---- collectives -------------------------------------------------------------------------------------------------


def _broadcast(device: torch.device) -> bool:
    tensor = _own(device)
    dist.broadcast(tensor, src=0)
    return _holds([tensor], [0.0])


def _all_reduce(device: torch.device) -> bool:
    tensor = _own(device)
    dist.all_reduce(tensor)
    return _holds([tensor], [sum(_ranks())])


def _reduce(device: torch.device) -> bool:
    tensor = _own(device)
    dist.reduce(tensor, dst=0)
    return dist.get_rank() != 0 or _holds([tensor], [sum(_ranks())])


def _all_gather(device: torch.device) -> bool:
    outputs = _blanks(device)
    dist.all_gather(outputs, _own(device))
    return _holds(outputs, _ranks())


def _gather(device: torch.device) -> bool:
    outputs = _blanks(device) if dist.get_rank() == 0 else None
    dist.gather(_own(device), outputs, dst=0)
    return outputs is None or _holds(outputs, _ranks())


def _scatter(device: torch.device) -> bool:
    inputs = [torch.full((3,), rank, device=device) for rank in _ranks()] if dist.get_rank() == 0 else None
    output = _blank(device)
    dist.scatter(output, inputs, src=0)
    return _holds([output], [float(dist.get_rank())])


def _reduce_scatter(device: torch.device) -> bool:
    output = _blank(device)
    dist.reduce_scatter(output, [_own(device) for _ in _ranks()])
    return _holds([output], [sum(_ranks())])


def _all_to_all(device: torch.device) -> bool:
    outputs = _blanks(device)
    dist.all_to_all(outputs, [_own(device) for _ in _ranks()])
    return _holds(outputs, _ranks())


def _barrier(device: torch.device) -> bool:
    dist.barrier()
    return True


# ---- newer forms of collectives ----------------------------------------------------------------------------------


def _all_gather_into_tensor(device: torch.device) -> bool:
    output = torch.cat(_blanks(device))
    dist.all_gather_into_tensor(output, _own(device))
    return _holds(output.chunk(dist.get_world_size()), _ranks())


def _reduce_scatter_tensor(device: torch.device) -> bool:
    output = _blank(device)
    dist.reduce_scatter_tensor(output, torch.cat([_own(device) for _ in _ranks()]))
    return _holds([output], [sum(_ranks())])


def _all_to_all_single(device: torch.device) -> bool:
    output = torch.cat(_blanks(device))
    dist.all_to_all_single(output, torch.cat([_own(device) for _ in _ranks()]))
    return _holds(output.chunk(dist.get_world_size()), _ranks())


def _all_to_all_uneven(device: torch.device) -> bool:
    """Rank r sends r + 1 numbers to every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = [peer + 1 for peer in range(size)]
    output = torch.full((sum(sizes),), -1.0, device=device)
    inputs = torch.full((size * (rank + 1),), float(rank), device=device)
    dist.all_to_all_single(output, inputs, sizes, [rank + 1] * size)
    return _holds(torch.split(output, sizes), _ranks())


def _all_gather_uneven(device: torch.device) -> bool:
    """Rank r contributes r + 1 numbers."""
    outputs = [torch.full((peer + 1,), -1.0, device=device) for peer in range(dist.get_world_size())]
    rank = dist.get_rank()
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank), device=device))
    return _holds(outputs, _ranks())


def _asynchronous(device: torch.device) -> bool:
    tensor = _own(device)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    return _holds([tensor], [sum(_ranks())])


def _bfloat16(device: torch.device) -> bool:
    tensor = _own(device).bfloat16()
    dist.all_reduce(tensor)
    return _holds([tensor], [sum(_ranks())])


def _average(device: torch.device) -> bool:
    tensor = _own(device)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return _holds([tensor], [sum(_ranks()) / dist.get_world_size()])


def _sparse(device: torch.device) -> bool:
    tensor = torch.eye(3, device=device).to_sparse()
    dist.all_reduce(tensor)
    return bool((tensor.to_dense() == dist.get_world_size() * torch.eye(3, device=device)).all())


def _objects(device: torch.device) -> bool:
    names: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(names, dist.get_rank())
    shared: list[object] = [{"a": 1}] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(shared, src=0)
    return names == list(range(dist.get_world_size())) and shared == [{"a": 1}]


def _new_group(device: torch.device) -> bool:
    tensor = _own(device)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    dist.all_reduce(tensor, group=groups[dist.get_rank()])
    return _holds([tensor], [float(dist.get_rank())])


def _monitored_barrier(device: torch.device) -> bool:
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    return True


# The rows of the table in PyTorch's documentation, since 1.0.
CLASSIC: dict[str, Verb] = {
    "send": _send,
    "recv": _send,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}

VERBS: dict[str, Verb] = {
    **CLASSIC,
    "isend, irecv": _isend,
    "tags": _tags,
    "recv from any rank": _recv_any,
    "batch_isend_irecv": _batch,
    "send_object_list": _send_object,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single, uneven": _all_to_all_uneven,
    "all_gather, uneven": _all_gather_uneven,
    "async_op": _asynchronous,
    "bfloat16": _bfloat16,
    "ReduceOp.AVG": _average,
    "sparse all_reduce": _sparse,
    "objects": _objects,
    "new_group": _new_group,
    "monitored_barrier": _monitored_barrier,
}
