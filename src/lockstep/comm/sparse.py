"""all_reduce of sparse tensors, such as the gradients of embeddings.

Every rank has different entries. The ranks exchange their numbers of entries, then gather all entries, and each rank
adds them up: in the order of ranks, so that all get the same bits, and 16-bit floats in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.comm.contract import Algorithms
from lockstep.errors import InputError, InputTypeError
from lockstep.shm.kernels import divide, find_kernel, op_name
from lockstep.torch_private.autograd import base_of
from lockstep.torch_private.tensors import make_sparse, num_specified

__all__ = ["all_reduce_sparse", "check_sparse", "describe_sparse"]

_OPS = ("SUM", "AVG")


def check_sparse(tensor: torch.Tensor, op: Any) -> None:
    """Raise unless a sparse tensor can be reduced.

    Raises:
        InputError: it is neither on the CPU nor on a GPU.
        InputTypeError: the operation is not SUM or AVG, or undefined for the dtype; or the tensor is complex.
    """
    base = base_of(tensor)
    if base is not None and base.is_complex():
        # torch.distributed passes a real view of it, and entries added to the view do not reach the tensor.
        raise InputTypeError("all_reduce of complex sparse tensors is not possible in place; use .to_dense()")
    if not tensor.is_cpu and not tensor.is_cuda:
        raise InputError(f"all_reduce: the lockstep group supports CPU and CUDA tensors, got {tensor.device}")
    if op_name(op) not in _OPS:
        raise InputTypeError(f"all_reduce of sparse tensors is {' or '.join(_OPS)}, got {op_name(op)}; use .to_dense()")
    find_kernel(op, tensor.dtype)


def describe_sparse(tensor: torch.Tensor, op: Any) -> str:
    """`all_reduce(sparse float32[10, 3], 1 sparse dimension(s), SUM)`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"all_reduce(sparse {dtype}{list(tensor.shape)}, {tensor.sparse_dim()} sparse dimension(s), {op_name(op)})"


def all_reduce_sparse(algorithms: Algorithms, world_size: int, tensor: torch.Tensor, op: Any, timeout_s: float) -> None:
    """Reduce a sparse COO tensor in place over all ranks. Collective.

    Args:
        algorithms: the collectives of the team.
        world_size: ranks of the team.
        tensor: the same shape and number of sparse dimensions on all ranks; entries may differ. Coalesced afterwards.
        op: SUM or AVG.
        timeout_s: seconds until a missing rank is an error.
    """
    own = tensor.detach().cpu().coalesce()  # see [Note: staging]
    counts = torch.empty(world_size, dtype=torch.int64, device="cpu")
    gathered = [counts[rank : rank + 1] for rank in range(world_size)]
    algorithms.all_gather(gathered, torch.tensor([num_specified(own)], device="cpu"), timeout_s)
    per_rank = counts.tolist()
    indices = _gather(algorithms, own.indices().t(), per_rank, timeout_s).t()
    values = _gather(algorithms, own.values(), per_rank, timeout_s)
    kernel = find_kernel(op, tensor.dtype)
    if kernel.accumulate is not None:
        values = values.to(kernel.accumulate)
    total = make_sparse(indices, values, tensor.shape, is_checked=True).coalesce()
    values = total.values()
    if kernel.divide:
        divide(values, world_size)
    values = values.to(tensor.dtype)
    result = make_sparse(total.indices(), values, tensor.shape, is_checked=True, is_coalesced=True)
    with torch.no_grad():
        tensor.copy_(result.to(tensor.device))


def _gather(algorithms: Algorithms, rows: torch.Tensor, per_rank: list[int], timeout_s: float) -> torch.Tensor:
    """The rows of all ranks, concatenated."""
    row_numel = torch.Size(rows.shape[1:]).numel()
    outputs = [torch.empty(count * row_numel, dtype=rows.dtype, device="cpu") for count in per_rank]
    algorithms.all_gather(outputs, rows.contiguous().view(-1), timeout_s)
    return torch.cat(outputs).view(sum(per_rank), *rows.shape[1:])
