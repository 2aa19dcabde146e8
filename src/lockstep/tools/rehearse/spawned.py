"""Processes that a rehearsed script starts itself, with multiprocessing's "spawn" method: part of the rehearsal too.

A spawned process imports the script again before it is told what to do, so the stand-ins must be there before
multiprocessing's own code runs: its command line gets a line in front.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import process, spawn
from typing import Any

from lockstep.tools.rehearse.patching import wrap

__all__ = ["install", "join_rehearsal"]

_FIRST = "from lockstep.tools.rehearse.spawned import join_rehearsal; join_rehearsal(); "


def _command_line(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_command_line(**kwargs: Any) -> list[str]:
        words: list[str] = original(**kwargs)
        if "-c" in words:
            code = words.index("-c") + 1
            if "spawn_main" in words[code]:
                words[code] = _FIRST + words[code]
        return words

    return get_command_line


def install() -> None:
    """Make the processes that this one will spawn part of the rehearsal."""
    wrap(spawn, "get_command_line", _command_line)


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: process.BaseProcess) -> None:
        from lockstep.tools.rehearse.watch.recorder import recorder

        try:
            with recorder.watching_the_end():
                original(self)
        finally:
            recorder.write()  # multiprocessing's processes end without what atexit would do.

    return run


def join_rehearsal() -> None:
    """In a spawned process, before anything else: become part of the rehearsal."""
    from lockstep.tools.rehearse.rank import install as install_all

    install_all()
    wrap(process.BaseProcess, "run", _run)
