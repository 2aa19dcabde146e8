"""Which value of a parameter the ranks compare in an averaging."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.parallel.divergence import DivergenceCheck

NO_GROUP: Any = None  # to take a sample is local
STEP = 2654435761  # from one position to the next, round and round


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "parameter",
    [
        numbers(3, 5),
        numbers(3, 5).T,
        numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
        numbers(7, 6)[2:, 1:4],
        numbers(4, 1).expand(4, 3),
        numbers(1).squeeze(),
        numbers(11).double(),
        numbers(4, 4).bfloat16(),
        torch.complex(numbers(6), numbers(6)),
    ],
    ids=lambda each: f"{each.dtype}{list(each.shape)} strides {each.stride()}",
)
def test_a_sample_is_a_value_of_the_parameter(parameter: Tensor) -> None:
    """In the order of its indices, wherever they lie in memory."""
    check = DivergenceCheck(["weight"], [torch.nn.Parameter(parameter)], NO_GROUP, torch.device("cpu"))
    flat = parameter.flatten()
    for number in range(8):
        (value,) = struct.unpack("<d", struct.pack("<q", check.sample()))
        assert value == flat[number * STEP % len(flat)].item().real
        check._num_averagings += 1
