"""Classes that `torch.distributed` has at run time but hides from type checkers."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore as FileStore
    from torch._C._distributed_c10d import GradBucket as GradBucket
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
    from torch._C._distributed_c10d import Work as Work
else:
    FileStore, HashStore, PrefixStore, TCPStore = dist.FileStore, dist.HashStore, dist.PrefixStore, dist.TCPStore
    GradBucket, Store, Work = dist.GradBucket, dist.Store, dist.Work

__all__ = [
    "FileStore",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "Work",
    "find",
    "find_all",
    "serve_tcp_store",
]

# How long torch waits for a value that existed, but was removed before it was read.
_REMOVED_MEANWHILE = timedelta(seconds=2)

# The expected value if the key does not exist: nobody else has written it.
_ABSENT = secrets.token_hex(16)


def find(store: Store, key: str) -> bytes | None:
    """The value under a key of a store, None if there is none, by a single query.

    Between two queries, for its existence and its value, others may remove it, and torch then waits for a new one.
    """
    try:
        found = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    except RuntimeError as error:
        if "Not implemented" not in str(error):
            raise
        return bytes(store.get(key)) if store.check([key]) else None  # a user-defined store, written in Python
    return None if found == _ABSENT.encode() else found


def find_all(store: Store, keys: Sequence[str]) -> list[bytes] | None:
    """The values under these keys, None unless all are there, by two queries, however many keys there are."""
    if not store.check(list(keys)):
        return None
    before = store.timeout  # type: ignore[attr-defined]  # not in torch's stubs
    store.set_timeout(_REMOVED_MEANWHILE)
    try:
        return [bytes(value) for value in store.multi_get(list(keys))]
    except dist.DistStoreError:
        return None
    finally:
        store.set_timeout(before)


def serve_tcp_store(
    listener: socket.socket,
    address: str,
    port: int,
    timeout: timedelta,
    *,
    multi_tenant: bool = False,
) -> Store:
    """A TCPStore for any number of processes, on a socket that is already listening. Local.

    Args:
        listener: the socket; the store takes it over and closes it.
        address: address of the store, as this process reaches it.
        port: port of the store.
        timeout: timeout of queries of the store.
        multi_tenant: share an existing store of this process at the same port.
    """
    descriptor = listener.detach()

    def serve(**backend: bool) -> Store:
        return TCPStore(
            address,
            port,
            None,
            True,
            timeout,
            wait_for_workers=False,
            multi_tenant=multi_tenant,
            master_listen_fd=descriptor,
            **backend,
        )

    try:
        return serve()
    except NotImplementedError:  # the libuv backend of torch 2.6 opens its own sockets
        return serve(use_libuv=False)
