"""The `*_multigpu` functions of `torch.distributed`: several tensors per process, each treated as a rank.

torch had them until 2.0, for nccl. A process that drives n devices passes n tensors, one per device, and a group of w
processes has w·n ranks: device j of process k is number k·n + j. Here they work on any backend and device,
by a local step over the process's tensors and one ordinary collective with one tensor per process.

Reductions add within the process first and then over processes. On a lockstep group the order is fixed; on others, as
before, it depends on the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import InputError, InputTypeError
from lockstep.shm.kernels import find_kernel

__all__ = [
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
]

_Tensors = Sequence[torch.Tensor]


class _Handle:
    """The work of an asynchronous call, and what is left to do when it is done.

    Args:
        work: torch's handle, or None for a process outside the group.
        finish: called by the first `wait`.
    """

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the other processes, and write the result to all tensors."""
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


def _run(work: Any, finish: Callable[[], None], async_op: bool) -> _Handle | None:
    # A process outside the group has no work, and leaves its tensors alone.
    handle = _Handle(work, finish if work is not None else lambda: None)
    if async_op:
        return handle
    handle.wait()
    return None


def _check(tensors: object, name: str) -> _Tensors:
    if not isinstance(tensors, Sequence) or not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise InputTypeError(f"{name} must be a list of tensors, one per device of this process, got {tensors!r}")
    if len({(each.shape, each.dtype) for each in tensors}) > 1:
        kinds = [f"{tuple(each.shape)} {each.dtype}" for each in tensors]
        raise InputError(f"{name}: all tensors must have the same shape and dtype, got {', '.join(kinds)}")
    return tensors


def _check_index(index: int, tensors: _Tensors, name: str) -> None:
    if not 0 <= index < len(tensors):
        raise InputError(f"{name}={index} is out of range: there are {len(tensors)} tensors")


def _check_lists(lists: object, own: _Tensors, group: Any, name: str) -> Sequence[_Tensors] | None:
    """Check the lists, one per own device, each with a tensor per device of the group; None outside the group."""
    if not _is_member(group):
        return None
    if not isinstance(lists, Sequence) or len(lists) != len(own):
        raise InputError(f"{name} needs {len(own)} lists, one per device of this process, got {lists!r}")
    length = _world(group, own)
    for each in lists:
        if len(_check(each, name)) != length:
            raise InputError(
                f"each list in {name} needs {length} tensors, one per device of every process, got {len(each)}"
            )
    return lists


def _reduce_here(tensors: _Tensors, op: Any) -> torch.Tensor:
    """Reduce the tensors of this process to one, on the first's device, before the reduction between processes."""
    first = tensors[0]
    parts = [each.detach().to(first.device).contiguous().view(-1) for each in tensors]
    total = torch.empty_like(first, memory_format=torch.contiguous_format)
    # AVG divides once, by the number of all devices, in `_finish_average`.
    find_kernel(dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, first.dtype).reduce(parts, total.view(-1))
    return total


def _across(op: Any) -> Any:
    """The operation between processes: SUM for AVG, which divides by the number of all devices."""
    return dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op


def _finish_average(total: torch.Tensor, op: Any, num_devices: int) -> None:
    if op == dist.ReduceOp.AVG:
        total.div_(num_devices)


def _is_member(group: Any) -> bool:
    return dist.get_rank(group) >= 0


def _world(group: Any, tensors: _Tensors) -> int:
    return dist.get_world_size(group) * len(tensors)


def all_reduce_multigpu(
    tensor_list: _Tensors, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _Handle | None:
    """Reduce the tensors of all devices of all processes in place. Collective.

    Args:
        tensor_list: one per device of this process, equally many in each process; all of the same shape and dtype.
        op: any `ReduceOp`.
        group: the processes that take part; by default all.
        async_op: return a handle instead of waiting.

    Raises:
        InputError: tensors differ in shape or dtype.
        InputTypeError: not a list of tensors, or the dtype does not support the operation.
    """
    _check(tensor_list, "tensor_list")
    if not _is_member(group):
        return _run(None, lambda: None, async_op)
    total = _reduce_here(tensor_list, op)

    def finish() -> None:
        _finish_average(total, op, _world(group, tensor_list))
        for each in tensor_list:
            each.detach().copy_(total)

    return _run(dist.all_reduce(total, _across(op), group, async_op=True), finish, async_op)


def reduce_multigpu(
    tensor_list: _Tensors,
    dst: int,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> _Handle | None:
    """Reduce the tensors of all devices into one of them. Collective.

    Args:
        tensor_list: see `all_reduce_multigpu`. Only the destination's is written.
        dst: rank of the process that gets the result.
        op: any `ReduceOp`.
        group: the processes that take part; by default all.
        async_op: return a handle instead of waiting.
        dst_tensor: number of the tensor there.

    Raises:
        InputError: tensors differ, or the index is out of range.
        InputTypeError: see `all_reduce_multigpu`.
    """
    _check(tensor_list, "tensor_list")
    _check_index(dst_tensor, tensor_list, "dst_tensor")
    if not _is_member(group):
        return _run(None, lambda: None, async_op)
    total = _reduce_here(tensor_list, op)

    def finish() -> None:
        if dist.get_rank() == dst:
            _finish_average(total, op, _world(group, tensor_list))
            tensor_list[dst_tensor].detach().copy_(total)

    return _run(dist.reduce(total, dst, _across(op), group, async_op=True), finish, async_op)


def broadcast_multigpu(
    tensor_list: _Tensors, src: int, group: Any = None, async_op: bool = False, src_tensor: int = 0
) -> _Handle | None:
    """Copy a tensor of one device to all devices of all processes. Collective.

    Args:
        tensor_list: one per device of this process; all are overwritten, except for the source.
        src: rank of the source process.
        group: the processes that take part; by default all.
        async_op: return a handle instead of waiting.
        src_tensor: number of the tensor there.

    Raises:
        InputError: tensors differ, or the index is out of range.
        InputTypeError: not a list of tensors.
    """
    _check(tensor_list, "tensor_list")
    _check_index(src_tensor, tensor_list, "src_tensor")
    value = tensor_list[src_tensor].detach().contiguous()

    def finish() -> None:
        for each in tensor_list:
            each.detach().copy_(value)

    return _run(dist.broadcast(value, src, group, async_op=True), finish, async_op)


def all_gather_multigpu(
    output_tensor_lists: Sequence[_Tensors], input_tensor_list: _Tensors, group: Any = None, async_op: bool = False
) -> _Handle | None:
    """Gather the tensors of all devices on every device. Collective.

    Args:
        output_tensor_lists: for each device of this process, a list of all results; tensor k·n + j is that of device j
            of process k, if each process has n devices.
        input_tensor_list: one per device of this process.
        group: the processes that take part; by default all.
        async_op: return a handle instead of waiting.

    Raises:
        InputError: tensors differ, or lists have wrong lengths.
        InputTypeError: not lists of tensors.
    """
    own = _check(input_tensor_list, "input_tensor_list")
    lists = _check_lists(output_tensor_lists, own, group, "output_tensor_lists")
    if lists is None:
        return _run(None, lambda: None, async_op)
    packed = torch.stack([each.detach().to(own[0].device) for each in own])
    gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]

    def finish() -> None:
        everything = [each for part in gathered for each in part]
        for outputs in lists:
            for output, each in zip(outputs, everything, strict=True):
                output.detach().copy_(each)

    return _run(dist.all_gather(gathered, packed, group, async_op=True), finish, async_op)


def reduce_scatter_multigpu(
    output_tensor_list: _Tensors,
    input_tensor_lists: Sequence[_Tensors],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> _Handle | None:
    """Reduce a list of tensors from every device; each device gets the result at its own index. Collective.

    Args:
        output_tensor_list: one per device of this process; device j of process k gets the result at k·n + j, if each
            process has n devices.
        input_tensor_lists: for each device of this process, its w·n tensors.
        op: any `ReduceOp`.
        group: the processes that take part; by default all.
        async_op: return a handle instead of waiting.

    Raises:
        InputError: tensors differ, or lists have wrong lengths.
        InputTypeError: not lists of tensors.
    """
    own = _check(output_tensor_list, "output_tensor_list")
    lists = _check_lists(input_tensor_lists, own, group, "input_tensor_lists")
    if lists is None:
        return _run(None, lambda: None, async_op)
    sums = [_reduce_here(column, op) for column in zip(*lists, strict=True)]
    shares = [torch.stack(sums[first : first + len(own)]) for first in range(0, len(sums), len(own))]
    result = torch.empty_like(shares[0])

    def finish() -> None:
        _finish_average(result, op, _world(group, own))
        for output, each in zip(own, result, strict=True):
            output.detach().copy_(each)

    return _run(dist.reduce_scatter(result, shares, _across(op), group, async_op=True), finish, async_op)
