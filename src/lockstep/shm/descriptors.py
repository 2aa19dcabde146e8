"""What happens where a process has no descriptor left: a named error, with the limit, on all ranks.

The sentry (`sentry.py`) keeps one in reserve, because a rank that has none could not tell the others: ranks of one host
meet in a file, which is opened for every value.
"""

from __future__ import annotations

import errno
import os

from lockstep.errors import SetupError

try:
    import resource
except ImportError:  # Windows, where this package can be imported
    resource = None  # type: ignore[assignment]

__all__ = ["advice", "require"]


def advice(error: OSError) -> str:
    """What to do where descriptors have run out, as the end of a message; empty for other errors."""
    if error.errno == errno.EMFILE and resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f". This process may have {limit} open at a time: close some, or raise the limit (ulimit -n)"
    if error.errno == errno.ENFILE:
        return ". That is the limit of the whole machine (sysctl fs.file-max)"
    return ""


def require(count: int, rank: str) -> None:
    """Check that this process can open the descriptors that a new group takes. Local.

    Args:
        count: how many descriptors the group takes at most.
        rank: how to call this rank in the error.

    Raises:
        SetupError: there are fewer left; says what the limit is.
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
