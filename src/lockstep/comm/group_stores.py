"""Our own keys in the store through which a group met, whether the group is ours or torch's."""

from __future__ import annotations

from typing import Any

from lockstep.comm.backend import engine_of, nonce_of
from lockstep.comm.group_setup import BootstrapStore
from lockstep.torch_private.groups import default_store
from lockstep.torch_private.stores import PrefixStore

__all__ = ["store_of"]


def store_of(group: Any, purpose: str) -> BootstrapStore | None:
    """The group's store, with keys for one purpose; None if torch does not reveal the store. Local.

    Includes the nonce of a group of ours; ranks of other groups must agree on one (`BootstrapStore.agreed`).

    Args:
        group: the default group, or one of ours.
        purpose: the same on all ranks.

    Raises:
        RuntimeError, AttributeError, ValueError: the store no longer exists.
    """
    store: Any = group.get_group_store() if engine_of(group) is not None else default_store()
    if store is None:
        return None
    below = PrefixStore(f"lockstep/{purpose}/{group.group_name}", store)
    return BootstrapStore(below, purpose, group.group_name, nonce=nonce_of(group) or "")
