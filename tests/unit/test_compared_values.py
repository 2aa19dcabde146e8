"""Which value of a parameter the ranks compare in an averaging."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.parallel.rank_agreement import RankAgreement

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
    agreement = RankAgreement(["weight"], [torch.nn.Parameter(parameter)], NO_GROUP, torch.device("cpu"))
    flat = parameter.flatten()
    for number in range(8):
        (value,) = struct.unpack("<d", struct.pack("<q", agreement.take_words().sample))
        assert value == flat[number * STEP % len(flat)].item().real
        agreement.num_averagings += 1


def test_what_was_claimed_is_said_once() -> None:
    agreement = RankAgreement(["weight"], [torch.ones(1)], NO_GROUP, torch.device("cpu"))
    agreement.claim("8 samples", "samples 0 to 7 of epoch 0")
    agreement.claim("4 rows", "")
    words = agreement.take_words()
    assert (words.claim, words.batches) == ("4 rows, 8 samples", 0)
    assert agreement.take_words().claim == ""
    agreement.claim("8 samples", "samples 0 to 7 of epoch 0")
    agreement.forget_claims()
    assert agreement.take_words().claim == ""
