"""Every exception that Lockstep raises on purpose.

The tree::

    LockstepError (RuntimeError)
    ├── SetupError                  before the first collective
    │   ├── LaunchError             the launcher cannot start the job
    │   ├── BackendUnavailable (ValueError)  no such backend here; lists the available ones
    │   ├── AlreadyInitialized      init() twice
    │   ├── NotInitialized          use before init() or after shutdown
    │   ├── RendezvousError         the ranks did not find each other
    │   └── SharedMemoryError (OSError)      /dev/shm is too small, or cannot be used
    ├── CollectiveError             a collective that cannot finish; every waiting rank raises it
    │   ├── CollectiveMismatch      ranks called different operations
    │   ├── RankLost                a rank died, left or raised while others waited
    │   ├── CollectiveTimeout       a rank did not arrive before the deadline
    │   ├── SegmentDamaged          the control segment contains data that no rank has written
    │   └── CollectiveAborted       this group was shut down during a call
    ├── InputError (ValueError)     a value that no rank could use
    ├── InputTypeError (TypeError)  a type that no rank could use
    ├── ModelError                  model and engine do not fit together
    │   ├── ModelMismatch           ranks hold different models; names the first parameter
    │   └── UnusedParameters        parameters took no part in the loss; names them
    ├── DataError (ValueError)      the loader was asked for the impossible
    ├── CheckpointError             a checkpoint cannot be read or does not fit
    │   └── CheckpointNotWritten (OSError)   the folder cannot be created or written to
    └── WorkerFailed                spawn(): a rank failed; carries its rank and traceback

Each message says which rank and operation, what was given, what was expected, and what to do. Ranks that caused an
error which others raise are its culprits, listed in `culprits`.
"""

from __future__ import annotations

__all__ = [
    "AlreadyInitialized",
    "BackendUnavailable",
    "CheckpointError",
    "CheckpointNotWritten",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "DataError",
    "InputError",
    "InputTypeError",
    "LaunchError",
    "LockstepError",
    "ModelError",
    "ModelMismatch",
    "NotInitialized",
    "RankLost",
    "RendezvousError",
    "SegmentDamaged",
    "SetupError",
    "SharedMemoryError",
    "UnusedParameters",
    "WorkerFailed",
]

AFTER_CTRL_C = (
    "Ctrl-C meets each rank at another line, so nothing can be communicated any more, and nothing was saved. To save "
    "then, let Ctrl-C set a flag by world.stop_on(signal.SIGINT), and save `if world.should_stop():` after a step"
)
"""The text of errors after a KeyboardInterrupt."""


class LockstepError(RuntimeError):
    """Base of every error that Lockstep raises on purpose."""


class SetupError(LockstepError):
    """Something is wrong before the first collective."""


class LaunchError(SetupError):
    """The launcher cannot start the job."""


class BackendUnavailable(SetupError, ValueError):
    """The requested backend does not exist here; the message lists the available ones."""


class AlreadyInitialized(SetupError):
    """`lockstep.init` was called while a world is still open."""


class NotInitialized(SetupError):
    """A world was used before `lockstep.init` or after its shutdown."""


class RendezvousError(SetupError):
    """The ranks did not find each other."""


class SharedMemoryError(SetupError, OSError):
    """Shared memory is too small or cannot be used.

    Args:
        *args: an `errno` and a message, or only a message.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if len(args) == 2:  # Python sets these only for a plain OSError.
            self.errno = args[0] if isinstance(args[0], int) else None
            self.strerror = str(args[1])

    def __str__(self) -> str:
        return str(self.args[-1])


class CollectiveError(LockstepError):
    """A collective cannot finish. Raised on every rank that waits in it.

    Attributes:
        culprits: global ranks that caused it, in order; empty when unknown.
    """

    def __init__(self, message: str, culprits: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.culprits = tuple(culprits)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.culprits)


class CollectiveMismatch(CollectiveError):
    """Ranks met in one collective with different operations, shapes, dtypes or roots."""


class RankLost(CollectiveError):
    """A rank died, left the group or raised an exception while this one waited for it."""


class CollectiveTimeout(CollectiveError):
    """One or more ranks did not arrive before the deadline."""


class SegmentDamaged(CollectiveError):
    """The ranks' shared control memory contains data that no rank has written. The script is not at fault."""


class CollectiveAborted(CollectiveError):
    """The group was shut down on this rank during a call."""


class InputError(LockstepError, ValueError):
    """A value that cannot be used: wrong device, wrong shape, wrong argument."""


class InputTypeError(LockstepError, TypeError):
    """A type that cannot be used: not a tensor, or a dtype that the operation does not support."""


class ModelError(LockstepError):
    """The model and the engine do not fit together."""


class ModelMismatch(ModelError):
    """Ranks hold different models. The message names the first parameter that differs."""


class UnusedParameters(ModelError):
    """Parameters took no part in the loss of the previous step. The message names them."""


class DataError(LockstepError, ValueError):
    """The loader was asked for something impossible: an empty dataset, a batch below one."""


class CheckpointError(LockstepError):
    """A checkpoint cannot be read, or does not belong to this model."""


class CheckpointNotWritten(CheckpointError, OSError):
    """Rank 0 cannot create the checkpoint folder, or write to it. Raised on every rank; only rank 0's has `errno`."""


class WorkerFailed(LockstepError):
    """A rank started by `lockstep.spawn` failed without an exception that could be passed on.

    Attributes:
        rank: the first rank that failed.
        exit_code: its exit code; 128 + signal number if a signal killed it.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.rank, self.exit_code)
