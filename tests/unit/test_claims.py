"""Whether ranks' claims differ is seen in averaged elements, whatever their dtype and however many ranks there are."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lockstep.errors import CollectiveMismatch
from lockstep.parallel.claims import NUM_ELEMENTS, Claims

NO_GROUP: Any = None  # writing and reading are local, unless claims differ
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def verdicts(claims: list[str], dtype: torch.dtype) -> list[bool]:
    """For each rank, whether it sees a difference after the ranks' elements were averaged."""
    ranks = [Claims(NO_GROUP, torch.device("cpu")) for _ in claims]
    elements = [torch.empty(NUM_ELEMENTS, dtype=dtype) for _ in claims]
    for rank, claim, own in zip(ranks, claims, elements, strict=True):
        rank.set_elements(own)
        rank.write(claim)
    average: Tensor = sum(own / len(claims) for own in elements)  # type: ignore[assignment]
    return [differs(rank, own.copy_(average)) for rank, own in zip(ranks, elements, strict=True)]


def differs(rank: Claims, _: Tensor) -> bool:
    with (
        mock.patch("lockstep.parallel.claims.first_that_differ", return_value=[(0, "a"), (1, "b")]),
        mock.patch("torch.distributed.get_rank", return_value=0),
    ):
        try:
            rank.read()
        except CollectiveMismatch:
            return True
    return False


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 7, 64, 1000])
def test_all_ranks_see_one_that_differs(dtype: torch.dtype, num_ranks: int) -> None:
    same = ["32 samples"] * num_ranks
    assert not any(verdicts(same, dtype))
    for other in ("31 samples", "", "32 samples in 2 parts"):
        assert all(verdicts([*same[1:], other], dtype))


def test_half_of_the_ranks_may_differ_and_all_in_pairs() -> None:
    assert all(verdicts(["a", "b"] * 4, torch.float32))
    assert all(verdicts([str(rank) for rank in range(8)], torch.bfloat16))
    assert all(all(verdicts(list(pair), torch.float16)) for pair in itertools.combinations("abcdefgh", 2))


def test_a_later_claim_replaces_the_first() -> None:
    claims, elements = Claims(NO_GROUP, torch.device("cpu")), torch.empty(NUM_ELEMENTS)
    claims.set_elements(elements)
    written = []
    for claim in ("a", "b", "a"):
        claims.write(claim)
        claims.read()
        written.append(elements.tolist())
        elements.fill_(torch.nan)  # as an averaging may leave it
    assert written[0] == written[2] != written[1]
    assert {
        sum(pair) for pair in zip(written[0][: NUM_ELEMENTS // 2], written[0][NUM_ELEMENTS // 2 :], strict=True)
    } == {1}


def test_a_rank_whose_bits_include_those_of_another_sees_it_too() -> None:
    with mock.patch("lockstep.parallel.claims.fingerprint", int):
        assert all(verdicts(["1", "3"], torch.float32))
        assert all(verdicts(["0", "1", "1"], torch.float32))
