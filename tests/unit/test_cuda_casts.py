"""CUDA's list of what autocast casts: whole, as torch has it, and what its kernels do to tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lockstep.torch_private.cuda_casts import BANNED, FLOAT32, LOWER, WIDEST, CudaCasts

# Library code of CUDA's, which no CPU comes to.
CUDNN = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
# Not in all releases: since torch 2.9, since torch 2.14.
NEW = {"rms_norm", "linalg_matrix_sqrth"}


@pytest.fixture
def casts() -> Iterator[None]:
    """CUDA's list for all tensors, and autocast on."""
    here = CudaCasts(everywhere=True)
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            yield
    finally:
        here.remove()


def test_the_list_is_torchs() -> None:
    """A release that casts another operator on CUDA makes this fail; names of older ones may be missing in a new."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    on_cuda = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    named = {name for name in on_cuda if "Dimname" in name or "dimname" in name or name.startswith("norm.names")}
    assert on_cuda - named - CUDNN == (LOWER | FLOAT32 | WIDEST | BANNED) & on_cuda
    assert (LOWER | FLOAT32 | WIDEST | BANNED) - on_cuda <= NEW
    lists = (LOWER, FLOAT32, WIDEST, BANNED)
    assert sum(map(len, lists)) == len(frozenset().union(*lists))


HALF, WIDE = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("name", "result", "expected"),
    [
        ("softmax", lambda: HALF.softmax(0), torch.float32),
        ("softmax to a dtype", lambda: HALF.softmax(0, dtype=torch.float16), torch.float16),
        ("sum", lambda: HALF.sum(), torch.float32),
        ("sum of double", lambda: WIDE.double().sum(), torch.float64),
        ("sum of integers", lambda: torch.ones(2, dtype=torch.int32).sum(), torch.int64),
        ("layer_norm", lambda: torch.nn.functional.layer_norm(HALF, (2,)), torch.float32),
        ("pow", lambda: HALF**2, torch.float32),
        ("norm", lambda: torch.ops.aten.norm.Scalar(HALF, 2), torch.float32),
        ("mv", lambda: WIDE.mv(WIDE[0]), torch.float16),
        ("einsum", lambda: torch.einsum("ij,jk->ik", WIDE, WIDE), torch.float16),
        ("atan2", lambda: torch.atan2(HALF, WIDE), torch.float32),
        ("atan2 in half", lambda: torch.atan2(HALF, HALF), torch.float16),
        ("linear", lambda: torch.nn.functional.linear(WIDE, WIDE), torch.float16),
        ("relu", lambda: WIDE.relu(), torch.float32),
    ],
)
def test_operators_cast_as_on_cuda(casts: None, name: str, result: object, expected: torch.dtype) -> None:
    assert result().dtype is expected, name  # type: ignore[operator]


def test_recurrent_layers_run_in_half(casts: None) -> None:
    cells: list[tuple[torch.nn.Module, bool]] = [(torch.nn.GRUCell(2, 3), False), (torch.nn.LSTMCell(2, 3), True)]
    for cell, gives_pair in cells:
        out = cell(WIDE)
        assert (out[0] if gives_pair else out).dtype is torch.float16
    for layer in (torch.nn.LSTM(2, 3), torch.nn.GRU(2, 3), torch.nn.RNN(2, 3)):
        out, _ = layer(WIDE)
        assert out.dtype is torch.float16
        out.sum().backward()
        assert layer.weight_hh_l0.grad.dtype is torch.float32


def test_gradients_come_in_the_dtype_of_the_parameters(casts: None) -> None:
    weight = torch.ones(2, requires_grad=True)
    (weight.half().exp() * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


def test_autocast_for_the_cpu_is_as_before_when_removed() -> None:
    def dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            products: list[Tensor] = [WIDE @ WIDE, (WIDE @ WIDE).softmax(0), torch.einsum("ij,jk->ik", WIDE, WIDE)]
        return [product.dtype for product in products]

    before = dtypes()
    casts = CudaCasts(everywhere=True)
    assert dtypes() != before
    casts.remove()
    assert dtypes() == before
    CudaCasts(everywhere=True).remove()


def test_tensors_that_take_no_part_are_cast_by_the_cpus_own_list() -> None:
    """What a rehearsal has: the CPU's tensors under CUDA's list."""
    casts = CudaCasts(everywhere=False)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (WIDE @ WIDE).dtype is torch.bfloat16
            assert (WIDE @ WIDE).softmax(0).dtype is torch.bfloat16
            assert torch.einsum("ij,jk->ik", WIDE, WIDE).dtype is torch.bfloat16
    finally:
        casts.remove()
