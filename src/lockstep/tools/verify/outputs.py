"""What a script prints and saves: lines on stdout and stderr, and who writes which checkpoint.

Writes the facts `texts` (whether an evaluation was the last pass over data, what was printed, and by which line of the
script), `saves` (a path, and the line of the script) and `untrained`: of what is saved, two numbers of each tensor that
has the shape of a parameter, such as a mean of the weights that no model holds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.verify.recorder import StepRecorder, is_of_library, line_of_script
from lockstep.tree import tensors_in

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
            if recorder.busy == 0:
                path = os.path.abspath(f) if isinstance(f, str | os.PathLike) else str(getattr(f, "name", ""))
                # A library, such as Accelerate in save_state(), knows who has to write.
                if not is_of_library(sys._getframe(1).f_code.co_filename):
                    recorder.facts["saves"].append((path, line_of_script()))
                if recorder.rank == 0:
                    recorder.note_untrained(os.path.basename(path), lambda: _weights_in(obj, recorder.roots))
            return original(obj, f, *args, **kwargs)

        return save

    if recorder.rank == 0:
        sys.stdout, sys.stderr = LineWatch(sys.stdout, recorder), LineWatch(sys.stderr, recorder)
    wrap(torch, "save", make)


def _weights_in(saved: Any, roots: Iterable[nn.Module]) -> list[Tensor]:
    """Tensors that this rank holds whole, and that have the shape of a parameter."""
    shapes = {each.shape for root in roots for each in root.parameters()}
    tensors = tensors_in(saved.state_dict() if isinstance(saved, nn.Module) else saved)
    return [each for each in tensors if type(each) in (Tensor, nn.Parameter) and each.shape in shapes]
