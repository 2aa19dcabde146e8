"""Horovod's timeline: a trace of negotiation and execution, for chrome://tracing or Perfetto.

Rank 0 writes it. Every tensor has a row, with one event for its negotiation (from the request until all ranks had
made it) and one for the operation. The file is valid JSON after `stop`; viewers also read unfinished ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from lockstep.compat.horovod.torch.execution import Match

__all__ = ["Timeline"]

_CYCLES = "cycles"


class Timeline:
    """A trace file that can be started and stopped. Local; does nothing while stopped."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._marks_cycles = False
        self._start_s = 0.0
        self._is_first = True

    def start(self, path: str, marks_cycles: bool = False) -> None:
        """Start a new file; finishes an open one.

        Args:
            path: path of the file, which is overwritten.
            marks_cycles: whether to mark each negotiation round.
        """
        self.stop()
        with self._lock:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed by stop
            self._file.write("[\n")
            self._is_first = True
            self._rows = {}
            self._marks_cycles = marks_cycles
            self._start_s = time.perf_counter()
            epoch_us = int(time.time() * 1e6)
            self._write("process_name", "M", 0, args={"name": "lockstep", "start_time_since_epoch_in_micros": epoch_us})

    def stop(self) -> None:
        """Finish the file, if there is one."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def mark_cycle(self) -> None:
        """Mark the start of a round."""
        if self._file is None or not self._marks_cycles:
            return
        with self._lock:
            self._write("CYCLE_START", "i", self._row(_CYCLES), self._microseconds(time.perf_counter()), s="g")

    def record(self, matches: Sequence[Match], start_s: float) -> None:
        """Record requests that have just run.

        Args:
            matches: the requests, which ran together.
            start_s: start time, by `time.perf_counter`.
        """
        if self._file is None:
            return
        end_us = self._microseconds(time.perf_counter())
        with self._lock:
            for match in matches:
                if match.request is None:
                    continue
                kind, row = match.meta.kind.upper(), self._row(match.meta.name)
                asked_us = max(0, self._microseconds(match.request.submitted_s))
                run_us = self._microseconds(start_s)
                self._write(f"NEGOTIATE_{kind}", "X", row, asked_us, dur=max(0, run_us - asked_us))
                shapes = [f"{dtype}{list(shape)}" for dtype, shape, _ in match.meta.tensors]
                self._write(kind, "X", row, run_us, dur=max(0, end_us - run_us), args={"tensors": shapes})
            if self._file is not None:
                self._file.flush()

    def _microseconds(self, seconds: float) -> int:
        return int((seconds - self._start_s) * 1e6)

    def _row(self, name: str) -> int:
        """The row of a tensor; writes its name to the file when it is new."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            self._write("process_name", "M", row, args={"name": name})
        return row

    def _write(self, name: str, phase: str, row: int, timestamp_us: int = 0, **more: Any) -> None:
        if self._file is None:
            return
        event = {"name": name, "ph": phase, "pid": row, "tid": 0, "ts": timestamp_us, **more}
        self._file.write(("" if self._is_first else ",\n") + json.dumps(event))
        self._is_first = False
