"""Errors for a process that has run out of file descriptors: they name the limit, and are raised on all ranks.

The sentry (`sentry.py`) keeps one in reserve, because a rank without any could not tell the others: the ranks of one
host meet in a file, which is opened for every value.
"""

from __future__ import annotations

import errno
import os

from lockstep.errors import SetupError

try:
    import resource
except ImportError:  # Windows, where this package can still be imported
    resource = None  # type: ignore[assignment]

__all__ = ["advice", "require"]


def advice(error: OSError) -> str:
    """Advice for when descriptors have run out, as the end of a message; empty for other errors."""
    if error.errno == errno.EMFILE and resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f". This process may have {limit} open at a time: close some, or raise the limit (ulimit -n)"
    if error.errno == errno.ENFILE:
        return ". That is the limit of the whole machine (sysctl fs.file-max)"
    return ""


def require(count: int, rank: str) -> None:
    """Check that this process can open the descriptors that a new group needs. Local.

    Args:
        count: maximum number of descriptors that the group needs.
        rank: the name of this rank in the error.

    Raises:
        SetupError: fewer are left; states the limit.
    """
    held: list[int] = []
    try:
        while len(held) < count:
            held.append(os.open("/", getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC))
    except OSError as error:
        if how := advice(error):
            raise SetupError(
                f"{rank} cannot join a new group, which takes up to {count} descriptors: {len(held)} are left "
                f"({error.strerror}){how}"
            ) from None
    finally:
        for descriptor in held:
            os.close(descriptor)
