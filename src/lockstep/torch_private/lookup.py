"""Finds names of the table in the installed torch. Does not import torch by itself.

>>> find("torch._C._current_graph_task_id")()
-1
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from typing import Any

from lockstep.errors import SetupError
from lockstep.log import get_logger, warn_once
from lockstep.torch_private.table import record_of

__all__ = ["MISSING", "attribute", "find", "need", "owner_of", "resolve", "warn_missing"]

MISSING: Any = object()
"""The return value of `resolve` for a missing name."""

_logger = get_logger(__name__)


def resolve(name: str) -> Any:
    """The object with a dotted name, or MISSING. Starts from the longest part of it that is a loaded module."""
    parts = name.split(".")
    count = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules), 0)
    try:
        value: Any = sys.modules[".".join(parts[:count])] if count else importlib.import_module(parts[0])
        for position in range(max(count, 1), len(parts)):
            value = _step(value, ".".join(parts[: position + 1]), parts[position])
    except (AttributeError, ImportError, RuntimeError):  # RuntimeError: torch.ops has no such operator
        return MISSING
    return value


def _step(owner: Any, full_name: str, last: str) -> Any:
    if not hasattr(owner, last) and hasattr(owner, "__path__"):
        importlib.import_module(full_name)
    return getattr(owner, last)


def owner_of(name: str) -> tuple[Any, str]:
    """The module or class that a name belongs to, or MISSING, and the last part of the name."""
    front, _, last = name.rpartition(".")
    return resolve(front), last


def warn_missing(name: str) -> None:
    """Warn, once, that torch has no such name, and what that means."""
    record = record_of(name)
    warn_once(_logger, f"this torch has no {name} ({record.why}): {record.without}")


def find(name: str) -> Any | None:
    """The object with a name of the table; None, and one warning, if torch has no such name. Local."""
    record_of(name)
    value = resolve(name)
    if value is MISSING:
        warn_missing(name)
        return None
    return value


class _Refusal:
    """Replaces a function or class that torch lacks.

    Args:
        name: its name in the table.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self._error()

    def __getattr__(self, _: str) -> Any:
        raise self._error()

    def _error(self) -> SetupError:
        version = getattr(sys.modules.get("torch"), "__version__", "unknown")
        record = record_of(self._name)
        return SetupError(f"torch {version} has no {self._name} ({record.why}): {record.without}")


def need(name: str) -> Any:
    """A function or class of torch that a feature of Lockstep cannot work without. Local.

    Returns:
        The object; if torch has none, an object that raises SetupError when it is used.
    """
    record_of(name)
    value = resolve(name)
    return _Refusal(name) if value is MISSING else value


def attribute(name: str, default: Any) -> Callable[[Any], Any]:
    """A reader of an attribute of one of torch's classes. Local.

    Args:
        name: its name in the table, such as "torch.Tensor._version".
        default: its value if torch has no such attribute, after one warning.
    """
    owner, last = owner_of(name)
    record_of(name)
    if owner is not MISSING and hasattr(owner, last):
        return operator.attrgetter(last)
    warn_missing(name)
    return lambda _: default
