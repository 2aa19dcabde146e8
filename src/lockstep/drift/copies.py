"""Which tensors are copies of parameters: the float32 masters that an optimizer steps in the place of 16-bit ones.

Who makes such copies says so, and who looks at what an optimizer steps asks for the parameters behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["note_copy", "original_of"]

# Not attributes of the copies: scripts deep-copy these, and save them.
_originals: Any = WeakTensorKeyDictionary()


def note_copy(copy: torch.Tensor, original: torch.Tensor) -> None:
    """An optimizer steps this copy of a parameter, and somebody copies it back. Local."""
    _originals[copy] = original


def original_of(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that it is a copy of; itself if it is none. Local."""
    found: torch.Tensor = _originals.get(tensor, tensor)
    return found
