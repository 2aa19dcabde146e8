"""torch's ephemeral timeout: extends the timeout of a group until the next collective has finished.

torch's checkpoints and elastic agents use it before a step that is known to be slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Extension", "extended"]


@dataclass(frozen=True, eq=False)
class Extension:
    """Adds seconds to the timeout of a group, until a collective that is called from now on has finished.

    Collectives that were called before keep their timeout, as do those with an explicit one. Extensions add up.
    """

    extra_s: float


def extended(body: Callable[[float], None], extensions: set[Extension]) -> Callable[[float], None]:
    """Wrap a collective's body to use the current extensions, which it removes from the set when it has finished."""
    mine = tuple(extensions)

    def run(timeout_s: float) -> None:
        try:
            body(timeout_s + sum(extension.extra_s for extension in mine))
        finally:
            extensions.difference_update(mine)

    return run
