"""Makes processes that a rehearsed script spawns part of the rehearsal: what happens in the process that spawns them.

A process that multiprocessing spawns imports the script again before it is told what to do. The stand-ins must be there
before multiprocessing's own code runs, so its command line gets a line in front: a call of `spawned.join_rehearsal`.

[Note: families] A script may start ranks several times, one after the other. Those of one `mp.spawn` are a family, and
are judged by themselves: rank 0 of the first has nothing to do with rank 1 of the second. Where the `mp.spawn` of each
node gives its ranks to one group, they are one family: when they join it, all take the name that rank 0 has.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from lockstep.tools.rehearse.patching import wrap

__all__ = ["install"]

_FIRST = "from lockstep.tools.rehearse.spawned import join_rehearsal; join_rehearsal({family!r}, {starter}); "
# How often this process has called `mp.spawn`.
_starts = itertools.count(1)
_family = ""


def _command_line(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_command_line(**kwargs: Any) -> list[str]:
        words: list[str] = original(**kwargs)
        if "-c" in words:
            code = words.index("-c") + 1
            if "spawn_main" in words[code]:
                words[code] = _FIRST.format(family=_family, starter=os.getpid()) + words[code]
        return words

    return get_command_line


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        global _family
        _family = f"{os.getpid()}-{next(_starts)}"
        return original(*args, **kwargs)

    return start


def install() -> None:
    """Make the processes that this one will spawn part of the rehearsal."""
    import torch.multiprocessing

    wrap(spawn, "get_command_line", _command_line)
    for name in ("spawn", "start_processes"):
        wrap(torch.multiprocessing, name, _start)
