"""Checkpoints: which file is written, what is in it, and onto which device it is loaded.

Records `save` (`path`, None if it is not a file; `is_local`: whether each node may have its own file of that name;
`prefixed`: number of names in state dicts where all begin with `module.`; `example`: one of them) and, for the user's
own calls, `load` (`has_map_location`, `has_weights_only`, `own`: this rank's device, `foreign`: others loaded onto).
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.comm.callsite import is_users
from lockstep.tools.rehearse.devices import files
from lockstep.tools.rehearse.devices.naming import devices
from lockstep.tools.rehearse.patching import replace, wrap
from lockstep.tools.rehearse.sites import chain, is_own
from lockstep.tools.rehearse.watch.recorder import recorder

__all__ = ["install"]

_PREFIX = "module."
_MAX_DEPTH = 3
# Paths that are, or may be, on a node-local disk.
_LOCAL_FOLDER = re.compile(r"/(tmp|var/tmp|dev|run|local\w*|scratch\w*|ssd\w*|nvme\w*)/")

_restored: list[int] = []


def _path_of(target: Any) -> str | None:
    name = target if isinstance(target, str | os.PathLike) else getattr(target, "name", None)
    if not isinstance(name, str | os.PathLike):
        return None
    return os.path.realpath(os.fspath(name))


def _is_local(path: str | None) -> bool:
    """Whether each node may have its own file: the path may be on a local disk, or contains the host's name.

    The current folder is taken to be shared, as all nodes find the script there.
    """
    if path is None:
        return False
    name = path.removeprefix(os.path.realpath(os.getcwd()) + os.sep)
    if name != path or socket.gethostname() in name:
        return socket.gethostname() in name
    return bool(_LOCAL_FOLDER.match(path)) or path.startswith(os.path.realpath(tempfile.gettempdir()) + os.sep)


def _state_dicts(thing: Any, depth: int = 0) -> Iterator[list[str]]:
    """The names in each dict of tensors within a saved object."""
    if not isinstance(thing, dict) or depth > _MAX_DEPTH:
        return
    names = [name for name in thing if isinstance(name, str)]
    if names and len(names) == len(thing) and all(isinstance(value, torch.Tensor) for value in thing.values()):
        yield names
    for value in thing.values():
        yield from _state_dicts(value, depth + 1)


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if is_users(sys._getframe(1).f_code):
            # A library that saves the state of its own wrapper also loads it into that wrapper.
            dicts = list(_state_dicts(obj)) if is_own(sys._getframe(1)) else []
            path = _path_of(f)
            prefixed = [names for names in dicts if all(name.startswith(_PREFIX) for name in names)]
            recorder.note(
                "save",
                chain(),
                path=path,
                is_local=_is_local(path),
                prefixed=sum(map(len, prefixed)),
                example=prefixed[0][0] if prefixed else "",
            )
        return original(obj, f, *args, **kwargs)

    return save


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not is_own(sys._getframe(1)):
            return original(f, map_location, *args, **kwargs)
        _restored.clear()
        sites = chain()
        try:
            result = original(f, map_location, *args, **kwargs)
        finally:
            recorder.note(
                "load",
                sites,
                has_map_location=map_location is not None,
                has_weights_only=kwargs.get("weights_only") is not None,
                foreign=sorted({index for index in _restored if index != devices.current}),
                own=devices.current,
            )
        return result

    return load


def install() -> None:
    """Watch torch.save and torch.load."""
    files.restored.append(_restored.append)
    for name, make in (("save", _save), ("load", _load)):
        wrap(torch.serialization, name, make)
        replace(torch, name, getattr(torch.serialization, name))
