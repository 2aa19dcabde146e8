"""Which epoch a sampler of the user's is in: the loader tells it, unless the script does.

A script that was written for torch's loader calls `sampler.set_epoch(epoch)` itself, and may begin with another epoch
than 0. That is noticed by the attribute `epoch`, in which samplers keep the number. From then on the loader leaves the
telling to the script, and its own epoch follows.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SamplerEpochs"]


class SamplerEpochs:
    """The epochs of one sampler.

    Args:
        sampler: the user's; may have no epochs.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._is_told_by_script = False
        self._last = self._epoch()

    def told_by_script(self) -> int | None:
        """The epoch that the script has told the sampler since the last call; None if it has not. Local."""
        now = self._epoch()
        if now is None or now == self._last:
            return None
        self._is_told_by_script, self._last = True, now
        return now

    def tell(self, epoch: int) -> None:
        """An epoch begins: tell the sampler, unless the script does. Local."""
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch) and not self._is_told_by_script:
            set_epoch(epoch)

    def note(self) -> None:
        """The sampler has run, and may count its epochs itself. Local."""
        self._last = self._epoch()

    def _epoch(self) -> int | None:
        epoch = getattr(self._sampler, "epoch", None) if hasattr(self._sampler, "set_epoch") else None
        return epoch if type(epoch) is int and epoch >= 0 else None
