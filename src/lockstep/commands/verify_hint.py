"""A line, printed once per script, that mentions `lockstep verify`."""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path

from lockstep.launch.config import LaunchConfig, resolve_nproc
from lockstep.launch.screen import say

__all__ = ["mention_verify"]

_FOLDER = Path(".cache", "lockstep", "mentioned-verify")


def mention_verify(config: LaunchConfig) -> None:
    """Print the line on a terminal, after a successful run of several ranks; never if it cannot be remembered."""
    if not os.isatty(2) or resolve_nproc(config.nproc, config.environment or {}) < 2:
        return
    name = config.target if config.is_module else os.path.abspath(config.target)
    mark = Path.home() / _FOLDER / hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)
    except OSError:
        return
    words = shlex.join([*(["-m"] if config.is_module else []), config.target, *config.args])
    say(f"lockstep: does one process give the same answer? `lockstep verify {words}` compares\n")
