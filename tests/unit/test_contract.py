"""What `lockstep.comm.contract` gives to every backend."""

from __future__ import annotations

import ast

import pytest

from lockstep.comm import shared_memory
from lockstep.comm.contract import Algorithms
from lockstep.comm.hosts.algorithms import HostsAlgorithms
from lockstep.comm.messages.message_algorithms import MessageAlgorithms
from lockstep.shm.algorithms import SharedMemoryAlgorithms
from package_sources import imports_of, modules


@pytest.mark.parametrize("backend", [shared_memory._Algorithms, HostsAlgorithms, MessageAlgorithms])
def test_a_collective_with_a_body_is_there_on_every_backend(
    backend: type[Algorithms], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Algorithms, "all_reduce_twice", lambda self: "made of others", raising=False)
    assert object.__new__(backend).all_reduce_twice() == "made of others"  # type: ignore[attr-defined]


def test_what_shared_memory_brings_comes_first() -> None:
    assert shared_memory._Algorithms.all_reduce is SharedMemoryAlgorithms.all_reduce
    assert not shared_memory._Algorithms.__abstractmethods__


def test_the_contract_knows_no_backend() -> None:
    found = {imported for imported, _ in imports_of(modules()["lockstep.comm.contract"])}
    assert not {name for name in found if name.startswith("lockstep.comm")}


def test_one_function_asks_for_the_class_of_a_group() -> None:
    """What a group can do is asked of its engine and its team; `engine_of` finds the engine."""
    asked = []
    for module in modules().values():
        for node in ast.walk(module.tree):
            match node:
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]) if _KINDS & _names_in(kinds):
                    asked.append(f"{module.name}: {ast.unparse(node)}")
    assert asked == ["lockstep.comm.backend: isinstance(group, EngineProcessGroup)"]


_KINDS = {
    *("EngineProcessGroup", "LockstepProcessGroup", "MixedProcessGroup", "MpiProcessGroup"),
    *("SharedMemoryTeam", "MessageTeam", "HostsTeam", "MpiTeam"),
    *("Engine", "MessageEngine", "HostsEngine"),
}


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
