"""Horovod's exceptions."""

from __future__ import annotations

from lockstep.errors import LockstepError, NotInitialized

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "NotInitializedError", "UnsupportedError"]


class HorovodInternalError(LockstepError):
    """A collective failed: ranks called different operations, or a rank was lost. Elastic mode recovers from it."""


class HostsUpdatedInterrupt(LockstepError):
    """The set of hosts changed. Elastic mode restarts, without going back to the last commit.

    Args:
        skip_sync: whether to skip synchronizing the state, because hosts were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.skip_sync,)


class NotInitializedError(NotInitialized, ValueError):
    """Use before `hvd.init()`. A ValueError, as in Horovod."""


class UnsupportedError(LockstepError, NotImplementedError):
    """Use of something that Horovod does not support. A NotImplementedError, as in Horovod."""
