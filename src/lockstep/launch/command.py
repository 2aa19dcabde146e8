"""How every command line of Lockstep's ends: an exit code, and one line for what cannot be started."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.errors import SetupError
from lockstep.launch.screen import say

__all__ = ["USAGE_CODE", "exit_code_of"]

USAGE_CODE = 2
_INTERRUPTED_CODE = 130


def exit_code_of(run: Callable[[], int]) -> int:
    """The exit code that `run` returns, 2 after one line on stderr for a SetupError, 130 after Ctrl-C."""
    try:
        return run()
    except SetupError as error:
        say(f"lockstep: error: {error}\n")
        return USAGE_CODE
    except KeyboardInterrupt:
        return _INTERRUPTED_CODE
