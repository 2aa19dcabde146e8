"""The nonce of a job store: its holder generates it and tells launchers that come, so no value of an earlier job fits.

[Note: store nonce] The seals of launchers cover the nonce of their store. A token file outlives a job, and the name and
the port of the next are often the same, so what somebody has recorded of an earlier job differs from a value of this
one by the nonce alone. So a launcher that comes believes no nonce that stands in the store: it asks by a random
question, and the holder answers under a seal over that question, which nobody can have recorded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from lockstep.secret import Refused, Seals, Secret, is_nonce, new_nonce
from lockstep.torch_private.stores import PrefixStore, Store, find

__all__ = ["NO_TEXT", "NoAnswer", "NonceAnswers", "ask_for_nonce"]

_PREFIX = "lockstep-birth"
_ASK = "ask"
_MOST_QUESTIONS = 1024
_MOST_LOOKS = 10
_ANSWER_EVERY_S = 0.05
_LOOK_EVERY_S = 0.02
_ASK_AGAIN_S = 0.5
NO_TEXT = "\ufffd"  # what decoding makes of bytes that are no text


class NoAnswer(Exception):
    """Nobody with this job's token has answered. The message is a clause."""


class NonceAnswers:
    """Answers launchers that ask for the nonce, in its own thread, over its own connection: the launcher may be busy.

    The thread ends with the process, with the store, or by `stop`.

    Args:
        store: a connection to the store that nothing else uses.
        secret: the secret of the job.
        port: the port of the store, which the seals cover.
        nonce: that this launcher has generated.
    """

    def __init__(self, store: Store, secret: Secret, port: int, nonce: str) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._secret = secret
        self._port = port
        self._nonce = nonce
        self._stopped = threading.Event()
        # No daemon: a thread that comes back from torch's code while the interpreter ends would abort the process.
        self._thread = threading.Thread(target=self._run, name="lockstep-nonce")
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # The store is gone.
            while threading.main_thread().is_alive() and not self._stopped.wait(_ANSWER_EVERY_S):
                for question in self._take_questions():
                    key = _answer_key(question)
                    self._store.set(key, _seals(self._secret, self._port, question).seal(key, self._nonce))

    def _take_questions(self) -> list[str]:
        """The questions that stand in the store, which are taken away; strangers may write there, too."""
        text = (find(self._store, _ASK) or b"").decode(errors="replace")
        for _ in range(_MOST_LOOKS):
            if not text:
                return []
            if NO_TEXT in text:
                self._store.delete_key(_ASK)
                break
            now = bytes(self._store.compare_set(_ASK, text, "")).decode(errors="replace")
            if not now:
                break
            text = now  # Others have asked meanwhile.
        return list({word: None for word in text.split(" ") if is_nonce(word)})[:_MOST_QUESTIONS]


def ask_for_nonce(
    store: Store, secret: Secret, port: int, silence_s: float, refused_s: float, check: Callable[[float], None]
) -> str:
    """The nonce of a store, as its holder says now.

    Args:
        store: a connection to it.
        secret: the secret of the job.
        port: the port of the store, which the seals cover.
        silence_s: seconds to wait for an answer.
        refused_s: seconds to wait for another, where one was made with another token.
        check: waits for so many seconds; raises when the launcher is told to end.

    Raises:
        NoAnswer: the holder has another token, or none answers.
        RuntimeError: the store is gone.
    """
    store, question = PrefixStore(_PREFIX, store), new_nonce()
    seals, key = _seals(secret, port, question), _answer_key(question)
    start_s, ask_s, refusal = time.monotonic(), 0.0, None
    while True:
        now_s = time.monotonic()
        if now_s >= ask_s:  # The holder may have lost the question, and a stranger taken it away.
            store.append(_ASK, f" {question} ")  # type: ignore[attr-defined]  # not in torch's stubs
            ask_s = now_s + _ASK_AGAIN_S
        found = find(store, key)
        if found is not None:
            store.delete_key(key)
            try:
                return seals.open(key, found.decode(errors="replace"))
            except Refused as refused:
                refusal = str(refused)
        if now_s - start_s > (silence_s if refusal is None else refused_s):
            raise NoAnswer(
                f"nobody there answers within {silence_s:g} s"
                if refusal is None
                else f"of what the launcher there answers, {refusal}"
            )
        check(_LOOK_EVERY_S)


def _seals(secret: Secret, port: int, question: str) -> Seals:
    return Seals(secret, "birth", str(port), question)


def _answer_key(question: str) -> str:
    return f"answer/{question}"
