"""Keys of our own in the store through which a group met, its ranks' or torch's."""

from __future__ import annotations

from typing import Any

from lockstep.comm.backend import engine_of, nonce_of
from lockstep.comm.group_setup import BootstrapStore
from lockstep.torch_private.groups import default_store
from lockstep.torch_private.stores import PrefixStore

__all__ = ["store_of"]


def store_of(group: Any, purpose: str) -> BootstrapStore | None:
    """The group's store, with keys for one purpose; None where torch does not tell it. Local.

    With the nonce of a group of ours; ranks of another have to agree on one (`BootstrapStore.agreed`).

    Args:
        group: the default group, or one of ours.
        purpose: the same on all ranks.

    Raises:
        RuntimeError, AttributeError, ValueError: there is no store any more.
    """
    store: Any = group.get_group_store() if engine_of(group) is not None else default_store()
    if store is None:
        return None
    below = PrefixStore(f"lockstep/{purpose}/{group.group_name}", store)
    return BootstrapStore(below, purpose, group.group_name, nonce=nonce_of(group) or "")
