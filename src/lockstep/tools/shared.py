"""What the programs that run scripts, `rehearse` and `verify`, have in common."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.env import Variable

__all__ = ["distributed_sampler", "read_settings"]


def distributed_sampler(loader: Any) -> Any:
    """The sampler that splits a loader's samples among ranks, or None."""
    from torch.utils.data import DistributedSampler

    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def read_settings(variable: Variable[str], command: str) -> dict[str, Any]:
    """The settings that a command has written for its processes.

    Raises:
        InputError: this process is none of them.
    """
    text = variable.get()
    if text is None:
        raise InputError(f"nobody has started this process by `lockstep {command} script.py`")
    found: dict[str, Any] = json.loads(text)
    return found
