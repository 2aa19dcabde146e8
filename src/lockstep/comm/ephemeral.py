"""A longer deadline until one more collective is through: what torch calls an ephemeral timeout.

torch's checkpoints and elastic agents ask for it before a step that is known to be slow. The engine's hot path knows
nothing of it: while an extension lasts, the engine has another `_submit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.comm.engine import Engine, Work

__all__ = ["extend"]


def extend(engine: Engine, extra_s: float) -> None:
    """Wait longer for other ranks, until a collective that is called from now on is through. Local.

    Collectives that were called before keep their deadline, as do those that bring one of their own. Extensions add up.

    Args:
        engine: the engine of the group.
        extra_s: seconds on top of the group's timeout.
    """
    before = vars(engine).get("_submit")  # an extension that still lasts
    plain = engine._submit
    is_over = False

    def restore() -> None:
        nonlocal is_over
        is_over = True
        if vars(engine).get("_submit") is submit:
            if before is None:
                del engine._submit
            else:
                engine._submit = before  # type: ignore[method-assign]

    def submit(key: object, describe: Callable[[], str], body: Callable[[float], None], *rest: Any) -> Work:
        _result, _is_async, timeout_s, *_ = rest
        if is_over or timeout_s is not None:
            return plain(key, describe, body, *rest)

        def run(limit_s: float) -> None:
            try:
                body(limit_s + extra_s)
            finally:
                restore()

        return plain(key, describe, run, *rest)

    engine._submit = submit  # type: ignore[method-assign, assignment]
