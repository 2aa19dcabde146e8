"""What a script prints and saves: lines on stdout and stderr, and who writes which checkpoint.

Writes the facts `texts` (whether an evaluation was the last pass over data, what was printed, and by which line of the
script) and `saves` (a path, and the line of the script).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.verify.recorder import StepRecorder, is_of_library, line_of_script

__all__ = ["LineWatch", "install"]

_MOST_LINES = 2000


class LineWatch:
    """Stands for stdout or stderr: hands everything on, and notes the lines.

    Args:
        stream: the real one.
        recorder: of this process.
    """

    def __init__(self, stream: Any, recorder: StepRecorder) -> None:
        self._stream = stream
        self._recorder = recorder
        self._rest = ""

    def write(self, text: str) -> Any:
        """Hand on, and note whole lines."""
        lines = (self._rest + text).replace("\r", "\n").split("\n")
        self._rest = lines.pop()
        texts = self._recorder.facts["texts"]
        if len(texts) < _MOST_LINES:
            where = line_of_script()
            texts.extend((self._recorder.is_evaluating, line, where) for line in lines if line.strip())
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def install(recorder: StepRecorder) -> None:
    """Watch from now on."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            # A library, such as Accelerate in save_state(), knows who has to write.
            if recorder.busy == 0 and not is_of_library(sys._getframe(1).f_code.co_filename):
                path = os.path.abspath(f) if isinstance(f, str | os.PathLike) else str(getattr(f, "name", ""))
                recorder.facts["saves"].append((path, line_of_script()))
            return original(obj, f, *args, **kwargs)

        return save

    if recorder.rank == 0:
        sys.stdout, sys.stderr = LineWatch(sys.stdout, recorder), LineWatch(sys.stderr, recorder)
    wrap(torch, "save", make)
