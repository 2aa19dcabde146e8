"""allreduce of sparse tensors, by gathering their entries."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.compat.horovod.torch.mpi_ops.gathers import start_all_gather
from lockstep.compat.horovod.torch.mpi_ops.handles import channel_of
from lockstep.compat.horovod.torch.mpi_ops.reductions import Average, ReductionOp, Sum
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.errors import InputError
from lockstep.torch_private.tensors import indices_of, make_sparse, values_of

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start summing a sparse tensor over all ranks, by gathering its entries. Collective.

    Args:
        tensor: sparse COO, the same shape on all ranks; entries may differ.
        name: see `allreduce_async`.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns a new sparse tensor, not coalesced.

    Raises:
        InputError: the tensor is dense, or the operation is not supported.
    """
    if tensor.layout is not torch.sparse_coo:
        raise InputError(f"sparse_allreduce_async: expected a sparse COO tensor, got one with layout {tensor.layout}")
    if op not in (Average, Sum):
        raise InputError(f"sparse_allreduce_async: op is {ReductionOp(op).name}; expected Average or Sum")
    channel = channel_of(process_set, "allreduce")
    key = channel.full_name("sparse_allreduce", name)
    own = tensor.detach()
    indices = start_all_gather([indices_of(own).t().contiguous()], True, f"{key}.indices", process_set)
    values = start_all_gather([values_of(own).contiguous()], True, f"{key}.values", process_set)
    channel.rouse()
    shape, size = tensor.shape, len(channel.ranks)

    def finish() -> torch.Tensor:
        gathered = values.wait()
        if op == Average:
            gathered = gathered / size
        return make_sparse(indices.wait().t(), gathered, shape)

    return finish
