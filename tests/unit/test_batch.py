"""What is remembered of the loaders in use, and of forward passes, and when it is looked up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep import batch
from lockstep.batch import Division, LoaderToken
from lockstep.metrics import Mean


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    batch.reset()
    yield
    batch.reset()


def test_divisions_are_those_of_the_loaders_in_use() -> None:
    """Also when one is asked again and again, and a loader comes as another goes."""
    four, six = Division(4, 4, 2), Division(6, 6, 2)
    first, second = LoaderToken(), LoaderToken()
    batch.register(first, 0, {four})
    assert batch.divisions(0, 2) == batch.divisions(0, 2) == (four,)
    assert batch.divisions(1, 2) == batch.divisions(0, 3) == ()
    batch.register(first, 0, {six})
    assert batch.divisions(0, 2) == (four, six)
    del first
    batch.register(second, 1, {six})
    assert batch.divisions(0, 2) == ()
    assert batch.divisions(1, 2) == (six,)
    batch.reset()
    assert batch.divisions(1, 2) == ()


def test_a_metric_walks_no_graph_before_an_engine_knew_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[torch.Tensor] = []
    monkeypatch.setattr(batch, "find_marks", lambda tensor: walked.append(tensor) or [])
    loss = torch.ones((), requires_grad=True) * 2
    batch.mark(loss, object(), tells_share=False)
    Mean().update(loss)
    assert not walked
    batch.mark(loss, object(), tells_share=True)
    Mean().update(loss)
    assert walked == [loss]
