"""Collects what one process saw, and writes it down before the process is gone."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep import env
from lockstep.tools.rehearse.line import Site

__all__ = ["Recorder", "recorder"]

# A script that runs for long sees the same things again and again.
_MAX_EVENTS = 20_000


class Recorder:
    """The record of this process.

    Attributes:
        rank: in the group that it joined, or None.
        world_size: of that group.
        joined: whether it has joined one.
        finished: whether the script has come to its end, here.
        family: processes that were started together; see [Note: families] in `spawning.py`.
        starter: pid of the process that spawned this one; 0 if the rehearsal itself has started it.
        finishers: called before the record is written, to note what was counted.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.world_size = 1
        self.joined = False
        self.finished = False
        self.family = ""
        self.starter = 0
        self.finishers: list[Callable[[], None]] = []
        self._events: list[dict[str, Any]] = []
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._is_written = False

    def note(self, kind: str, sites: Sequence[Site], **data: Any) -> None:
        """Add an event; `data` must be what JSON can say."""
        with self._lock:
            if len(self._events) < _MAX_EVENTS:
                self._events.append({"kind": kind, "sites": [site.dump() for site in sites], "data": data})

    @contextlib.contextmanager
    def watching_the_end(self) -> Iterator[None]:
        """Around the script: whether it comes to its end, or fails."""
        try:
            yield
        except SystemExit as leaving:
            self.finished = not leaving.code
            raise
        self.finished = True

    def write(self) -> None:
        """Leave the record in the job's private folder; what was written before is replaced."""
        folder = env.LOCKSTEP_RENDEZVOUS.get()
        if folder is None or self._is_written:
            return
        self._is_written = True
        for finish in self.finishers:
            finish()
        rank = self.rank if self.rank is not None else env.RANK.get()
        content = {
            "rank": rank,
            "world_size": self.world_size,
            "joined": self.joined,
            "finished": self.finished,
            "family": self.family,
            "starter": self.starter,
            "pid": os.getpid(),
            "events": self._events,
        }
        path = Path(folder) / f"rehearsal-{os.getpid()}-{next(self._numbers)}.json"
        draft = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # The folder went with the job.
            draft.write_text(json.dumps(content), encoding="utf-8")
            os.replace(draft, path)

    def write_now(self) -> None:
        """Write what there is, and begin anew: for processes that end without a word."""
        self.write()
        self._events.clear()
        self._is_written = False

    def _begin_in_child(self) -> None:
        """After a fork: what the parent saw is the parent's to tell."""
        self._lock = threading.RLock()
        self._events.clear()
        self.finishers.clear()
        self._is_written = False

    def install(self) -> None:
        """Write at exit, and when asked to end."""
        atexit.register(self.write)
        os.register_at_fork(after_in_child=self._begin_in_child)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_termination)

    def _on_termination(self, number: int, frame: FrameType | None) -> None:
        self.write()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


recorder = Recorder()
