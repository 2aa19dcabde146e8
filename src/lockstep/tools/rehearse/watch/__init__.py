"""What a rehearsal notices while a script runs. Each watcher says in its docstring which events it notes."""

from __future__ import annotations

__all__ = ["install"]


def install(*, with_horovod: bool) -> None:
    """Watch this process from now on, and leave its record in the job's private folder. Once.

    Args:
        with_horovod: the script is one for Horovod.
    """
    from lockstep.tools.rehearse.watch import (
        children,
        collectives,
        environment,
        files,
        losses,
        older_torch,
        passes,
        randomness,
        training,
    )
    from lockstep.tools.rehearse.watch.recorder import recorder

    recorder.install()
    for watcher in (passes, losses, training, collectives, files, environment, randomness, older_torch, children):
        watcher.install()
    if with_horovod:
        from lockstep.tools.rehearse.watch import horovod

        horovod.install()
