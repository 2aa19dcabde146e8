"""Checkpoints: a tensor on a stand-in is saved as being on that GPU, and loaded onto it unless told otherwise."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.tools.rehearse.devices.marks import _MARK, mark_storage
from lockstep.tools.rehearse.devices.mode import placed
from lockstep.tools.rehearse.devices.naming import devices
from lockstep.tools.rehearse.patching import replace

__all__ = ["install", "restored"]

# Functions called with the index of the stand-in for every storage that is loaded onto one.
restored: list[Any] = []
# Before torch's own packages, whose priorities begin at 10.
_PRIORITY = 5


def _tag(storage: Any) -> str | None:
    index = getattr(storage, _MARK, None)
    return None if index is None else f"cuda:{index}"


def _restore(storage: Any, location: str) -> Any:
    if not isinstance(location, str) or not location.startswith("cuda"):
        return None
    index = devices.index_of(location)
    assert index is not None
    mark_storage(storage, index)
    for listener in restored:
        listener(index)
    return storage


def _storage_to(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    index = devices.cuda_index(device)
    with placed(None):
        copy = self.clone()
    mark_storage(getattr(copy, "_untyped_storage", copy), index)
    return copy


def install() -> None:
    """Make torch.save and torch.load work with stand-ins."""
    torch.serialization.register_package(_PRIORITY, _tag, _restore)
    replace(torch.UntypedStorage, "cuda", _storage_to)
    replace(torch.storage.TypedStorage, "cuda", _storage_to)
