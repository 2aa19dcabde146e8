"""How ranks that share a store agree on a random name that nobody can have known before.

[Note: named rendezvous] A store may hold the keys of earlier rendezvous, and anyone who can reach it may write there.
So each rendezvous has a random name chosen by rank 0, and no existing value is trusted. A rank publishes a random word
(a challenge); rank 0 answers with an invitation, which contains the name, and whose MAC covers that word; the rank
signs with a MAC that covers the name. When all have signed, rank 0 publishes that, with the words that it has admitted,
and all continue. MACs over that name cannot have been recorded before. A value without a MAC of this job counts as
absent and is removed, and its writer writes again.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable

from lockstep.errors import RendezvousError
from lockstep.rendezvous import waiting
from lockstep.secret import Refused, Seals, is_nonce, new_nonce, secret_of_ranks
from lockstep.torch_private.stores import PrefixStore, Store, find

__all__ = ["Meeting"]

_COMPLETE = "complete"
_LONGEST_COMING = 1024
_SHORTEST_NAP_S = 0.001
_LONGEST_NAP_S = 0.02
_WRITE_AGAIN_S = 1.0
# Seconds until a rank with another token is an error.
_PATIENCE_S = 10.0


class Meeting:
    """The ranks that agree on a name: [Note: named rendezvous]. Rank 0 calls `admit_all`, each other rank `join`.

    Args:
        store: the store that the ranks share.
        world_size: number of ranks.
        timeout_s: seconds until a missing rank is an error.
        place: where they meet, for errors.
        explain: returns the text of the error, given the missing ranks.
        pause: called by a waiting rank between two reads of the store: with the store, the awaited key, and the maximum
            number of seconds to wait.
        watch: called at each read; returns a value that was made with another token, as a key and a clause, or None.
        remind: called once by rank 0, when it has waited for some time, with the ranks that have not signed.
    """

    def __init__(
        self,
        store: Store,
        world_size: int,
        timeout_s: float,
        place: str,
        explain: Callable[[Iterable[int]], str],
        pause: Callable[[Store, str, float], None],
        watch: Callable[[], tuple[str, str] | None] = lambda: None,
        remind: Callable[[Iterable[int]], None] = lambda missing: None,
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._end_s = time.monotonic() + timeout_s
        self._place = place
        self._explain = explain
        self._pause = pause
        self._watch = watch
        self._remind = remind
        self._remind_s = time.monotonic() + waiting.SAY_AFTER_S
        self._secret = secret_of_ranks()
        self._refused = _Refusals()

    @property
    def refusals(self) -> str:
        """A sentence, after a space, about values in the store not written by this job's ranks; empty for none."""
        return self._refused.text

    def admit_all(self, before_all_go_on: Callable[[], object] = lambda: None) -> str:
        """Rank 0's part: answer ranks, and wait until all have signed. Collective.

        Args:
            before_all_go_on: called when all have signed, but do not know that yet; also if a rank does not come.

        Returns:
            The name.

        Raises:
            RendezvousError: a rank did not come, or has another token.
            RuntimeError: the store is gone.
        """
        name = new_nonce()
        signed: dict[int, str] = {}
        invited: dict[int, str] = {}
        nap_s = _SHORTEST_NAP_S
        try:
            while len(signed) < self._world_size - 1:
                has_changed = self._let_in(name, invited, signed)
                nap_s = _SHORTEST_NAP_S if has_changed else min(2 * nap_s, _LONGEST_NAP_S)
                self._check_deadline(rank for rank in self._others if rank not in signed)
                if time.monotonic() > self._remind_s:
                    self._remind_s = math.inf
                    self._remind(rank for rank in self._others if rank not in signed)
                time.sleep(nap_s)
        finally:
            before_all_go_on()
        self._of(name).set(_COMPLETE, self._seals("meeting", name).seal(_COMPLETE, " ".join(signed.values())))
        return name

    @property
    def _others(self) -> range:
        return range(1, self._world_size)

    def _of(self, name: str) -> Store:
        return PrefixStore(f"meeting{name}", self._store)

    def _seals(self, purpose: str, word: str) -> Seals:
        return Seals(self._secret, purpose, word)

    def _let_in(self, name: str, invited: dict[int, str], signed: dict[int, str]) -> bool:
        """Answer the ranks that have come since the last call, and note signatures; returns whether there were any."""
        has_changed = False
        for rank in self._others:
            if time.monotonic() > self._end_s:
                break
            if rank in signed:
                continue
            if self._invite_one(name, rank, invited):
                has_changed = True
            if rank not in invited:
                continue
            word = self._find(self._of(name), str(rank), self._seals("meeting", name))
            if word is not None:
                signed[rank], has_changed = word, True
        return has_changed

    def _invite_one(self, name: str, rank: int, invited: dict[int, str]) -> bool:
        """Answer a rank that has come, even one with another token, which thereby learns of it."""
        found = find(self._store, _coming(rank))
        if found is None:
            return False
        _remove(self._store, _coming(rank))
        word, _, sealed = found[:_LONGEST_COMING].decode(errors="replace").partition(" ")
        if not is_nonce(word):
            self._refused.note(_coming(rank), "it has no MAC")
            return False
        try:
            self._seals("coming", word).open(_coming(rank), sealed)
        except Refused as refused:
            self._refused.note(_coming(rank), str(refused))
        else:
            self._refused.forget(_coming(rank))
            invited[rank] = word
        key = _invitation(word)
        self._store.set(key, self._seals("invitation", word).seal(key, name))
        return True

    def join(self, rank: int) -> str:
        """The part of every other rank: publish a word, get an answer, sign, and wait until all have. Collective.

        A rank repeats its word while it waits: rank 0 may have died since it answered, and been replaced by another.

        Returns:
            The name.

        Raises:
            RendezvousError: rank 0 did not come, or has another token, or another process uses this rank.
            RuntimeError: the store is gone.
        """
        word = new_nonce()
        coming = f"{word} {self._seals('coming', word).seal(_coming(rank), str(rank))}"
        invitation, invitations = _invitation(word), self._seals("invitation", word)
        name, signature, write_s = "", "", 0.0
        while True:
            now_s = time.monotonic()
            if now_s >= write_s:  # Repeatedly, as others may remove or overwrite it.
                self._store.set(_coming(rank), coming)
                if name:
                    self._of(name).set(str(rank), signature)
                write_s = now_s + _WRITE_AGAIN_S
            awaited = (self._of(name), _COMPLETE) if name else (self._store, invitation)
            self._pause(*awaited, max(min(write_s, self._end_s) - now_s, _SHORTEST_NAP_S))
            words = self._find(*awaited, self._seals("meeting", name)) if name else None
            if words is not None:
                break
            invited = self._find(self._store, invitation, invitations)
            if invited is not None:
                if not is_nonce(invited):
                    raise RendezvousError(f"rank 0 invites to {invited[:60]!r}, which is not the name of a rendezvous")
                _remove(self._store, invitation)
                name, write_s = invited, 0.0
                signature = self._seals("meeting", name).seal(str(rank), word)
            other = self._watch()
            if other is not None:
                self._refused.note(*other)
            self._check_deadline(())
        if word not in words.split():
            raise RendezvousError(
                f"another process came to {self._place} as rank {rank}; give each process a different rank"
            )
        return name

    def _find(self, store: Store, key: str, seals: Seals) -> str | None:
        """The value that a rank of this job wrote under a key, or None; anybody else's value is removed."""
        found = find(store, key)
        if found is None:
            return None
        try:
            text = seals.open(key, found.decode(errors="replace"))
        except Refused as refused:
            self._refused.note(key, str(refused))
            _remove(store, key)
            time.sleep(_SHORTEST_NAP_S)
            return None
        self._refused.forget(key)
        return text

    def _check_deadline(self, missing: Iterable[int]) -> None:
        if time.monotonic() > self._end_s or self._refused.are_lasting():
            raise RendezvousError(f"{self._explain(missing)}{self._refused.text}")


class _Refusals:
    """Values in the store that no rank of this job wrote, until a rank writes the true value."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, float]] = {}  # by key: why, and since when

    def note(self, key: str, why: str) -> None:
        _, since_s = self._found.get(key, ("", time.monotonic()))
        self._found[key] = why, since_s

    def forget(self, key: str) -> None:
        self._found.pop(key, None)

    def are_lasting(self) -> bool:
        """Whether such a value keeps reappearing: then the rank that should write there has another token."""
        is_other = (since_s for why, since_s in self._found.values() if "another token" in why)
        return any(time.monotonic() - since_s > _PATIENCE_S for since_s in is_other)

    @property
    def text(self) -> str:
        """A sentence about the first of them, after a space; empty for none."""
        for key, (why, _) in self._found.items():
            return (
                f" The value in the store under {key!r} was not written by a rank of this job: {why}. Do all ranks "
                "have the same LOCKSTEP_TOKEN, and the same Lockstep?"
            )
        return ""


def _coming(rank: int) -> str:
    return f"coming/{rank}"


def _invitation(word: str) -> str:
    return f"invitation/{word}"


def _remove(store: Store, key: str) -> None:
    """Remove a value, if the store supports that; a lost store is reported by the next query."""
    with contextlib.suppress(RuntimeError):
        store.delete_key(key)
