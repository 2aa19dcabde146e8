"""A longer deadline until one more collective is through: what torch calls an ephemeral timeout.

torch's checkpoints and elastic agents ask for it before a step that is known to be slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Extension", "extended"]


@dataclass(frozen=True, eq=False)
class Extension:
    """So many seconds more to wait for other ranks, until a collective that is called from now on is through.

    Collectives that were called before keep their deadline, as do those that bring one of their own. Extensions add up.
    """

    extra_s: float


def extended(body: Callable[[float], None], extensions: set[Extension]) -> Callable[[float], None]:
    """A collective's body with the extensions that there are now. It takes them out of the set when it is through."""
    mine = tuple(extensions)

    def run(timeout_s: float) -> None:
        try:
            body(timeout_s + sum(extension.extra_s for extension in mine))
        finally:
            extensions.difference_update(mine)

    return run
