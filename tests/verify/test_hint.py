"""`lockstep run` mentions `lockstep verify` once for each script, on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.commands import verify_hint
from lockstep.launch.config import LaunchConfig


def test_verify_is_mentioned_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(verify_hint, "say", said.append)
    monkeypatch.setenv("HOME", str(tmp_path))
    train = LaunchConfig(target="train.py", args=("--lr", "0.1"), nproc=2)
    monkeypatch.setattr("os.isatty", lambda fd: False)
    verify_hint.mention_verify(train)
    assert said == []
    monkeypatch.setattr("os.isatty", lambda fd: True)
    verify_hint.mention_verify(LaunchConfig(target="train.py", nproc=1))
    assert said == []
    for _ in range(2):
        verify_hint.mention_verify(train)
    assert said == ["lockstep: does one process give the same answer? `lockstep verify train.py --lr 0.1` compares\n"]
    verify_hint.mention_verify(LaunchConfig(target="other", is_module=True, nproc=2))
    assert len(said) == 2
    assert "verify -m other`" in said[1]
