"""all_reduce of sparse tensors: entries that differ in number and place between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import CollectiveMismatch, InputTypeError
from lockstep.testing import run_ranks


def of_rank(rank: int, dense_dims: int, dtype: torch.dtype) -> torch.Tensor:
    """Uncoalesced: `rank` entries, some of them at one place; rank 0 has none."""
    shape = (5, 4, *(3,) * dense_dims)
    rows = torch.arange(rank * 2) % 5
    indices = torch.stack([rows, (rows * rank) % 4])
    values = (torch.arange(rank * 2 * 3**dense_dims).view(rank * 2, *(3,) * dense_dims) % 7 + rank).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def add_up() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for dense_dims in (0, 1, 2):
            tensors = [of_rank(peer, dense_dims, dtype) for peer in range(world_size)]
            expected = sum(tensor.to_dense() for tensor in tensors)
            tensor = tensors[rank].clone()
            dist.all_reduce(tensor)
            assert tensor.is_sparse
            assert tensor.is_coalesced()
            assert tensor.dtype is dtype
            assert torch.equal(tensor.to_dense(), expected), (dtype, dense_dims, tensor, expected)
            work = dist.all_reduce(tensor := tensors[rank].clone(), async_op=True)
            work.wait()
            assert torch.equal(tensor.to_dense(), expected), (dtype, dense_dims, tensor, expected)
    dist.all_reduce(tensor := of_rank(rank, 1, torch.float64), dist.ReduceOp.AVG)
    expected = sum(of_rank(peer, 1, torch.float64).to_dense() for peer in range(world_size)) / world_size
    torch.testing.assert_close(tensor.to_dense(), expected)
    counts = [100 * torch.eye(3, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_reduce(tensor := counts[rank].to_sparse(), dist.ReduceOp.AVG)
    assert torch.equal(tensor.to_dense(), counts[0]), "the sum of 300 is more than uint8 has"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_add_up(world_size: int) -> None:
    run_ranks(add_up, world_size)


def call_wrongly() -> None:
    with pytest.raises(InputTypeError, match="all_reduce of sparse tensors is SUM or AVG, got MAX"):
        dist.all_reduce(of_rank(1, 0, torch.float32), dist.ReduceOp.MAX)
    with pytest.raises(InputTypeError, match="AVG of bool tensors: it needs numbers that can be divided"):
        dist.all_reduce(of_rank(1, 0, torch.int64).bool(), dist.ReduceOp.AVG)
    # Torch 2.6 refuses them itself, in words of its own.
    with pytest.raises(
        (InputTypeError, NotImplementedError), match=r"complex sparse tensors is not possible in place|view_as_real"
    ):
        dist.all_reduce(of_rank(1, 0, torch.complex64))
    dense = torch.ones(5, 4)
    mine = dense.to_sparse() if dist.get_rank() == 0 else dense
    with pytest.raises(CollectiveMismatch, match=r"all_reduce\(sparse float32\[5, 4\], 2 sparse dimension\(s\), SUM\)"):
        dist.all_reduce(mine)
    mine = torch.ones((1, 5) if dist.get_rank() == 0 else (5, 1)).to_sparse()
    with pytest.raises(CollectiveMismatch, match=r"sparse float32\[5, 1\]"):  # indices go by dimensions
        dist.all_reduce(mine)


def test_wrong_calls() -> None:
    run_ranks(call_wrongly, 2)


def train_embedding() -> None:
    """torch's DDP hands a sparse gradient to a sparse all_reduce."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.EmbeddingBag(10, 3, sparse=True))
    words = torch.tensor([[1, 2, 2], [2, 5, 9]])
    model(words[dist.get_rank() : dist.get_rank() + 1]).sum().backward()
    gradient = model.module.weight.grad
    alone = nn.EmbeddingBag(10, 3, sparse=True)
    alone(words).sum().backward()
    assert gradient.is_sparse
    torch.testing.assert_close(gradient.to_dense() * 2, alone.weight.grad.to_dense())


def test_embedding_in_ddp() -> None:
    run_ranks(train_embedding, 2)
