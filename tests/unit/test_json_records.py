"""Records out of JSON that another process has written, and what is no such record."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import pytest

from lockstep.json_records import read_record


@dataclass(frozen=True)
class Place:
    host: str
    ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rank:
    number: int
    since_s: float
    is_lost: bool
    place: Place
    pair: tuple[str, int]
    note: str | None = None


RANK = Rank(3, 1.5, False, Place("a", (1, 2)), ("b", 4))


def test_what_was_written_is_read() -> None:
    for rank in (RANK, Rank(0, 2.0, True, Place("a"), ("", 0), "x")):
        assert read_record(Rank, json.dumps(asdict(rank))) == rank


def test_fields_with_defaults_may_be_missing_and_others_do_not_matter() -> None:
    found = asdict(RANK)
    del found["note"], found["place"]["ports"]
    assert read_record(Rank, json.dumps({**found, "new": 1})) == Rank(3, 1.5, False, Place("a"), ("b", 4))


@pytest.mark.parametrize(
    "change",
    [
        *({"number": "3"}, {"number": True}, {"number": 3.0}, {"number": None}, {"since_s": "soon"}, {"is_lost": 0}),
        *({"since_s": 10**400}, {"place": "a"}, {"place": {}}, {"place": {"host": "a", "ports": [1, "2"]}}),
        *({"place": {"host": "a", "ports": 1}}, {"pair": ["b"]}, {"pair": ["b", 4, 5]}, {"pair": 4}, {"note": 1}),
    ],
    ids=str,
)
def test_another_type_is_no_record(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        read_record(Rank, json.dumps({**asdict(RANK), **change}))


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "[" * 100_000])
def test_another_text_is_no_record(text: str) -> None:
    with pytest.raises(ValueError):
        read_record(Rank, text)
