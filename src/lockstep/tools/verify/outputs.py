"""Records the output of a script: lines on stdout, stderr and in files, and which rank writes which checkpoint.

Writes the facts `texts` (whether the last pass over data was an evaluation, the text, and the line of the script),
`saves` (a path, the line of the script, and the number of steps before), `shapes` (of saved tensors) and `untrained`:
for saved objects, two numbers for each tensor with the shape of a parameter, such as an average of weights that is in
no model.
"""

from __future__ import annotations

import builtins
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.verify.recorder import StepRecorder, is_of_library, line_of_script
from lockstep.tree import tensors_in

__all__ = ["install"]

_MOST_LINES = 2000


class _File(io.TextIOWrapper):
    """A text file whose lines are recorded as `texts` when written.

    Args:
        stream: the file that this one replaces.
        newline: as in `open`.
        recorder: recorder of this process.
    """

    def __init__(self, stream: io.TextIOWrapper, newline: str | None, recorder: StepRecorder) -> None:
        how = stream.encoding, stream.errors, newline, stream.line_buffering, stream.write_through
        super().__init__(stream.buffer, *how)
        self.mode = getattr(stream, "mode", "w")  # type: ignore[misc]
        self._stream = stream  # would close the buffer when freed
        self._recorder = recorder
        self._line: list[Any] | None = None  # the unfinished line
        self._count = 0

    def write(self, text: str) -> int:
        """Record and write a text."""
        for part in text.replace("\r", "\n").splitlines(keepends=True):
            if self._line is None:
                self._line = [self._recorder.is_evaluating, "", line_of_script()]
                self._count += 1
                if self._count <= _MOST_LINES:
                    self._recorder.facts["texts"].append(self._line)
            self._line[1] += part
            self._line = None if part.endswith("\n") else self._line
        return super().write(text)


def install(recorder: StepRecorder) -> None:
    """Watch from now on."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.busy == 0:
                path = os.path.abspath(f) if isinstance(f, str | os.PathLike) else str(getattr(f, "name", ""))
                # A library, such as Accelerate in save_state(), decides which rank writes.
                if not is_of_library(sys._getframe(1).f_code.co_filename):
                    recorder.facts["saves"].append((path, line_of_script(), len(recorder.steps)))
                if recorder.rank == 0:
                    recorder.facts["shapes"][f"{path} after {len(recorder.steps)} steps"] = (
                        _shapes_in(obj),
                        line_of_script(),
                    )
                    recorder.note_untrained(os.path.basename(path), lambda: _weights_in(obj, recorder.roots))
            return original(obj, f, *args, **kwargs)

        return save

    def open_watched(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def open_file(*args: Any, **kwargs: Any) -> Any:
            stream = original(*args, **kwargs)
            if type(stream) is not io.TextIOWrapper or not stream.writable():
                return stream
            return _File(stream, signature.bind(*args, **kwargs).arguments.get("newline"), recorder)

        return open_file

    wrap(torch, "save", make)
    if recorder.rank == 0:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, _File(stream, None, recorder) if isinstance(stream, io.TextIOWrapper) else stream)
        for module in (builtins, io):
            wrap(module, "open", open_watched)


def _shapes_in(saved: Any) -> dict[str, list[int]]:
    """The shape of each tensor in nested dicts, by its keys; without single numbers."""
    if isinstance(saved, Tensor):
        return {"": [*saved.shape]} if type(saved) in (Tensor, nn.Parameter) and saved.numel() > 1 else {}
    parts = saved.items() if isinstance(saved, Mapping) else ()
    return {f"{key}.{name}".rstrip("."): shape for key, part in parts for name, shape in _shapes_in(part).items()}


def _weights_in(saved: Any, roots: Iterable[nn.Module]) -> list[Tensor]:
    """Unsharded tensors with the shape and dtype of a parameter; without single numbers."""
    kinds = {(each.shape, each.dtype) for root in roots for each in root.parameters() if each.numel() > 1}
    tensors = tensors_in(saved.state_dict() if isinstance(saved, nn.Module) else saved)
    return [each for each in tensors if type(each) in (Tensor, nn.Parameter) and (each.shape, each.dtype) in kinds]
