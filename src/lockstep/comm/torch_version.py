"""The releases of torch that this release was tested with, and behaviour that depends on torch's version number.

Everywhere else, code checks by name whether torch has a feature. The behaviour of its C++ code has no name, so it is
decided by version here.
"""

from __future__ import annotations

import re

from lockstep.errors import SetupError
from lockstep.log import get_logger, warn_once

__all__ = [
    "NEWEST_TESTED",
    "OLDEST",
    "check_oldest",
    "drops_python_work",
    "forgets_of_storages",
    "joins_gloo_with_gil",
    "release_of",
    "warn_if_untested",
]

OLDEST = (2, 6)
NEWEST_TESTED = (2, 15)
"""The newest release in docs/versions.md."""


def check_oldest(version: str) -> None:
    """Raise if this torch is too old to work with. Local.

    Args:
        version: such as "2.13.0+cpu".

    Raises:
        SetupError: older than `OLDEST`.
    """
    if release_of(version) < OLDEST:
        raise SetupError(
            f"this is torch {version}; lockstep needs {_text(OLDEST)} or newer: pip install 'torch>={_text(OLDEST)}'"
        )


def warn_if_untested(version: str, rank: int) -> None:
    """Warn once per job about a torch newer than the newest tested one. Local.

    Args:
        version: such as "2.16.0".
        rank: the global rank; rank 0 warns.
    """
    if rank == 0 and release_of(version) > NEWEST_TESTED:
        warn_once(
            get_logger(__name__),
            f"torch {version} is newer than {_text(NEWEST_TESTED)}, the newest that this lockstep was tested with. If "
            "something fails that worked before, try that release, or a newer lockstep",
        )


def drops_python_work(version: str) -> bool:
    """Whether this torch's C++ keeps no reference to a `Work` written in Python. Local.

    2.6 does not; 2.11 does. It is assumed not to in the releases between, which costs some memory.

    Args:
        version: such as "2.6.0".
    """
    return release_of(version) < (2, 11)


def forgets_of_storages(version: str) -> bool:
    """Whether Python's garbage collector may drop the attributes of a storage that is still alive in C++. Local.

    True in 2.6, False in 2.11.

    Args:
        version: such as "2.6.0".
    """
    return release_of(version) < (2, 11)


def joins_gloo_with_gil(version: str) -> bool:
    """Whether this torch joins gloo's threads while holding the GIL, which they may need; 2.8 does not. Local.

    Args:
        version: such as "2.6.0".
    """
    return release_of(version) < (2, 8)


def release_of(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as "2.13.0+cpu"; one without numbers counts as tested. Local."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else NEWEST_TESTED


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
