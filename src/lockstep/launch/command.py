"""Runs a command and returns its exit code; an error before the start is one line on stderr."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from lockstep.errors import SetupError
from lockstep.launch.screen import say

__all__ = ["BROKEN_PIPE_CODE", "USAGE_CODE", "exit_code_of"]

USAGE_CODE = 2
_INTERRUPTED_CODE = 130
BROKEN_PIPE_CODE = 141  # 128 + SIGPIPE, like a program ended by that signal


def exit_code_of(run: Callable[[], int]) -> int:
    """The exit code that `run` returns; 2, after one line on stderr, for a SetupError; 130 after Ctrl-C.

    141, without a message, if nobody reads stdout any more, as in `lockstep doctor | head -1`.
    """
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here rather than at the end of Python, which would print a traceback
    except SetupError as error:
        say(f"lockstep: error: {error}\n")
        return USAGE_CODE
    except KeyboardInterrupt:
        say("lockstep: Ctrl-C\n")
        return _INTERRUPTED_CODE
    except BrokenPipeError:
        if not _has_lost_reader(1):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discards what Python still has in its buffers
        return BROKEN_PIPE_CODE


def _has_lost_reader(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)  # reports POLLERR only, which is set when the other end is closed
    return any(events & select.POLLERR for _, events in poll.poll(0))
