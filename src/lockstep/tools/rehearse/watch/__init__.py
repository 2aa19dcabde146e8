"""Watches a script while it runs. Each watcher's docstring lists the events that it records.

General layout:

* `recorder`: collects events and writes them to a file before the process ends.
* `environment`: how the script determines rank and device; `children`: processes that it starts.
* `passes`: passes over data; `contents`: a hash of a pass's samples; `randomness`: random draws of data sets.
* `training`: optimizers, schedulers, scalers and clipping.
* `collectives`: collectives and the use of their results; `horovod`: those of Horovod.
* `files`: checkpoints; `older_torch`: calls that current torch rejects.
"""

from __future__ import annotations

__all__ = ["install"]


def install(*, with_horovod: bool) -> None:
    """Watch this process from now on, and write its record to the job's private folder. Call it once.

    Args:
        with_horovod: whether the script uses Lockstep's shim for Horovod.
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
