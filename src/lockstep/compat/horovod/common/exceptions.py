"""The exceptions that Horovod's users catch."""

from __future__ import annotations

from lockstep.errors import LockstepError, NotInitialized

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "NotInitializedError", "UnsupportedError"]


class HorovodInternalError(LockstepError):
    """A collective failed: ranks asked for different things, or one of them is gone. Elastic mode recovers from it."""


class HostsUpdatedInterrupt(LockstepError):
    """The set of hosts changed. Elastic mode starts over, without going back to the last commit.

    Args:
        skip_sync: whether the state need not be synchronized, because hosts were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.skip_sync,)


class NotInitializedError(NotInitialized, ValueError):
    """Use before `hvd.init()`. Horovod raises ValueError."""


class UnsupportedError(LockstepError, NotImplementedError):
    """Something that Horovod itself does not have. It raises NotImplementedError."""
