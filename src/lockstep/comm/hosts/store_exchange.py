"""Exchanges values between the ranks of a new group through the store, under keys that each rank deletes again."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lockstep.comm.group_setup import BootstrapStore
from lockstep.errors import LockstepError, RendezvousError
from lockstep.shm.bootstrap import lost_store, not_come

__all__ = ["StoreExchange"]

_Answer = TypeVar("_Answer")

_LONGEST_NAP_S = 0.02
_FAILURE = "failure"
_PARTING_S = 5.0
_LOOK_AGAIN_S = 0.5
_ASK_FOR_FAILURES_EVERY_S = 0.1

# Failures raised in this process. They stay in the store, but do not concern later attempts.
_known_failures: set[str] = set()


class StoreExchange:
    """Writes values of this rank into the store, and reads those of the others.

    Args:
        store: the store; only this class uses its keys.
        rank: this rank in the group.
        global_ranks: the global rank of each rank of the group.
        timeout_s: seconds until a missing rank is an error.
        check_peers: called while waiting; raises if an awaited rank can no longer come.
    """

    def __init__(
        self,
        store: BootstrapStore,
        rank: int,
        global_ranks: Sequence[int],
        timeout_s: float,
        check_peers: Callable[[], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._global_ranks = tuple(global_ranks)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._check_awaited = check_peers
        self._written: dict[str, str] = {}
        self._look_again_s = 0.0
        self._ask_for_failures_s = 0.0
        self._peer_gave_up = False

    def write(self, topic: str, value: Any) -> None:
        """Publish a JSON value to all ranks, under a topic."""
        key, text = f"{topic}{self._rank}", json.dumps(value)
        self._ask(lambda: self._store.set(key, text))
        self._written[key] = text

    def read(self, topic: str, ranks: Sequence[int]) -> list[Any]:
        """The values that these ranks published under a topic, in order; waits for them.

        Raises:
            RendezvousError: a rank published nothing in time, or gave up; names it.
            RankLost: a rank cannot come.
        """
        keys = [f"{topic}{rank}" for rank in ranks]
        nap_s = 0.0002
        while True:
            found = self._ask(lambda: self._store.get_all(keys))
            if found is not None:
                return [self._parse(topic, rank, said) for rank, said in zip(ranks, found, strict=True)]
            self._check_awaited()
            self._raise_failure()
            if time.monotonic() > self._deadline:
                missing = [rank for rank, key in zip(ranks, keys, strict=True) if self._said(key) is None]
                raise not_come(missing, self._rank, self._global_ranks, self._timeout_s)
            self._write_again()
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def check_peers(self) -> None:
        """Raise if a rank cannot come, or gave up; to be called while waiting for something else.

        Raises:
            RendezvousError: a rank gave up; says why.
            RankLost: a rank cannot come.
        """
        self._check_awaited()
        now_s = time.monotonic()
        if now_s > self._ask_for_failures_s:
            self._ask_for_failures_s = now_s + _ASK_FOR_FAILURES_EVERY_S
            self._raise_failure()

    def _raise_failure(self) -> None:
        failure = self._said(_FAILURE)
        if failure is not None and failure not in _known_failures:
            _known_failures.add(failure)
            self._peer_gave_up = True
            raise RendezvousError(failure.partition(" ")[2])

    def _parse(self, topic: str, rank: int, said: str) -> Any:
        try:
            return json.loads(said)
        except (ValueError, RecursionError):
            raise RendezvousError(
                f"rank {self._global_ranks[rank]} published an invalid value of {topic!r}: {said[:60]!r}"
            ) from None

    def _write_again(self) -> None:
        """Rewrite values of this rank that another process has removed or replaced: other ranks wait for them."""
        now_s = time.monotonic()
        if now_s > self._look_again_s:
            for key, text in self._written.items() if self._look_again_s else ():
                if self._said(key) is None:
                    self._ask(lambda key=key, text=text: self._store.set(key, text))  # type: ignore[misc]
            self._look_again_s = now_s + _LOOK_AGAIN_S

    def part(self, ranks: Sequence[int]) -> None:
        """Wait a moment until all ranks have read why they fail. The store may vanish with the first rank that ends."""
        self._deadline = min(self._deadline, time.monotonic() + _PARTING_S)
        with contextlib.suppress(LockstepError):
            self.write("parting", True)
            self.read("parting", ranks)

    def give_up(self, error: Exception) -> None:
        """Tell the others that this rank will not join, unless one of them gave up first."""
        if self._peer_gave_up:
            return
        name = f"rank {self._global_ranks[self._rank]}"
        failure = f"{secrets.token_hex(8)} {name} could not join: {str(error).splitlines()[0]}"
        _known_failures.add(failure)
        with contextlib.suppress(RuntimeError):
            self._store.set(_FAILURE, failure)

    def _said(self, key: str) -> str | None:
        """The value under that key; None if there is none."""
        found = self._ask(lambda: self._store.get_all([key]))
        return None if found is None else found[0]

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Query the store, which is gone if the rank that hosts it has ended."""
        try:
            return question()
        except RuntimeError as error:
            raise lost_store(self._global_ranks[self._rank], error) from None

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - time.monotonic(), 0.001)

    def erase(self) -> None:
        """Delete the values of this rank. Call it once all ranks have read them."""
        for key in self._written:
            self._store.delete(key)
        self._written.clear()
