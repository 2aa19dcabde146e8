"""What `DataLoader` says when it is asked for the impossible; and which rank it is for.

Each check returns the value it accepts, or raises `DataError` with what was given, what was expected and what to do.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset

from lockstep import env, log
from lockstep.errors import DataError
from lockstep.world import current_world

__all__ = [
    "STATE_VERSION",
    "check_batch_sampler",
    "check_dataset",
    "check_flags",
    "check_integer",
    "check_own_batches",
    "check_permutation",
    "check_rank_and_size",
    "check_refused",
    "check_same_order",
    "check_sampler",
    "check_state",
    "check_workers",
    "find_rank_and_size",
    "is_fixed",
]

STATE_VERSION = 1
_OF_ONE_RANK = (
    ". If its order matters (by length, by class, with repeated samples), create it for one rank, with "
    "num_replicas=1 and rank=0, and the loader splits that; or pass the sampler for one process, such as "
    "LengthGroupedSampler instead of DistributedLengthGroupedSampler"
)

# How samplers name the number of ranks among which they share out their indices, and the rank; also with an underscore
# before: torch, timm, transformers; OpenMMLab, lhotse, detectron2, YOLOX; Megatron-LM.
_NAMES_OF_RANKS = (("num_replicas", "rank"), ("world_size", "rank"), ("data_parallel_size", "data_parallel_rank"))
_STATE_KEYS = ("seed", "epoch", "samples_consumed", "dataset_length")


def check_integer(name: str, value: object, minimum: int, hint: str = "") -> int:
    """An integer (Python's or numpy's, no bool) of at least `minimum`, as a Python int."""
    advice = f". {hint}" if hint else ""
    if isinstance(value, float) and value.is_integer():
        raise DataError(f"{name} is {value!r}, a float; expected an integer: pass {name}={int(value)}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_):
        raise DataError(f"{name} is {value!r} ({type(value).__name__}); expected an integer{advice}") from None
    if number < minimum:
        raise DataError(f"{name} is {number}; expected at least {minimum}{advice}")
    return number


def check_rank_and_size(rank: object, world_size: object) -> tuple[int, int] | None:
    """Explicit rank and world size; None where neither was given."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise DataError(f"{given} was given without {missing}. Pass both, or neither to use the open world")
    size = check_integer("world_size", world_size, 1)
    number = check_integer("rank", rank, 0)
    if number >= size:
        raise DataError(f"rank is {number}, but world_size is {size}: expected 0 … {size - 1}")
    return number, size


def find_rank_and_size() -> tuple[int, int]:
    """Rank and world size of the open world, else of torch's default group, else of one process."""
    world = current_world()
    if world is not None:
        return world.rank, world.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = env.WORLD_SIZE.get()
    if launched is not None and launched > 1:
        log.warn_once(
            log.get_logger(__name__),
            f"DataLoader: WORLD_SIZE is {launched}, but no process group is open, so this process reads all the data. "
            "Call lockstep.init() before iterating, or pass rank and world_size",
        )
    return 0, 1


def check_dataset(dataset: Any) -> int:
    """A map-style dataset with at least one sample; returns its length."""
    name = type(dataset).__name__
    if not isinstance(dataset, Iterable) and not hasattr(type(dataset), "__getitem__"):
        raise DataError(f"dataset is {dataset!r} ({name}); expected an object with __getitem__(index) and __len__")
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
        raise DataError(
            f"dataset {name} is iterable-style: it yields samples in its own order, so the loader cannot assign them "
            "to ranks, shuffle them by seed or resume within an epoch. Give it __getitem__(index) and __len__, or "
            "pass list(dataset) if it fits in memory; else split the stream by rank in the dataset, use "
            "torch.utils.data.DataLoader, and end on all ranks with lockstep.any ('Iterable data' in "
            "docs/same-answer.md)"
        )
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise DataError(
            f"dataset {name} has no length, from which batches are planned ahead. Give it __len__"
        ) from None
    if length < 1:
        raise DataError(f"dataset {name} is empty: expected at least one sample. Check its path and its filters")
    return length


def check_sampler(sampler: Any, shuffle: bool, world_size: object) -> None:
    """A sampler that gives the global order of an epoch; for a loader of `world_size` 1 it may give a rank's part."""
    if sampler is None:
        return
    name = type(sampler).__name__
    if shuffle:
        raise DataError(f"shuffle=True and sampler {name} both set the order. Drop one of the two")
    if _num_ranks_of(sampler) > 1 and world_size != 1:
        to_keep = ". To keep its order, pass num_replicas=1 and rank=0 to it: the loader splits that"
        raise DataError(
            f"sampler {name} already gives each rank its own part. The loader splits the global order itself, without "
            "padding. Drop the sampler and pass shuffle=True and the global "
            f"batch_size{to_keep if type(sampler) is DistributedSampler else _OF_ONE_RANK}"
        )
    if not isinstance(sampler, Iterable) or not isinstance(sampler, Sized):
        raise DataError(
            f"sampler {name} must be iterable and have a length: the batches of an epoch are planned ahead. "
            "Give it __iter__ and __len__, or pass a list of indices"
        )
    if len(sampler) < 1:
        raise DataError(f"sampler {name} is empty: expected at least one index")


def _num_ranks_of(sampler: object) -> int:
    """Among how many ranks a sampler shares out its indices; 1 where its attributes tell of no others."""
    for (size_name, rank_name), prefix in itertools.product(_NAMES_OF_RANKS, ("", "_")):
        with contextlib.suppress(Exception):  # a property may ask a group that is not there
            size, rank = getattr(sampler, prefix + size_name), getattr(sampler, prefix + rank_name)
            if all(isinstance(each, int | np.integer) for each in (size, rank)) and size > 1:
                return int(size)
    return 1


def check_batch_sampler(batch_sampler: Any, is_cut_already: bool, world_size: object) -> None:
    """A batch sampler that makes global batches, and no batch_size, shuffle, sampler or drop_last beside it."""
    if batch_sampler is None:
        return
    name = type(batch_sampler).__name__
    if is_cut_already:
        raise DataError(
            f"batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last: {name} "
            "makes the batches. Drop one or the other"
        )
    makers = (batch_sampler, getattr(batch_sampler, "sampler", None)) if world_size != 1 else ()
    if any(_num_ranks_of(each) > 1 for each in makers):
        raise DataError(
            f"batch_sampler {name} already makes the batches of one rank. The loader splits global batches itself. "
            "Create it for one process, with num_replicas=1 and rank=0, or without its per-rank sampler, and with "
            "the global batch size"
        )
    if not isinstance(batch_sampler, Iterable) or isinstance(batch_sampler, Iterator):
        raise DataError(
            f"batch_sampler {name} cannot be iterated again in each epoch. Pass a list of batches, or an object whose "
            "__iter__ starts with the first batch each time"
        )
    with contextlib.suppress(TypeError, NotImplementedError):  # it need not have a length
        if len(cast("Sized", batch_sampler)) < 1:
            raise DataError(f"batch_sampler {name} is empty: expected at least one batch")


def check_own_batches(batch_sampler: object, own: object) -> None:
    """The loader's batches come from its own `batch_sampler`: each belongs to one place of one epoch."""
    if batch_sampler is not own:
        raise DataError(
            f"the loader's batch_sampler was replaced by a {type(batch_sampler).__name__}. If that repeats batches to "
            "keep worker processes between epochs (timm's MultiEpochsDataLoader, ultralytics' InfiniteDataLoader), "
            "use lockstep.DataLoader itself with persistent_workers=True: it keeps them, and each iteration is the "
            "next epoch. For your own batches, create a loader with that batch_sampler"
        )


def is_fixed(what: str, name: str, value: object) -> DataError:
    """The error for assigning `value` to an attribute that stays as the loader's argument `name` made it."""
    shown = value if isinstance(value, int | float | str | None) else f"<{type(value).__name__}>"
    return DataError(
        f"loader.{what} = {shown}: what a loader makes its batches from cannot be changed. Create a new loader, and "
        f"load the state of this one: new = lockstep.DataLoader(dataset, …, {name}={shown}); "
        "new.load_state_dict(loader.state_dict()). It resumes where this one is; after an epoch, with the next one"
    )


def check_same_order(mark: int, now: int, sampler: object, epoch: int) -> None:
    """The order of a resumed epoch, of mark `now`, is that of its state, whose `mark` is 0 where it is not known."""
    if mark not in (0, now):
        raise DataError(
            f"sampler {type(sampler).__name__} gives epoch {epoch} a different order from when the loader's state was "
            "saved, so some samples would come twice and others not at all. If it uses its own generator, drop that: "
            "the loader seeds the global ones. If the script calls its set_epoch, it must do so first"
        )


def check_permutation(permutation: object, shuffle: bool) -> str:
    """How a shuffled order is made."""
    if permutation not in ("stored", "computed"):
        raise DataError(f"permutation is {permutation!r}; expected 'stored' or 'computed'")
    if permutation == "computed" and not shuffle:
        raise DataError("permutation='computed' is a way to shuffle, but shuffle is False. Pass shuffle=True")
    return str(permutation)


def check_refused(generator: object, in_order: bool) -> None:
    """Arguments of torch's loader that contradict what this one promises."""
    if generator is not None:
        raise DataError(
            "generator is not supported: its state would differ between ranks, but the order of samples may only "
            "depend on seed and epoch. Pass an integer instead, such as seed=generator.initial_seed()"
        )
    if not in_order:
        raise DataError(
            "in_order=False is not supported: ranks would train on parts of different global batches. Raise "
            "prefetch_factor if some samples are slow"
        )


def check_flags(**flags: object) -> None:
    """No text, such as "False" from a command line, which is true."""
    for name, flag in flags.items():
        if isinstance(flag, str):
            raise DataError(f"{name} is {flag!r}, a text; expected True or False")


def check_workers(num_workers: object, prefetch_factor: object, timeout: float) -> int:
    """What torch does not refuse in words of the options of worker processes; returns their number per rank."""
    count = check_integer("num_workers", num_workers, 0, "0 loads in the training process")
    if prefetch_factor is not None:
        check_integer("prefetch_factor", prefetch_factor, 1)
    if timeout > 0 and count == 0:
        raise DataError("timeout needs worker processes, but num_workers is 0. Pass num_workers, or drop it")
    return count


def check_state(
    state: Mapping[str, Any], order: str, dataset_length: int, samples_per_epoch: int | None
) -> dict[str, int]:
    """A state that `DataLoader.state_dict` made for the same data; returns its numbers."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != STATE_VERSION:
        raise DataError(
            f"the loader's state has version {version!r}; this release reads version {STATE_VERSION}. "
            "Pass what DataLoader.state_dict() returned"
        )
    missing = [key for key in (*_STATE_KEYS, "samples_per_epoch", "order") if key not in state]
    if missing:
        raise DataError(f"the loader's state lacks {', '.join(missing)}. Pass the result of DataLoader.state_dict()")
    least = {"seed": -(2**63)}
    numbers = {key: check_integer(f"state[{key!r}]", state[key], least.get(key, 0)) for key in _STATE_KEYS}
    for key, here in (("dataset_length", dataset_length), ("samples_per_epoch", samples_per_epoch), ("order", order)):
        if state[key] != here:
            raise DataError(
                f"the loader's state does not fit: its {key} is {state[key]!r}, here it is {here!r}. It counts "
                "samples in the order of one dataset. Resume with the same data and the same order, or restart the "
                "epoch with set_epoch"
            )
    if samples_per_epoch is not None and numbers["samples_consumed"] > samples_per_epoch:
        raise DataError(
            f"the loader's state claims {numbers['samples_consumed']} samples consumed of {samples_per_epoch}"
        )
    return numbers
