"""Reads dataclasses from JSON that other processes have written. Each value must have the type of its field.

So reading runs no code, and callers need not check types.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["read_record", "record_of"]

_Record = TypeVar("_Record")

_hints: Any = functools.cache(get_type_hints)


def read_record(kind: type[_Record], text: str) -> _Record:
    """The record in a JSON text; see `record_of`.

    Raises:
        ValueError: the text is not JSON, or not such a record.
    """
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return record_of(kind, found)


def record_of(kind: type[_Record], found: object) -> _Record:
    """The record for decoded JSON.

    Args:
        kind: a dataclass whose fields are plain values, unions of their types, tuples, or such dataclasses.
        found: decoded JSON. Keys that are not fields are ignored.

    Raises:
        ValueError: a field is missing, or has a value of another type.
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"{str(found)[:40]!r} is no {kind.__name__}")
    hints = _hints(kind)
    try:
        return kind(**{name: _value(hint, found[name], name) for name, hint in hints.items() if name in found})
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _value(hint: Any, found: Any, name: str) -> Any:
    """A value of the type `hint`: lists become tuples, mappings become records."""
    if is_dataclass(hint):
        return record_of(hint, found)  # type: ignore[arg-type]
    parts, is_tuple = get_args(hint), get_origin(hint) is tuple
    if is_tuple and isinstance(found, list | tuple):
        kinds = parts[:1] * len(found) if parts[-1] is ... else parts
        return tuple(_value(part, one, name) for part, one in zip(kinds, found, strict=True))
    if hint is float and type(found) is int:
        return float(found)
    if is_tuple or type(found) not in (parts or (hint,)):
        raise ValueError(f"{name} is {str(found)[:40]!r}")
    return found
