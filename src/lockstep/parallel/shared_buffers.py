"""The buffers of a model, which all ranks get from the first with each averaging; and those that a script writes.

[Note: written buffers] torch's engine gives the first rank's buffers out before each forward pass, ours with the
averaging. That differs for a buffer that the script writes between two passes: the noise of NoisyNets, running
statistics of observations. If each rank writes something else, the next step is made by each rank's own, and those
behind it by the first rank's. No collective tells of it before the step, and many write the same on all ranks; so one
rank compares what it holds before and behind the averaging, and warns. What forward and backward passes write by
themselves is not looked at; values tell that, since batch normalization does not count its writes as a new version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lockstep.drift.comparison import digest
from lockstep.log import get_logger, warn_once
from lockstep.parallel.checks import current_buffers, find_buffers
from lockstep.torch_private.autograd import version_of

__all__ = ["SharedBuffers"]

_logger = get_logger(__name__)
_LOOKS = 100  # averagings
_Key = tuple[int, int] | None  # which tensor it is, and its version


class SharedBuffers:
    """The buffers of one model that its ranks share. Local.

    Args:
        module: the model.
        ignored: names that the user has told the engine to leave alone.
        is_told: this rank is the one that warns, and not the first.
    """

    def __init__(self, module: torch.nn.Module, ignored: frozenset[str], is_told: bool) -> None:
        self._module = module
        self._entries = find_buffers(module, ignored)
        self._looks_left = _LOOKS if is_told and self._entries else 0
        self._keys: list[_Key] = []  # when somebody looked last
        self._written: dict[int, str] = {}  # by the script, since the last averaging, and hashes of what
        self._by_passes: set[int] = set()
        if self._looks_left:
            self._keys = self._keys_now()

    def current(self) -> list[torch.Tensor]:
        """Those that there are now."""
        return current_buffers(self._entries)

    def enter_pass(self) -> None:
        """A forward pass begins."""
        if self._looks_left:
            found = {index: self._digest(index) for index in self._changed() - self._by_passes}
            self._written.update((index, text) for index, text in found.items() if text is not None)

    def leave_pass(self) -> None:
        """It is over."""
        if self._looks_left:
            self._by_passes |= self._changed()

    @contextmanager
    def averaging(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """While these are given out. See [Note: written buffers]."""
        if not self._looks_left or not buffers:
            yield
            return
        self.leave_pass()
        written, self._written = self._written, {}
        self._by_passes.update(index for index, text in written.items() if self._digest(index) != text)
        yield
        self._looks_left -= 1
        self._keys = self._keys_now()
        other = [i for i, text in written.items() if i not in self._by_passes and self._digest(i) != text]
        if other:
            self._looks_left = 0
            self._warn(other)

    def _changed(self) -> set[int]:
        """The entries with another tensor than at the last call, or one that was written since."""
        before, self._keys = self._keys, self._keys_now()
        return {index for index, pair in enumerate(zip(before, self._keys, strict=True)) if pair[0] != pair[1]}

    def _keys_now(self) -> list[_Key]:
        return [self._key(index) for index in range(len(self._entries))]

    def _buffer(self, index: int) -> torch.Tensor | None:
        return next(iter(current_buffers([self._entries[index]])), None)

    def _key(self, index: int) -> _Key:
        buffer = self._buffer(index)
        return None if buffer is None or buffer.is_inference() else (id(buffer), version_of(buffer))

    def _digest(self, index: int) -> str | None:
        buffer = self._buffer(index)
        if buffer is None or (buffer.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        return digest([buffer])

    def _warn(self, indices: Sequence[int]) -> None:
        own = [self._buffer(index) for index in indices]
        names = [name for name, each in self._module.named_buffers() if any(each is one for one in own)]
        warn_once(
            _logger,
            f"buffer(s) {', '.join(names[:3])}{', …' if len(names) > 3 else ''} of {type(self._module).__name__} were "
            "written between two training passes, and not alike on all ranks: this step was made by each rank's own, "
            "and all have those of the group's first rank now. Draw them from a generator that all ranks have alike, "
            "or write torch.distributed.broadcast(buffer, 0) behind that; pass broadcast_buffers=False if each rank is "
            "to have its own",
        )
