"""Random numbers that data sets draw for augmentation, to see whether ranks draw the same ones.

Records `draw` for a data set's first batches in each process: `library` whose global generator was used, `state` (hash
of its state before the batch), `worker` (-1 for none), `number` of the batch; the sites are those that created the
loader.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils import fetch

from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.rehearse.watch.passes import loader_of_data
from lockstep.tools.rehearse.watch.recorder import recorder

__all__ = ["install"]

# Each costs six hashes; so many are enough.
_MAX_BATCHES = 3

_counts: dict[int, int] = {}


def _states() -> dict[str, str]:
    """Library -> hash of its global generator's state."""
    states: dict[str, bytes] = {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "random": repr(random.getstate()).encode(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, *rest = numpy.random.get_state()
        states["numpy.random"] = keys.tobytes() + repr((kind, position, rest)).encode()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def _fetch(original: Callable[..., Any]) -> Callable[..., Any]:
    def fetch_batch(self: Any, possibly_batched_index: Any) -> Any:
        number = _counts.get(id(self.dataset), 0)
        if number >= _MAX_BATCHES:
            return original(self, possibly_batched_index)
        _counts[id(self.dataset)] = number + 1
        before = _states()
        batch = original(self, possibly_batched_index)
        after = _states()
        worker = torch.utils.data.get_worker_info()
        for library, state in before.items():
            if after[library] != state:
                recorder.note(
                    "draw",
                    loader_of_data.get(id(self.dataset), ()),
                    library=library,
                    state=state,
                    worker=-1 if worker is None else worker.id,
                    number=number,
                )
        if worker is not None:
            recorder.write_now()  # Workers end without running exit handlers.
        return batch

    return fetch_batch


def install() -> None:
    """Watch how batches are created."""
    wrap(fetch._MapDatasetFetcher, "fetch", _fetch)
