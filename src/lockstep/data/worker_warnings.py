"""Warnings of what a loader's workers see, which the training process says.

Workers are new in every epoch, so each of them would say the same again, on every rank. In a worker a warning is kept
until the next batch, which takes it along (`handover.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

from torch.utils.data import get_worker_info

from lockstep.log import get_logger, warn_once

__all__ = ["Kept", "say", "take_kept", "warn"]

Kept: TypeAlias = tuple[str, str]  # the logger's name, and the text

_kept: list[Kept] = []  # in a worker


def warn(logger: logging.Logger, message: str) -> None:
    """Warn, once per training process and text, also from a worker. Local."""
    if get_worker_info() is None:
        warn_once(logger, message)
    elif (logger.name, message) not in _kept:
        _kept.append((logger.name, message))


def take_kept() -> list[Kept]:
    """What this worker has kept since the last call. Local."""
    taken = _kept[:]
    _kept.clear()
    return taken


def say(kept: Sequence[Kept]) -> None:
    """Warn of what a worker has kept, unless it was said before. Local."""
    for name, message in kept:
        warn_once(get_logger(name), message)
