"""What a dataset keeps for each of its samples, as columns: lists, arrays, records, DataFrames, Hugging Face's tables.

[Note: columns that tell] Ranks compare some values of a column to notice that they hold other samples, so it must be
one that is the same on all ranks wherever the samples are. Texts come first, which nothing computes: of paths the base
name, since hosts mount data anywhere. Of records and tables one column is taken: the first in the order of their names
that has a text in every row, and not one text in all. Identifiers that a program may have drawn when it read the data
(UUIDs) are left out, and lists of texts may come out of a set in any order. Where there are no texts, integers are
looked at, unless they may be a cache that each rank fills for itself as samples are fetched: those with one value, or 0
or -1, in many places. Floating-point numbers count in Hugging Face's tables only, by sign and magnitude; elsewhere they
may be features that each rank has computed.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["TellingColumn", "is_table", "roughly", "telling_column"]

_MAX_COLUMNS = 32
_MAX_ITEMS = 8  # of a row that is a list
_MAX_DEPTH = 3  # of lists and records in a record
_MAX_CHARACTERS = 200
_MOST_ALIKE, _MOST_EMPTY = 0.75, 0.25  # of the integers in a column
_EMPTY = re.compile(r"(0|-1)(,\1)*")
_DRAWN = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
_OFF_ROUND_NUMBERS = 1.37
_ARROW_INTEGERS = re.compile(r"u?int\d+|.*list<\w+: u?int\d+( not null)?>(\[\d+\])?")
_ARROW_NUMBERS = re.compile(r"float|double|.*list<\w+: (float|double)( not null)?>(\[\d+\])?")
Describe = Callable[[Any], str | None]


class TellingColumn(NamedTuple):
    """Values of some samples, in words.

    Attributes:
        is_text: texts, not numbers.
        parts: of each sample that was looked at.
    """

    is_text: bool
    parts: list[str]


def is_table(values: Any) -> bool:
    """Whether `values` itself holds samples, not its attributes. Local; runs no code of `values`."""
    return isinstance(values, list | tuple) or _is_frame(values) or _is_arrow(values)


def telling_column(values: Any, length: int, positions: Sequence[int]) -> TellingColumn | None:
    """Of what is kept for each sample, a column by which ranks compare; None without one. Local.

    Args:
        values: of any type.
        length: of the dataset; what is of another length is not looked at.
        positions: of the samples to look at.
    """
    for is_kind, find in (
        (_is_arrow, _of_arrow),
        (_is_frame, _of_frame),
        (_is_series, _of_series),
        (_is_plain, _of_rows),
    ):
        if is_kind(values):
            return find(values, positions) if len(values) == length else None
    return None


def roughly(number: object) -> str:
    """A number, of a float its sign and magnitude."""
    if not isinstance(number, float):
        return str(number)
    # Steps of a factor of two, with no round number at an edge.
    mantissa, exponent = math.frexp(number * _OFF_ROUND_NUMBERS)
    return f"{math.copysign(1, mantissa)} {exponent}" if mantissa else "0"


def _is_plain(values: Any) -> bool:
    if isinstance(values, torch.Tensor):
        is_on_host = values.device.type == "cpu" and values.layout is torch.strided
        return is_on_host and values.dim() > 0 and not (values.is_floating_point() or values.is_complex())
    return type(values) in (list, tuple) or (isinstance(values, np.ndarray) and values.dtype.kind in "iuUO")


def _of_rows(values: Any, positions: Sequence[int]) -> TellingColumn | None:
    rows = [values[position] for position in positions]
    if not rows or not all(type(row) is dict for row in rows):
        return _telling(rows, _text_of) or _telling_integers(rows)
    names = set(rows[0]).intersection(*rows)
    return _first_telling([[row[name] for row in rows] for name in sorted(names, key=str)[:_MAX_COLUMNS]])


def _is_series(values: Any) -> bool:
    """A Series of pandas."""
    return hasattr(type(values), "iloc") and not _is_frame(values)


def _of_series(series: Any, positions: Sequence[int]) -> TellingColumn | None:
    return _of_rows(series.iloc, positions)


def _is_frame(values: Any) -> bool:
    """A DataFrame of pandas."""
    return hasattr(type(values), "iloc") and hasattr(type(values), "columns")


def _of_frame(frame: Any, positions: Sequence[int]) -> TellingColumn | None:
    columns = sorted(enumerate(frame.columns), key=lambda column: str(column[1]))[:_MAX_COLUMNS]
    return _first_telling([[frame.iloc[position, place] for position in positions] for place, _ in columns])


def _is_arrow(values: Any) -> bool:
    """A dataset of Hugging Face: a table of pyarrow, and a table of which of its rows count, or None for all."""
    attributes = getattr(values, "__dict__", {})
    return "_indices" in attributes and hasattr(type(attributes.get("_data")), "column_names")


def _of_arrow(dataset: Any, positions: Sequence[int]) -> TellingColumn | None:
    table, indices = (vars(dataset)[name] for name in ("_data", "_indices"))
    rows = list(positions)
    if indices is not None:
        rows = [indices.column(0)[position].as_py() for position in positions]
    columns = [table.column(name) for name in sorted(table.column_names)[:_MAX_COLUMNS]]
    for find in (_plain_text_of_arrow, _texts_of_arrow, _integers_of_arrow, _numbers_of_arrow):
        found = (find(column, str(column.type), rows) for column in columns)
        telling = next((column for column in found if column is not None), None)
        if telling is not None:
            return telling
    return None


def _plain_text_of_arrow(column: Any, kind: str, rows: list[int]) -> TellingColumn | None:
    is_text = kind in ("string", "large_string")
    return _telling([column[row].as_py() for row in rows], _text_in_record) if is_text else None


def _texts_of_arrow(column: Any, kind: str, rows: list[int]) -> TellingColumn | None:
    """Of lists of records, such as conversations; not of images, whose bytes lie beside their path."""
    has_texts = "list<" in kind and "string" in kind and "binary" not in kind
    return _telling(_begins_of_arrow(column, rows), _text_in_record) if has_texts else None


def _integers_of_arrow(column: Any, kind: str, rows: list[int]) -> TellingColumn | None:
    is_integer = _ARROW_INTEGERS.fullmatch(kind)
    return _telling(_begins_of_arrow(column, rows), _integers_of, is_text=False) if is_integer else None


def _numbers_of_arrow(column: Any, kind: str, rows: list[int]) -> TellingColumn | None:
    is_number = _ARROW_NUMBERS.fullmatch(kind)
    return _telling(_begins_of_arrow(column, rows), _numbers_of, is_text=False) if is_number else None


def _begins_of_arrow(column: Any, rows: list[int]) -> list[Any]:
    """Values of pyarrow's; of a list its first items."""
    scalars = [column[row] for row in rows]
    items = [getattr(scalar, "values", None) for scalar in scalars]
    return [
        scalar.as_py() if values is None else values[:_MAX_ITEMS].to_pylist()
        for scalar, values in zip(scalars, items, strict=True)
    ]


def _first_telling(columns: list[list[Any]]) -> TellingColumn | None:
    plain = (_telling(column, _text_in_record) for column in columns if all(map(_is_text, column)))
    nested = (_telling(column, _text_in_record) for column in columns)
    integers = map(_telling_integers, columns)
    return next((each for found in (plain, nested, integers) for each in found if each is not None), None)


def _telling(values: list[Any], describe: Describe, is_text: bool = True) -> TellingColumn | None:
    """The column, if each value can be described, and not all are alike."""
    parts: list[str] = []
    for value in values:
        part = describe(value)
        if part is None:
            return None
        parts.append(part)
    return TellingColumn(is_text, parts) if len(set(parts)) > 1 else None


def _telling_integers(values: list[Any]) -> TellingColumn | None:
    """The column, if it is one of integers, and no cache. See [Note: columns that tell]."""
    column = _telling(values, _integers_of, is_text=False)
    if column is None:
        return None
    counts = Counter(column.parts)
    num_empty = sum(count for part, count in counts.items() if _EMPTY.fullmatch(part))
    is_cache = max(counts.values()) > _MOST_ALIKE * len(values) or num_empty > _MOST_EMPTY * len(values)
    return None if is_cache else column


def _is_text(value: Any) -> bool:
    return isinstance(value, str | PurePath)


def _text_of(value: Any) -> str | None:
    """A text, or the first of a tuple, as in torchvision's `samples`."""
    text = value[0] if type(value) is tuple and value else value
    if isinstance(text, PurePath):
        return text.name or None
    return os.path.basename(text.rstrip("/"))[:_MAX_CHARACTERS] or None if isinstance(text, str) else None


def _text_in_record(value: Any) -> str | None:
    """The texts of a field, such as those of a conversation."""
    texts = sorted(_texts_in(value, _MAX_DEPTH))
    return " ".join(texts) if texts else None


def _texts_in(value: Any, depth: int) -> Iterator[str]:
    if type(value) in (list, tuple) and depth:
        for each in value[:_MAX_ITEMS]:
            yield from _texts_in(each, depth - 1)
    elif type(value) is dict and depth:
        for name in sorted(value, key=str)[:_MAX_ITEMS]:
            yield from _texts_in(value[name], depth - 1)
    else:
        text = _text_of(value) if _is_text(value) else None
        if text is not None and not _DRAWN.fullmatch(text):
            yield text


def _numbers_of(value: Any) -> str | None:
    """A number, or the first ones of a row."""
    numbers = _first_numbers(value)
    return ",".join(map(roughly, numbers)) if numbers else None


def _integers_of(value: Any) -> str | None:
    numbers = _first_numbers(value)
    is_known = numbers and all(type(number) is int for number in numbers)
    return ",".join(map(str, numbers)) if is_known else None


def _first_numbers(value: Any) -> list[Any]:
    """Of a number itself, of an array or a list of numbers the first ones; empty for anything else."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value = _first_of_array(value)
    while type(value) in (list, tuple) and value and type(value[0]) in (list, tuple):
        value = value[0]
    numbers = list(value[:_MAX_ITEMS]) if type(value) in (list, tuple) else [value]
    numbers = [number.item() if isinstance(number, np.generic) else number for number in numbers]
    return numbers if all(type(number) in (int, float) for number in numbers) else []


def _first_of_array(array: Any) -> Any:
    if isinstance(array, torch.Tensor) and array.device.type != "cpu":
        return None
    while array.ndim > 1 and len(array):
        array = array[0]
    return array[:_MAX_ITEMS].tolist() if array.ndim else array.item()
