"""By which of their columns data are known to be others, and which a rank has for itself."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from lockstep.data.fingerprints import fingerprint_of_data

COUNT = 200


class Own:
    """A dataset of a class of the user's, which keeps these."""

    def __init__(self, **kept: Any) -> None:
        vars(self).update(kept)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1)


class Frame:
    """As much of a DataFrame of pandas as counts here."""

    def __init__(self, **columns: Sequence[Any]) -> None:
        self._columns = columns

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    @property
    def iloc(self) -> Any:
        columns = list(self._columns.values())

        class Places:
            def __getitem__(self, place: tuple[int, int]) -> Any:
                return columns[place[1]][place[0]]

        return Places()

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))


class Series:
    """As much of a Series of pandas as counts here: its index is of no account."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.iloc = values

    iloc: Any = None

    def __len__(self) -> int:
        return len(self.iloc)

    def __getitem__(self, label: int) -> Any:
        raise KeyError(label)


class Scalar:
    """One of pyarrow's."""

    def __init__(self, value: Any) -> None:
        self._value = value
        if isinstance(value, list):
            self.values = Items(value)

    def as_py(self) -> Any:
        assert not isinstance(self._value, list), "as a whole it may be an image"
        return self._value


class Items(list[Any]):
    def __getitem__(self, place: Any) -> Any:
        return Items(super().__getitem__(place))

    def to_pylist(self) -> list[Any]:
        return list(self)


class Column:
    def __init__(self, kind: str, values: Sequence[Any]) -> None:
        self.type, self._values = kind, values

    def __getitem__(self, row: int) -> Scalar:
        return Scalar(self._values[row])


class Table:
    """A table of pyarrow: names, types and values."""

    def __init__(self, columns: dict[str, tuple[str, Sequence[Any]]]) -> None:
        self._columns = {name: Column(*column) for name, column in columns.items()}

    @property
    def column_names(self) -> list[str]:
        return list(self._columns)

    def column(self, which: int | str) -> Column:
        return self._columns[which] if isinstance(which, str) else list(self._columns.values())[which]


class HuggingFace:
    """A dataset of that library's: a table, and which of its rows count in which order."""

    def __init__(self, indices: Sequence[int] | None, **columns: tuple[str, Sequence[Any]]) -> None:
        self._data = Table(columns)
        self._indices = None if indices is None else Table({"indices": ("uint64", list(indices))})

    def __len__(self) -> int:
        return COUNT


def conversation(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "yes"}]


# What a dataset is made of for samples with these numbers.
MAKERS: dict[str, Callable[[list[int]], Any]] = {
    "paths": lambda order: Own(files=[Path(f"/data/{number}.png") for number in order]),
    "array of texts": lambda order: Own(files=np.array([f"/data/{number}.png" for number in order])),
    "records": lambda order: Own(data=[{"id": "x", "image": f"/data/{number}.png"} for number in order]),
    "list of records": lambda order: [{"text": f"text {number}"} for number in order],
    "conversations": lambda order: [{"conversations": conversation(number), "id": ""} for number in order],
    "tokens in records": lambda order: [{"input_ids": [5, number], "attention_mask": [1, 1]} for number in order],
    "integers": lambda order: Own(ids=order),
    "a list of integers": lambda order: order,
    "pairs": lambda order: Own(interactions=[(number // 7, number) for number in order]),
    "array of integers": lambda order: Own(ids=np.array(order)),
    "tensor of integers": lambda order: Own(input_ids=torch.tensor(order)[:, None].expand(-1, 4)),
    "frame of texts": lambda order: Own(frame=Frame(label=order, path=[f"{number}.png" for number in order])),
    "frame of integers": lambda order: Own(frame=Frame(label=order, weight=[0.5] * COUNT)),
    "series": lambda order: Own(series=Series([f"{number}.png" for number in order])),
    "table of texts": lambda order: HuggingFace(None, text=("string", [f"text {number}" for number in order])),
    "table of tokens": lambda order: HuggingFace(
        None, ids=("list<item: int32>", [[number, 1, 2] for number in order]), mask=("list<item: int8>", [[1]] * COUNT)
    ),
    "table of numbers": lambda order: HuggingFace(None, x=("list<item: double>", [[float(each)] for each in order])),
    "table of conversations": lambda order: HuggingFace(
        None, a=("list<item: struct<content: string, role: string>>", [conversation(each) for each in order])
    ),
    "table and indices": lambda order: HuggingFace(order, text=("string", [f"text {each}" for each in range(COUNT)])),
    "attribute that is a table": lambda order: Own(rows=HuggingFace(order, label=("int64", list(range(COUNT))))),
}


def shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(range(COUNT), COUNT)


@pytest.mark.parametrize("kind", MAKERS)
def test_another_order_is_another_number(kind: str) -> None:
    make = MAKERS[kind]
    first, again, other = (fingerprint_of_data(make(shuffled(seed))) for seed in (0, 0, 1))
    assert first == again != other


def test_rows_are_the_same_by_indices_or_without_them() -> None:
    order = shuffled(0)
    texts = [f"text {number}" for number in range(COUNT)]
    chosen = HuggingFace(None, text=("string", [texts[number] for number in order]))
    assert fingerprint_of_data(HuggingFace(order, text=("string", texts))) == fingerprint_of_data(chosen)


FILLED = range(10)
# What a rank has for itself: made by its number.
BUSINESS: dict[str, Callable[[int], Any]] = {
    "texts read so far": lambda rank: Own(cache=[f"{i}" if i in FILLED and rank else "" for i in range(COUNT)]),
    "lengths known so far": lambda rank: Own(lengths=np.array([i if i % 4 == rank else 0 for i in range(COUNT)])),
    "lengths known of some": lambda rank: Own(lengths=[i + 5 if i in FILLED and rank else -1 for i in range(COUNT)]),
    "visits": lambda rank: Own(visits=[rank] * COUNT),
    "records with more in them": lambda rank: Own(
        data=[{"text": f"{i}", **({"a": f"cached by {rank}"} if i in FILLED and rank else {})} for i in range(COUNT)]
    ),
    "drawn identifiers": lambda rank: Own(data=[{"id": str(uuid.uuid4()), "text": f"{i}"} for i in range(COUNT)]),
    "keys in another order": lambda rank: [
        dict([("b", f"{i}"), ("a", f"{i}!")][:: 1 - 2 * rank]) for i in range(COUNT)
    ],
    "tags out of a set": lambda rank: [
        {"tags": [f"tag {i}", "small", "red"][:: 1 - 2 * rank], "text": f"{i}"} for i in range(COUNT)
    ],
    "tags alone": lambda rank: [{"tags": [f"tag {i}", "small", "red"][:: 1 - 2 * rank]} for i in range(COUNT)],
    "a device": lambda rank: [{"device": f"cuda:{rank}", "text": f"{i}"} for i in range(COUNT)],
    "features": lambda rank: Own(features=torch.rand(COUNT, 3, generator=torch.Generator().manual_seed(rank))),
    "features in records": lambda rank: [{"x": torch.full((3,), float(rank)), "text": f"{i}"} for i in range(COUNT)],
    "what does not begin with samples": lambda rank: Own(ids=shuffled(rank)[:9], steps=rank),
    "integers beside texts": lambda rank: Own(names=[f"{i}" for i in range(COUNT)], partners=shuffled(rank)),
    "another folder": lambda rank: Own(files=[Path(f"/host{rank}/{i}.png") for i in range(COUNT)]),
    "column of a frame": lambda rank: Own(
        frame=Frame(cache=[None if i else rank for i in range(COUNT)], y=range(COUNT))
    ),
}


@pytest.mark.parametrize("kind", BUSINESS)
def test_what_is_a_ranks_own_business_is_not_looked_at(kind: str) -> None:
    first, second = (fingerprint_of_data(BUSINESS[kind](rank)) for rank in range(2))
    assert first == second


@pytest.mark.parametrize("kind", ["visits", "captions"])
def test_of_a_dataset_in_use_only_what_told_at_first_is_looked_at(kind: str) -> None:
    """Another loader is made over it for each fold, when each rank has used it."""
    found = []
    for rank in range(2):
        data = Own(visits=[0] * COUNT, captions=[None] * COUNT)
        before = fingerprint_of_data(Subset(data, range(50)))
        if kind == "visits":
            data.visits[:] = [1 + (number + rank) % 5 for number in range(COUNT)]
        elif rank == 1:
            data.captions[:] = [f"caption {number}" for number in range(COUNT)]
        found.append((before, fingerprint_of_data(Subset(data, range(50)))))
    assert found[0] == found[1]


def test_what_told_at_first_is_looked_at_again() -> None:
    data = Own(files=[f"{number}.png" for number in range(COUNT)])
    before = fingerprint_of_data(data)
    data.files.reverse()
    assert fingerprint_of_data(data) != before


def test_no_code_of_other_objects_runs() -> None:
    """Such as the length of a table in a database, or attributes that are made when they are asked for."""

    class Database:
        def __len__(self) -> int:
            raise AssertionError("asked for its length")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    assert fingerprint_of_data(Own(rows=Database())) == fingerprint_of_data(Own())
