"""What the ranks of a new group tell each other through the store, under keys of this group that each deletes again."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lockstep.errors import LockstepError, RendezvousError
from lockstep.shm.bootstrap import Store

__all__ = ["StoreExchange"]

_Answer = TypeVar("_Answer")

_LONGEST_NAP_S = 0.02
_FAILURE = "failure"
_PARTING_S = 5.0
_LOOK_AGAIN_S = 0.5


class StoreExchange:
    """What the ranks of a new group tell each other through the store.

    Args:
        store: nobody else uses its keys.
        rank: this rank.
        global_ranks: the global rank of each.
        timeout_s: until a rank that does not come is an error.
        check_peers: called while waiting; raises if a rank that is awaited cannot come.
    """

    def __init__(
        self, store: Store, rank: int, global_ranks: Sequence[int], timeout_s: float, check_peers: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._global_ranks = tuple(global_ranks)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._look_out = check_peers
        self._written: dict[str, str] = {}
        self._look_again_s = 0.0

    def write(self, topic: str, value: Any) -> None:
        """Tell all ranks something: JSON."""
        key, text = f"{topic}{self._rank}", json.dumps(value)
        self._ask(lambda: self._store.set(key, text))
        self._written[key] = text

    def read(self, topic: str, ranks: Sequence[int]) -> list[Any]:
        """What these ranks told about a topic, in order.

        Raises:
            RendezvousError: a rank said nothing in time; names it.
            RankLost: a rank cannot come.
        """
        found: dict[int, Any] = {}
        nap_s = 0.0002
        while True:
            for rank in ranks:
                if rank not in found and (said := self._said(f"{topic}{rank}")) is not None:
                    found[rank] = self._parse(topic, rank, said)
            if len(found) == len(ranks):
                return [found[rank] for rank in ranks]
            self._look_out()
            failure = self._said(_FAILURE)
            if failure is not None:
                raise RendezvousError(failure)
            if time.monotonic() > self._deadline:
                missing = ", ".join(f"rank {self._global_ranks[rank]}" for rank in ranks if rank not in found)
                raise RendezvousError(
                    f"{missing} did not come within {self._timeout_s:g} s of rank {self._global_ranks[self._rank]}. Is "
                    f"every rank running, with the same world size of {len(self._global_ranks)}?"
                )
            self._write_again()
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _parse(self, topic: str, rank: int, said: str) -> Any:
        try:
            return json.loads(said)
        except (ValueError, RecursionError):
            raise RendezvousError(
                f"rank {self._global_ranks[rank]} says of {topic!r} what no rank says: {said[:60]!r}"
            ) from None

    def _write_again(self) -> None:
        """What somebody has written over: he may have had his reasons, and the others wait for it."""
        now_s = time.monotonic()
        if now_s > self._look_again_s:
            for key, text in self._written.items() if self._look_again_s else ():
                if self._said(key) is None:
                    self._ask(lambda key=key, text=text: self._store.set(key, text))  # type: ignore[misc]
            self._look_again_s = now_s + _LOOK_AGAIN_S

    def part(self, ranks: Sequence[int]) -> None:
        """Before all raise the same: wait a moment until all know. The store may go with the first that ends."""
        self._deadline = min(self._deadline, time.monotonic() + _PARTING_S)
        with contextlib.suppress(LockstepError):
            self.write("parting", True)
            self.read("parting", ranks)

    def give_up(self, error: Exception) -> None:
        """Let the others know that this rank will not join, so that they need not wait for it."""
        name = f"rank {self._global_ranks[self._rank]}"
        with contextlib.suppress(RuntimeError):
            self._store.set(_FAILURE, f"{name} could not join: {str(error).splitlines()[0]}")

    def _said(self, key: str) -> str | None:
        """What stands under that key, if anything does."""
        return self._ask(lambda: self._store.get(key) if self._store.has(key) else None)

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Put a question to the store, which may be gone: it ends with the rank that has it."""
        try:
            return question()
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {self._global_ranks[self._rank]} lost the store in which the ranks meet: "
                f"{str(error).splitlines()[0]}"
            ) from None

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - time.monotonic(), 0.001)

    def erase(self) -> None:
        """Delete what this rank has told. Once all have read it."""
        for key in self._written:
            self._store.delete(key)
        self._written.clear()
