"""Where gradients lie in buckets, and what the engine accepts as a size for them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import InputError, InputTypeError
from lockstep.parallel.buckets import BucketPlan, copy_all, plan_buckets, view_like
from lockstep.parallel.checks import check_bucket_cap

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
LINE_BYTES = 64

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
parameters = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=30).map(
    lambda described: [torch.empty(shape, dtype=dtype) for shape, dtype in described]
)


def indices(plans: list[BucketPlan]) -> list[list[int]]:
    return [[placement.index for placement in plan.placements] for plan in plans]


@given(parameters, st.integers(1, 2000), st.integers(1, 2000))
def test_every_gradient_has_one_place(tensors: list[torch.Tensor], cap_bytes: int, first_cap_bytes: int) -> None:
    plans = plan_buckets(tensors, cap_bytes, first_cap_bytes)
    assert sorted(index for bucket in indices(plans) for index in bucket) == list(range(len(tensors)))
    for plan in plans:
        end = 0
        for placement in plan.placements:
            tensor = tensors[placement.index]
            assert (tensor.dtype, tensor.device) == (plan.dtype, plan.device)
            assert placement.numel == tensor.numel()
            assert placement.offset >= end, "places overlap"
            assert placement.offset * plan.dtype.itemsize % LINE_BYTES == 0, "a line would be shared"
            end = placement.offset + placement.numel
        assert end <= plan.numel
        assert plan.num_bytes % LINE_BYTES == 0
        assert plan.num_bytes == plan.numel * plan.dtype.itemsize


@given(parameters, st.integers(1, 2000), st.integers(1, 2000))
def test_buckets_are_filled_from_the_back_and_closed_when_full(
    tensors: list[torch.Tensor], cap_bytes: int, first_cap_bytes: int
) -> None:
    plans = plan_buckets(tensors, cap_bytes, first_cap_bytes)
    for dtype in DTYPES:
        of_dtype = [plan for plan in plans if plan.dtype == dtype]
        order = [index for bucket in indices(of_dtype) for index in bucket]
        assert order == sorted(order, reverse=True)
        for number, plan in enumerate(of_dtype):
            cap = cap_bytes if number else first_cap_bytes
            without_last = plan.placements[-1].offset * dtype.itemsize
            assert without_last < cap, "it was full before the last one came"
            if number < len(of_dtype) - 1:
                assert plan.num_bytes >= cap, "it was closed before it was full"


def test_one_byte_makes_a_bucket_for_each() -> None:
    tensors = [torch.empty(3), torch.empty(100), torch.empty(())]
    assert indices(plan_buckets(tensors, 1, 1)) == [[2], [1], [0]]


def test_buckets_come_in_the_order_in_which_they_are_complete() -> None:
    tensors = [torch.empty(16), torch.empty(16, dtype=torch.float64), torch.empty(16), torch.empty(16)]
    assert indices(plan_buckets(tensors, cap_bytes=128, first_cap_bytes=64)) == [[3], [1], [2, 0]]


@pytest.mark.parametrize(("cap_bytes", "first_cap_bytes"), [(0, 1), (1, 0), (-5, 8)])
def test_a_bucket_holds_something(cap_bytes: int, first_cap_bytes: int) -> None:
    with pytest.raises(InputError, match=f"at least one byte, got {cap_bytes} and {first_cap_bytes}"):
        plan_buckets([torch.empty(1)], cap_bytes, first_cap_bytes)


def test_the_cap_is_a_number_of_mib() -> None:
    assert check_bucket_cap(None) == 25.0
    assert check_bucket_cap(0) == 0.0
    assert check_bucket_cap(0.25) == 0.25
    for wrong in (-1, -0.5, math.inf, math.nan):
        with pytest.raises(InputError, match="bucket_cap_mb="):
            check_bucket_cap(wrong)
    for wrong_type in ("25", True, [25]):
        with pytest.raises(InputTypeError, match="must be a number of MiB"):
            check_bucket_cap(wrong_type)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(3, 4),
        torch.empty(()),
        torch.empty(0, 3),
        torch.empty(4, 3).t(),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(3, 1, 2).transpose(0, 2),
    ],
    ids=lambda like: f"{list(like.shape)} {list(like.stride())}",
)
def test_a_view_has_the_strides_of_its_parameter(like: torch.Tensor) -> None:
    flat = torch.arange(like.numel(), dtype=torch.float32)
    view = view_like(flat, like)
    assert (view.shape, view.stride()) == (like.shape, like.stride())
    values = torch.randn(like.shape)
    copy_all([view], [values])
    assert torch.equal(view, values)
    assert sorted(flat.tolist()) == sorted(values.flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.float8_e5m2], ids=str)
def test_a_view_has_a_storage_of_its_size(dtype: torch.dtype) -> None:
    flat = torch.zeros(100, dtype=dtype)
    like = torch.empty(3, 4, dtype=dtype)
    view = view_like(flat[64:76], like)
    assert view.untyped_storage().nbytes() == 12 * dtype.itemsize
    assert view.data_ptr() == flat.data_ptr() + 64 * dtype.itemsize
    assert view_like(flat[:0], like[:0]).shape == (0, 4)


def test_a_view_like_a_tensor_with_holes_has_none() -> None:
    view = view_like(torch.arange(6.0), torch.empty(3, 4)[:, ::2])
    assert view.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
