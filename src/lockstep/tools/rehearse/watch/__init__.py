"""What a rehearsal notices while a script runs. Each watcher says in its docstring which events it notes.

General layout:

* `recorder`: collects events and writes them down before the process ends.
* `environment`: which rank and device the process takes itself for; `children`: processes that it starts.
* `passes`: passes over data; `contents`: a number for the samples of a pass; `randomness`: what data sets draw.
* `training`: optimizers, schedulers, scalers and clipping.
* `collectives`: collectives and the use of their results; `horovod`: those of Horovod.
* `files`: checkpoints; `older_torch`: calls that today's torch turns away.
"""

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
        older_torch,
        passes,
        randomness,
        training,
    )
    from lockstep.tools.rehearse.watch.recorder import recorder

    recorder.install()
    for watcher in (passes, training, collectives, files, environment, randomness, older_torch, children):
        watcher.install()
    if with_horovod:
        from lockstep.tools.rehearse.watch import horovod

        horovod.install()
