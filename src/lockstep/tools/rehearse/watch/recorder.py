"""Collects the events of one process, and writes them to a file before it ends."""

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

# A long run only repeats the same events.
_MAX_EVENTS = 20_000


class Recorder:
    """The record of this process.

    Attributes:
        rank: rank in the group that it joined; until then, that with which it, or the process that spawned it, was
            started.
        world_size: size of that group.
        joined: whether it has joined a group.
        finished: whether the script has run to its end in this process.
        family: name of the processes that were started together; see [Note: families] in `spawning.py`.
        starter: pid of the process that spawned this one; 0 if the rehearsal itself started it.
        finishers: called before the record is written, to add events for what was counted.
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
        """Add an event; `data` must be serializable as JSON."""
        with self._lock:
            if len(self._events) < _MAX_EVENTS:
                self._events.append({"kind": kind, "sites": [site.dump() for site in sites], "data": data})

    @contextlib.contextmanager
    def watching_the_end(self) -> Iterator[None]:
        """Context manager around the script: sets `finished` unless it fails."""
        try:
            yield
        except SystemExit as leaving:
            self.finished = not leaving.code
            raise
        self.finished = True

    def write(self) -> None:
        """Write the record to the job's private folder, once."""
        folder = env.LOCKSTEP_RENDEZVOUS.get()
        if folder is None or self._is_written:
            return
        self._is_written = True
        for finish in self.finishers:
            finish()
        content = {
            "rank": self.rank,
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
        with contextlib.suppress(OSError):  # The folder is removed when the job ends.
            draft.write_text(json.dumps(content), encoding="utf-8")
            os.replace(draft, path)

    def write_now(self) -> None:
        """Write the events so far and start a new record, for processes that skip exit handlers."""
        self.write()
        self._events.clear()
        self._is_written = False

    def _begin_in_child(self) -> None:
        """After a fork: drop the parent's events, which the parent will write."""
        self._lock = threading.RLock()
        self._events.clear()
        self.finishers.clear()
        self._is_written = False

    def install(self) -> None:
        """Write the record at exit and on SIGTERM."""
        atexit.register(self.write)
        os.register_at_fork(after_in_child=self._begin_in_child)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_termination)

    def _on_termination(self, number: int, frame: FrameType | None) -> None:
        self.write()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


recorder = Recorder()
