"""What this rank holds of the global batch: the one fact that loader, engine and metrics share.

`lockstep.DataLoader` publishes a `BatchShare` with every batch it yields and clears it when
its iteration ends. The engine reads it in the forward pass to weight gradients, metrics read
it to weight values. Outside a loader there is none, and everybody averages plainly over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchShare", "clear", "current", "publish"]


@dataclass(frozen=True)
class BatchShare:
    """How many samples of one global batch this rank holds.

    Attributes:
        local_samples: samples of this rank; 0 when the batch it got is a filler.
        global_samples: samples of all ranks together; at least 1.
        world_size: number of ranks that share the batch.
    """

    local_samples: int
    global_samples: int
    world_size: int

    @property
    def weight(self) -> float:
        """This rank's share relative to an even one: 1.0 when the batch divides evenly.

        The mean over ranks of `weight * mean over the rank's samples` is the mean over
        the global batch.
        """
        return self.local_samples * self.world_size / self.global_samples


_current: BatchShare | None = None


def publish(share: BatchShare) -> None:
    """Make `share` the current one. Local; the loader calls it as it yields a batch."""
    global _current
    _current = share


def clear() -> None:
    """Forget the current share. Local; the loader calls it when its iteration ends."""
    global _current
    _current = None


def current() -> BatchShare | None:
    """The share of the batch yielded last, or None outside a loader."""
    return _current
