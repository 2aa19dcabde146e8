"""Typed environment variables."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import lockstep
from lockstep import env, secret
from lockstep.errors import SetupError
from lockstep.launch.config import LaunchConfig
from lockstep.launch.supervisor import Supervisor


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
    with pytest.raises(SetupError, match=r"RANK='one': expected an integer. Global rank of this process"):
        env.RANK.get({"RANK": "one"})


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), (" Yes ", True), ("on", True), ("0", False), ("FALSE", False)]
)
def test_flag(text: str, value: bool) -> None:
    assert env.LOCKSTEP_DEBUG.get({"LOCKSTEP_DEBUG": text}) is value


def test_flag_refuses_other_text() -> None:
    with pytest.raises(SetupError, match="LOCKSTEP_DEBUG='maybe': expected 0 or 1"):
        env.LOCKSTEP_DEBUG.get({"LOCKSTEP_DEBUG": "maybe"})


BROKEN = {
    "LOCKSTEP_DEBUG": "maybe",
    "LOCKSTEP_LOG_LEVEL": "banana",
    "LOCKSTEP_PARENT_PID": "me",
    "LOCKSTEP_WIRE": "fp7",
    "MASTER_PORT": "99999",
}


@pytest.mark.parametrize(("name", "text"), [*BROKEN.items(), ("MASTER_PORT", "-5")])
def test_broken_settings_are_named_at_once(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match=rf"{name}='{text}': "):
        env.check({name: text})
    monkeypatch.setenv(name, text)
    with pytest.raises(SetupError, match=rf"{name}='{text}': "):
        lockstep.init(device="cpu")


def test_broken_settings_stop_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    for name, text in BROKEN.items():
        with pytest.raises(SetupError, match=rf"{name}='{text}': "):
            Supervisor(LaunchConfig(target=str(script), nproc=1, environment={name: text}))


@pytest.mark.parametrize("is_file", [True, False])
def test_rendezvous_that_is_no_folder(is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    if is_file:
        path.touch()
    for name, text in {"LOCKSTEP_RENDEZVOUS": str(path), "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SetupError, match=r"LOCKSTEP_RENDEZVOUS=.*there is no such folder"):
        lockstep.init(device="cpu")


def test_rendezvous_into_which_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of the ranks would have been a file that a stranger had put there."""
    for name, text in {"LOCKSTEP_RENDEZVOUS": str(tmp_path), "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)
    others = [(mode, os.geteuid()) for mode in (0o777, 0o1777, 0o770, 0o720)]
    for mode, owner in others + ([(0o700, 65534)] if os.geteuid() == 0 else []):
        tmp_path.chmod(mode)
        if owner != os.geteuid():
            os.chown(tmp_path, owner, -1)
        says = f"belongs to user {owner} with mode {mode:04o}, so others than user {os.geteuid()} .*chmod 700"
        with pytest.raises(SetupError, match=f"LOCKSTEP_RENDEZVOUS=.*{says}"):
            lockstep.init(device="cpu", timeout=3)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"LOCKSTEP_RENDEZVOUS": "/proc"}, "LOCKSTEP_RENDEZVOUS='/proc': no file can be made there"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}, "2 ranks would meet at port 0 of 127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(10**20)}, "WORLD_SIZE='1.*': expected at most 1048576"),
    ],
)
def test_settings_with_which_nobody_could_meet(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank waited past its timeout, or for ever."""
    for name in ("LOCKSTEP_RENDEZVOUS", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", **variables}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SetupError, match=says):
        lockstep.init(device="cpu", timeout=3)


@pytest.mark.parametrize("text", ["   ", "a\x00b", "two\nlines", "\udcff\udcfe" * 20])
def test_token_that_is_none_is_an_error_that_does_not_show_it(text: str) -> None:
    """Blanks were taken for a token that everybody knows; what is no text was a raw error."""
    with pytest.raises(SetupError, match=r"variable LOCKSTEP_TOKEN: expected a line of text") as caught:
        env.check({"LOCKSTEP_TOKEN": text})
    assert "two" not in str(caught.value)
    assert env.LOCKSTEP_TOKEN.get({"LOCKSTEP_TOKEN": " abc\n"}) == "abc"
    assert secret.remarks_on("abc") == ["the token in LOCKSTEP_TOKEN has only 3 characters, and can be guessed"]
    assert secret.remarks_on("a" * 16) == secret.remarks_on(None) == []


def test_settings_that_make_sense() -> None:
    env.check({"LOCKSTEP_DEBUG": "1", "LOCKSTEP_WIRE": " BF16", "LOCKSTEP_LOG_LEVEL": "info", "MASTER_PORT": "0"})
    assert env.LOCKSTEP_WIRE.get({"LOCKSTEP_WIRE": " BF16"}) == "bf16"
    assert env.LOCKSTEP_LOG_LEVEL.get({"LOCKSTEP_LOG_LEVEL": "info"}) == "INFO"


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


def test_what_a_program_that_is_started_from_here_reads_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    env.RANK.set_in_python(5, in_c="7")
    assert os.environ["RANK"] == "5"
    assert subprocess.run(["printenv", "RANK"], capture_output=True, check=True).stdout == b"7\n"


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
