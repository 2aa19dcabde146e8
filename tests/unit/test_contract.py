"""What `lockstep.comm.contract` gives to every backend."""

from __future__ import annotations

import pytest

from lockstep.comm import shared_memory
from lockstep.comm.contract import Algorithms
from lockstep.comm.hosts.algorithms import HostsAlgorithms
from lockstep.comm.messages.message_algorithms import MessageAlgorithms
from lockstep.shm.algorithms import SharedMemoryAlgorithms


@pytest.mark.parametrize("backend", [shared_memory._Algorithms, HostsAlgorithms, MessageAlgorithms])
def test_a_collective_with_a_body_is_there_on_every_backend(
    backend: type[Algorithms], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Algorithms, "all_reduce_twice", lambda self: "made of others", raising=False)
    assert object.__new__(backend).all_reduce_twice() == "made of others"  # type: ignore[attr-defined]


def test_what_shared_memory_brings_comes_first() -> None:
    assert shared_memory._Algorithms.all_reduce is SharedMemoryAlgorithms.all_reduce
    assert not shared_memory._Algorithms.__abstractmethods__
