"""Typed environment variables."""

from __future__ import annotations

import os

import pytest

from lockstep import env
from lockstep.errors import SetupError


def test_get_parses_and_treats_empty_as_unset() -> None:
    assert env.WORLD_SIZE.get({"WORLD_SIZE": "8"}) == 8
    assert env.WORLD_SIZE.get({"WORLD_SIZE": ""}) is None
    assert env.WORLD_SIZE.get({}) is None


def test_get_without_mapping_reads_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert env.MASTER_PORT.get() == 1234
    monkeypatch.delenv("MASTER_PORT")
    assert env.MASTER_PORT.get() is None


def test_bad_text_names_the_variable_the_text_and_its_meaning() -> None:
    with pytest.raises(SetupError, match=r"RANK='one'.*Global rank of this process"):
        env.RANK.get({"RANK": "one"})


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), (" Yes ", True), ("on", True), ("0", False), ("FALSE", False)]
)
def test_flag(text: str, value: bool) -> None:
    assert env.LOCKSTEP_DEBUG.get({"LOCKSTEP_DEBUG": text}) is value


def test_flag_refuses_other_text() -> None:
    with pytest.raises(SetupError, match="LOCKSTEP_DEBUG='maybe': expected 0 or 1"):
        env.LOCKSTEP_DEBUG.get({"LOCKSTEP_DEBUG": "maybe"})


def test_set_and_unset_in_a_mapping_and_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    variables: dict[str, str] = {}
    env.RANK.set(3, variables)
    assert variables == {"RANK": "3"}
    env.RANK.unset(variables)
    env.RANK.unset(variables)
    assert variables == {}
    monkeypatch.setenv("RANK", "0")
    env.RANK.set(5)
    assert os.environ["RANK"] == "5"
    env.RANK.unset()
    assert "RANK" not in os.environ


def test_snapshot_is_a_copy() -> None:
    copy = env.snapshot()
    copy["LOCKSTEP_TESTING_EXAMPLE"] = "x"
    assert "LOCKSTEP_TESTING_EXAMPLE" not in os.environ


def test_replace_makes_the_process_environment_equal() -> None:
    before = env.snapshot()
    wanted = {name: text for name, text in before.items() if name != "RANK"} | {"LOCKSTEP_TESTING_EXAMPLE": "x"}
    try:
        env.replace(wanted)
        assert env.snapshot() == wanted
    finally:
        env.replace(before)
    assert env.snapshot() == before


def test_registry_has_every_variable_with_its_meaning() -> None:
    defined = {value.name: value for value in vars(env).values() if isinstance(value, env.Variable)}
    assert defined == env.registry
    for name, variable in defined.items():
        assert getattr(env, name) is variable, f"{name} is bound to another name"
        assert variable.doc.endswith("."), f"{name}: what does it mean, and who sets it?"
