"""What ranks of several hosts tell each other before there is a group, when the store goes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from lockstep.comm.group_setup import BootstrapStore
from lockstep.comm.hosts import store_exchange
from lockstep.comm.hosts.store_exchange import StoreExchange
from lockstep.errors import RendezvousError


class BriefStore:
    """A store that goes after a number of questions."""

    def __init__(self, questions: int) -> None:
        self.values: dict[str, str] = {"parting0": "true"}
        self.questions = questions

    def _count(self) -> None:
        self.questions -= 1
        if self.questions < 0:
            raise RuntimeError("Connection reset by peer\nmore that nobody needs")

    def set(self, key: str, value: str) -> None:
        self._count()
        self.values[key] = value

    def find(self, key: str) -> str | None:
        self._count()
        return self.values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[str] | None:
        self._count()
        return [self.values[key] for key in keys] if self.values.keys() >= set(keys) else None

    def delete(self, key: str) -> None:
        self._count()
        self.values.pop(key, None)


def make_exchange(questions: int) -> StoreExchange:
    return StoreExchange(BriefStore(questions), 1, (0, 1), 1.0, lambda: None)


@pytest.mark.parametrize("questions", range(7))
def test_parting_ranks_need_no_store_any_more(questions: int) -> None:
    """What they part over is the error to raise, wherever the first of them takes the store along."""
    make_exchange(questions).part(range(2))


@pytest.mark.parametrize("questions", range(2))
def test_who_needs_the_store_hears_that_it_is_gone(questions: int) -> None:
    exchange = make_exchange(questions)

    def tell_and_ask() -> None:
        exchange.write("parting", True)
        exchange.read("parting", range(2))

    with pytest.raises(RendezvousError, match=r"^rank 1 lost the store in which the ranks meet: Connection reset by"):
        tell_and_ask()


def test_what_is_read_is_what_was_written() -> None:
    exchange = make_exchange(100)
    exchange.write("info", ["a", 1])
    assert exchange.read("info", [1]) == [["a", 1]]


def test_who_waits_hears_why_another_gave_up_and_a_later_attempt_does_not() -> None:
    """A failure stayed in the store, ended every later attempt over it, and each put its own words before it."""
    zero = make_exchange(1000)
    one = StoreExchange(zero._store, 0, (0, 1), 0.1, lambda: None)
    zero.give_up(RendezvousError("no room\nat all"))
    store_exchange._known_failures.clear()  # those of another process
    with pytest.raises(RendezvousError, match=r"^rank 1 could not join: no room$"):
        one.check_peers()
    one.give_up(RendezvousError("rank 1 could not join: no room"))
    for attempt in (one, StoreExchange(zero._store, 0, (0, 1), 0.1, lambda: None)):
        with pytest.raises(RendezvousError, match="rank 1 did not come"):
            attempt.read("nothing", [1])
    with pytest.raises(RendezvousError, match="rank 0 did not come"):
        zero.read("nothing", [0])


def test_many_ranks_are_asked_for_at_once() -> None:
    """Every rank asked the store for every other, twice, and again after each nap."""
    exchange = make_exchange(2)
    exchange._store.values |= {f"info{rank}": str(rank) for rank in range(64)}  # type: ignore[attr-defined]
    assert exchange.read("info", range(64)) == list(range(64))


def test_who_has_not_come_is_named() -> None:
    exchange = StoreExchange(BriefStore(10_000), 1, (5, 6, 7), 0.01, lambda: None)
    exchange.write("info", 1)
    with pytest.raises(RendezvousError, match=r"^rank 5, rank 7 did not come within 0.01 s of rank 6"):
        exchange.read("info", range(3))


def test_values_of_all_ranks_come_together_or_not_at_all() -> None:
    shared = dist.HashStore()
    store = BootstrapStore(shared, "group")
    store.set("a", "1")
    assert store.get_all(["a", "b"]) is None
    store.set("b", "2")
    assert store.get_all(["b", "a"]) == ["2", "1"]
    dist.PrefixStore("attempt0", shared).set("b", "written by a stranger")
    assert store.get_all(["b", "a"]) is None
