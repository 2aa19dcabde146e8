"""How batches come to the passes of a random training program: the loops that people write around a loader.

They are those of `tests/parity/loops.py` that may stand around any pass. Each yields what one pass trains on: a list of
batches, of which there is more than one where loaders are zipped.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from training_programs import Epoch

__all__ = ["batches"]

Batches = Iterable[list[Tensor]]


def batches(
    epoch: Epoch, loader: Batches, other: Callable[[], Batches], evaluate: Callable[[], None]
) -> Iterator[list[Tensor]]:
    """What each pass of an epoch trains on.

    Args:
        epoch: which loop it is, and what it does to batches.
        loader: batches of one tensor.
        other: makes a loader of other data.
        evaluate: looks at all of `loader`, without gradients.
    """
    for found in _loop(epoch, loader, other, evaluate):
        yield [_changed(epoch.change, inputs) for inputs in found]


def _changed(change: str, inputs: Tensor) -> Tensor:
    """Another tensor of the batch's size, where there is a change: the engine knows it by its size only."""
    if change == "normalised":
        return (inputs - 0.1) / 0.7
    return inputs.clone() if change else inputs


def _loop(
    epoch: Epoch, loader: Batches, other: Callable[[], Batches], evaluate: Callable[[], None]
) -> Iterator[list[Tensor]]:
    match epoch.loop:
        case "zip":
            for (one,), (another,) in zip(loader, other(), strict=False):
                yield [one, another]
        case "interleaved":
            for first, second in zip(loader, loader, strict=True):
                yield from (second, first)
        case "inner":
            for number, batch in enumerate(loader):
                if number % 2:
                    evaluate()
                yield batch
        case "ahead":
            yield from _ahead(loader, epoch.depth)
        case "thread":
            yield from _fetched_by_a_thread(loader, epoch.depth)
        case "windows":
            iterator = iter(loader)
            while window := list(itertools.islice(iterator, epoch.depth + 1)):
                yield from window
        case "list":
            yield from reversed(list(loader))
        case "cycle":
            yield from itertools.islice(itertools.cycle(loader), 5)
        case "skipped":
            yield from (batch for number, batch in enumerate(loader) if number % 2 == 0)
        case "stopped":
            yield from itertools.islice(loader, 1)
        case "plain":
            yield from loader


def _ahead(loader: Batches, depth: int) -> Iterator[list[Tensor]]:
    waiting: list[list[Tensor]] = []
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > depth:
            yield waiting.pop(0)
    yield from waiting


def _fetched_by_a_thread(loader: Batches, depth: int) -> Iterator[list[Tensor]]:
    queued: queue.Queue[list[Tensor] | None] = queue.Queue(depth)
    is_over = threading.Event()

    def fetch() -> None:
        for batch in loader:
            queued.put(batch)
            if is_over.is_set():
                return
        queued.put(None)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    try:
        yield from iter(queued.get, None)
    finally:
        # A program may end by an error in the middle of an epoch. A thread that was left would be one from which the
        # next program of this process may call collectives, as far as the detector of deadlocks can tell.
        is_over.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                queued.get_nowait()
            thread.join(0.01)
