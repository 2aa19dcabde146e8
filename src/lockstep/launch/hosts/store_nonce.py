"""The nonce of a job store: its holder generates it and tells new launchers, so values of earlier jobs are rejected.

[Note: store nonce] The MACs of launchers cover the nonce of their store. A token file outlives a job, and the name and
the port of the next job are often the same, so only the nonce distinguishes a recorded value of an earlier job from one
of this job. So a new launcher trusts no nonce found in the store: it sends a random challenge, and the holder's answer
has a MAC over that challenge, which nobody can have recorded.
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
NO_TEXT = "\ufffd"  # the result of decoding bytes that are not text


class NoAnswer(Exception):
    """No process with this job's token has answered. The message is a clause."""


class NonceAnswers:
    """Answers launchers that ask for the nonce, in a separate thread and connection: the launcher may be busy.

    The thread ends with the process, with the store, or by `stop`.

    Args:
        store: a connection to the store that nothing else uses.
        secret: the secret of the job.
        port: the port of the store, which the MACs cover.
        nonce: the nonce that this launcher has generated.
    """

    def __init__(self, store: Store, secret: Secret, port: int, nonce: str) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._secret = secret
        self._port = port
        self._nonce = nonce
        self._stopped = threading.Event()
        # Not a daemon: a thread that returns from torch's code during interpreter shutdown would abort the process.
        self._thread = threading.Thread(target=self._run, name="lockstep-nonce")
        self._thread.start()

    def stop(self) -> None:
        """Stop answering."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the store is gone
            while threading.main_thread().is_alive() and not self._stopped.wait(_ANSWER_EVERY_S):
                for question in self._take_questions():
                    key = _answer_key(question)
                    self._store.set(key, _seals(self._secret, self._port, question).seal(key, self._nonce))

    def _take_questions(self) -> list[str]:
        """Take the challenges out of the store, where other processes may write, too."""
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
            text = now  # others have asked meanwhile
        return list({word: None for word in text.split(" ") if is_nonce(word)})[:_MOST_QUESTIONS]


def ask_for_nonce(
    store: Store, secret: Secret, port: int, silence_s: float, refused_s: float, check: Callable[[float], None]
) -> str:
    """Ask the holder of a store for its nonce.

    Args:
        store: a connection to the store.
        secret: the secret of the job.
        port: the port of the store, which the MACs cover.
        silence_s: seconds to wait for an answer.
        refused_s: seconds to wait for another answer, if one was made with another token.
        check: waits that many seconds; raises when the launcher is told to end.

    Raises:
        NoAnswer: the holder has another token, or does not answer.
        RuntimeError: the store is gone.
    """
    store, question = PrefixStore(_PREFIX, store), new_nonce()
    seals, key = _seals(secret, port, question), _answer_key(question)
    start_s, ask_s, refusal = time.monotonic(), 0.0, None
    while True:
        now_s = time.monotonic()
        if now_s >= ask_s:  # the holder may have lost the challenge, or another process removed it
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
