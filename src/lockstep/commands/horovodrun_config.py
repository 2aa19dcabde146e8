"""horovodrun's `--config-file`: turns a YAML file into command-line arguments.

Each of Horovod's sections has options under shorter names. Outside of the sections, the file may also have any option
of the command line, by its full name.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError

__all__ = ["CONTROLLERS", "read_config"]

CONTROLLERS = {"gloo": "--gloo", "mpi": "--mpi", "jsrun": "--jsrun"}
# Section -> prefix of its options.
_SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "library-options": "",
    "logging": "log-",
}
# Options that are not named by section and key.
_RENAMED = {
    "autotune-enabled": "autotune",
    "stall-check-enabled": "stall-check",
    "ccl-bgt-affinity": "thread-affinity",
    "mlsl-bgt-affinity": "thread-affinity",
}
_ONLY_OF_COMMAND_LINE = frozenset({"help", "version", "check-build", "config-file"})


def read_config(path: str, actions: Mapping[str, argparse.Action]) -> tuple[list[str], list[str]]:
    """Read a file of options.

    Args:
        path: path of the file.
        actions: known options by spelling, such as "--log-level".

    Returns:
        Arguments to put before those of the command line, which then take precedence; and unknown keys.

    Raises:
        LaunchError: PyYAML is missing, or the file is missing or malformed.
    """
    words: list[str] = []
    unknown: list[str] = []
    for key, name, setting in _settings_in(_load(path), path):
        action = None if name in _ONLY_OF_COMMAND_LINE else actions.get(f"--{name}")
        if name == "stall-check-disable":
            action, name, setting = actions["--stall-check"], "stall-check", not setting
        if name == "controller":
            words.append(_controller(setting, path))
        elif action is None:
            unknown.append(key)
        elif setting is None:
            continue
        elif action.nargs == 0:
            words += _switch(name, bool(setting), actions)
        elif isinstance(setting, list):
            words += [f"--{name}", *map(str, setting)]
        else:
            words.append(f"--{name}={setting}")
    return words, unknown


def _load(path: str) -> Mapping[str, Any]:
    if importlib.util.find_spec("yaml") is None:
        raise LaunchError("--config-file needs PyYAML: pip install pyyaml; or give the options on the command line")
    yaml = importlib.import_module("yaml")
    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise LaunchError(f"--config-file {path}: {error}") from None
    if not isinstance(content, dict):
        raise LaunchError(f"--config-file {path}: expected sections such as `timeline:`, with options in them")
    return content


def _settings_in(content: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    """For each setting: its key as written, the option's name, and the value."""
    for section, value in content.items():
        title = str(section).replace("_", "-")
        if title not in _SECTIONS or not isinstance(value, dict | None):
            yield str(section), title, value
            continue
        for key, setting in (value or {}).items():
            name = _SECTIONS[title] + str(key).replace("_", "-")
            yield f"{section}.{key}", _RENAMED.get(name, name), setting


def _controller(setting: Any, path: str) -> str:
    word = CONTROLLERS.get(str(setting).lower())
    if word is None:
        raise LaunchError(f"--config-file {path}: controller is {setting!r}; expected one of {', '.join(CONTROLLERS)}")
    return word


def _switch(name: str, is_on: bool, actions: Mapping[str, argparse.Action]) -> list[str]:
    if is_on:
        return [f"--{name}"]
    return [f"--no-{name}"] if f"--no-{name}" in actions else []
