"""Records the output of a script: lines on stdout, stderr and in files, and which rank writes which checkpoint.

Writes the facts `texts` (whether the last pass over data was an evaluation, the text, and the line of the script),
`saves` (a path, the line of the script, the number of steps before, and whether every rank that gets there writes it),
`shapes` (of saved tensors) and `untrained`: for saved objects, two numbers for each tensor with the shape of a
parameter, such as an average of weights that is in no model.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import inspect
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.verify.recorder import StepRecorder, is_of_library, line_of_script
from lockstep.tree import tensors_in

__all__ = ["install"]

_MOST_LINES = 2000
# Functions that write a file, with the names of their parameters for the file and its content.
_SAVING = {
    ("torch", "save"): ("f", "obj"),
    ("safetensors.torch", "save_file"): ("filename", "tensors"),
    ("numpy", "save"): ("file", "arr"),
    ("numpy", "savez"): ("file", "kwds"),
    ("numpy", "savez_compressed"): ("file", "kwds"),
    ("pickle", "dump"): ("file", "obj"),
}


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
    for (package, name), parameters in _SAVING.items():
        if importlib.util.find_spec(package.partition(".")[0]):
            wrap(importlib.import_module(package), name, functools.partial(_noting, recorder, *parameters))

    def open_watched(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def open_file(*args: Any, **kwargs: Any) -> Any:
            stream = original(*args, **kwargs)
            if type(stream) is not io.TextIOWrapper or not stream.writable():
                return stream
            return _File(stream, signature.bind(*args, **kwargs).arguments.get("newline"), recorder)

        return open_file

    if recorder.rank == 0:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, _File(stream, None, recorder) if isinstance(stream, io.TextIOWrapper) else stream)
        for module in (builtins, io):
            wrap(module, "open", open_watched)


def _noting(recorder: StepRecorder, file: str, content: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes a file, and records it; `file` and `content` are names of its parameters."""
    signature = inspect.signature(original)

    def save(*args: Any, **kwargs: Any) -> Any:
        if recorder.busy == 0:
            given = signature.bind(*args, **kwargs).arguments
            # Libraries that call these, such as Accelerate in save_state(), decide which rank writes.
            is_by_all = original.__name__ == "save_file" or not is_of_library(sys._getframe(1).f_code.co_filename)
            _note_save(recorder, given[file], given.get(content), is_by_all)
        return original(*args, **kwargs)

    return save


def _note_save(recorder: StepRecorder, file: Any, content: Any, is_by_all: bool) -> None:
    path = os.path.abspath(file) if isinstance(file, str | os.PathLike) else str(getattr(file, "name", ""))
    recorder.facts["saves"].append((path, line_of_script(), len(recorder.steps), is_by_all))
    if recorder.rank == 0:
        recorder.facts["shapes"][f"{path} after {len(recorder.steps)} steps"] = _shapes_in(content), line_of_script()
        recorder.note_untrained(os.path.basename(path), lambda: _weights_in(content, recorder.roots))


def _shapes_in(saved: Any) -> dict[str, list[int]]:
    """The shape of each tensor, array and list of numbers in nested dicts, by its keys; without single numbers."""
    if isinstance(saved, Tensor | np.ndarray):
        is_plain = type(saved) in (Tensor, nn.Parameter, np.ndarray) and math.prod(saved.shape) > 1
        return {"": [*saved.shape]} if is_plain else {}
    if isinstance(saved, list) and len(saved) > 1 and all(isinstance(each, int | float) for each in saved):
        return {"": [len(saved)]}
    parts = saved.items() if isinstance(saved, Mapping) else ()
    return {f"{key}.{name}".rstrip("."): shape for key, part in parts for name, shape in _shapes_in(part).items()}


def _weights_in(saved: Any, roots: Iterable[nn.Module]) -> list[Tensor]:
    """Unsharded tensors with the shape and dtype of a parameter; without single numbers."""
    kinds = {(each.shape, each.dtype) for root in roots for each in root.parameters() if each.numel() > 1}
    tensors = tensors_in(saved.state_dict() if isinstance(saved, nn.Module) else saved)
    return [each for each in tensors if type(each) in (Tensor, nn.Parameter) and (each.shape, each.dtype) in kinds]
