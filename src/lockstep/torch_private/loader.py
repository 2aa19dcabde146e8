"""How `lockstep.DataLoader` stands in torch's loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lockstep.torch_private.lookup import need

__all__ = ["iterator_of", "set_guarded"]

_get_iterator = need("torch.utils.data.DataLoader._get_iterator")


def iterator_of(loader: DataLoader[Any]) -> Any:
    """torch's own iterator over a loader, whatever its class puts in the place of it."""
    # Looked up again: others replace it, too.
    return getattr(DataLoader, "_get_iterator", _get_iterator)(loader)


def set_guarded(loader: Any, name: str, value: object) -> None:
    """Set an attribute that a class of torch's lets nobody set after construction: `dataset`, `batch_size`, ….

    Args:
        loader: a DataLoader, or the frozen information of a worker.
        name: of the attribute.
        value: what it shall be.
    """
    object.__setattr__(loader, name, value)
