"""`lockstep launch`: the command line of `torch.distributed.launch`; see `compat/legacy/launch.py`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.compat.legacy import launch

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep launch`.

    Returns:
        The exit code of the job.
    """
    return launch.main(arguments)
