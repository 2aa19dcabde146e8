"""The engines that a process knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.drift import engines as drift


class Engine(torch.nn.Module):
    """What an engine is for those who look for engines."""

    process_group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(1, 1)


@pytest.fixture(autouse=True)
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "_engines", [])


def test_engines_are_those_that_live() -> None:
    engines = [Engine() for _ in range(3)]
    for engine in engines:
        drift.note_engine(engine)
    assert drift.engines() == engines
    del engine, engines[1]
    assert drift.engines() == engines
    drift.note_engine(engines[-1])
    assert drift.engines() == engines, "each once"
    assert len(drift._engines) == 2, "those that are gone are forgotten"
