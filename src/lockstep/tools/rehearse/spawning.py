"""Makes processes that a rehearsed script spawns part of the rehearsal; runs in the process that spawns them.

A process that multiprocessing spawns imports the script again before it receives its task. The stand-ins must be in
place before multiprocessing's own code runs, so its command line begins with a call of `spawned.join_rehearsal`.

[Note: families] A script may start ranks several times, one after the other. The ranks of one `mp.spawn` are a family
and are only compared with each other: rank 0 of the first call is unrelated to rank 1 of the second. If the `mp.spawn`
calls of several nodes start ranks of one group, these are one family: on joining, all take the family name of rank 0.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.rehearse.watch.recorder import recorder

__all__ = ["install"]

_FIRST = "from lockstep.tools.rehearse.spawned import join_rehearsal; join_rehearsal({family!r}, {starter}, {rank}); "
# Numbers the calls of `mp.spawn` in this process.
_starts = itertools.count(1)
_family = ""


def _command_line(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_command_line(**kwargs: Any) -> list[str]:
        words: list[str] = original(**kwargs)
        if "-c" in words:
            code = words.index("-c") + 1
            if "spawn_main" in words[code]:
                words[code] = _FIRST.format(family=_family, starter=os.getpid(), rank=recorder.rank) + words[code]
        return words

    return get_command_line


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        global _family
        _family = f"{os.getpid()}-{next(_starts)}"
        return original(*args, **kwargs)

    return start


def install() -> None:
    """Make processes that this one spawns from now on part of the rehearsal."""
    import torch.multiprocessing

    wrap(spawn, "get_command_line", _command_line)
    for name in ("spawn", "start_processes"):
        wrap(torch.multiprocessing, name, _start)
