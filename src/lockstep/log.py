"""A logger for the package that prefixes the rank and never touches the root logger.

Nothing is configured on import: `get_logger` returns a child of `lockstep`, which is
silent below WARNING unless the application, or `LOCKSTEP_LOG_LEVEL`, asks for more.

[Note: disabled loggers] `logging.config.dictConfig` and `fileConfig` disable all existing loggers that they do not
name, unless told otherwise; so does hydra with `hydra/job_logging: disabled`. That is hardly meant to hide warnings
of wrong training results. So loggers are enabled again before they are used; levels are left alone.
"""

from __future__ import annotations

import logging
import sys

from lockstep import env

__all__ = ["get_logger", "warn_once"]

_warned: set[str] = set()


class _RankFormatter(logging.Formatter):
    """`[lockstep rank 1] WARNING: text`; the rank is read when the line is written."""

    def format(self, record: logging.LogRecord) -> str:
        rank = env.RANK.get()
        who = "lockstep" if rank is None else f"lockstep rank {rank}"
        return f"[{who}] {record.levelname}: {super().format(record)}"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is at that moment, so that redirection works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        return sys.stderr


def get_logger(name: str) -> logging.Logger:
    """A logger below `lockstep`, with our handler attached on first use. See [Note: disabled loggers].

    Args:
        name: usually `__name__`.
    """
    root = logging.getLogger("lockstep")
    if not any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        handler = _StderrHandler()
        handler.setFormatter(_RankFormatter("%(message)s"))
        root.addHandler(handler)
        root.propagate = False
        root.setLevel(env.LOCKSTEP_LOG_LEVEL.get() or "WARNING")
    logger = logging.getLogger(name)
    logger.disabled = False
    return logger


def warn_once(logger: logging.Logger, message: str) -> None:
    """Warn, once per process and text. See [Note: disabled loggers]."""
    if message not in _warned:
        _warned.add(message)
        logger.disabled = False
        logger.warning(message)
