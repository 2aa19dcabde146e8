"""What loaders hand out: the samples of every batch, and the batches of all ranks for the one process.

Writes `batches` of a step (`loader` and `pass`: their numbers, `keys`, `rows`: how many samples, `time_first`, None
where nobody knows, `joins`: has rows that are parts of samples, such as nodes of graphs, `filler`, `weight`: how much
of the step its loader takes it for, or None; `indices` of the dataset or None), the fact `made` (batch sizes of
torch's loaders, in the order in which they were made), and the facts `loaders` (see `_describe`) and `passes`
(`loader`, `keys`, `trains`, `finished`, `most`: batches to hand out, `asked`: the indices of each batch, None where
they are no numbers).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

import lockstep
from lockstep.data.iteration import EpochIterator
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.shared import distributed_sampler
from lockstep.tools.verify.orders import OF_RANK_0
from lockstep.tools.verify.recorder import FEW_BATCHES, StepRecorder
from lockstep.tools.verify.rows import is_time_first, sample_keys, samples_first
from lockstep.tree import tensors_in

__all__ = ["LoaderWatch", "install"]

_PASS, _COUNTS, _ASKED = "_lockstep_pass", "_lockstep_counts", "_lockstep_asked"
_NUMBER, _AHEAD = "_lockstep_number", "_lockstep_ahead"
# Batches that are fetched, and not trained on, to come to the last one of an epoch.
_MOST_SKIPPED = 500


class LoaderWatch:
    """Watches the loaders of this process.

    Args:
        recorder: of this process.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._trains: set[int] = set()
        self._iterators: dict[int, weakref.ref[Any]] = {}  # by number of the pass
        self._depth = 0

    def number_of(self, loader: Any) -> int:
        """Of a loader, in the order in which they were made; adds it to the facts."""
        number = self._numbers.get(loader)
        if number is None:
            loaders = self._recorder.facts["loaders"]
            number = self._numbers[loader] = len(loaders)
            loaders.append(_describe(loader))
        return number

    def begin_pass(self, loader: Any, iterator: Any) -> None:
        """A new pass over a loader."""
        values, passes = vars(iterator), self._recorder.facts["passes"]
        asked = values.setdefault(_ASKED, [])
        one = {"loader": self.number_of(loader), "keys": [], "trains": False, "finished": False, "asked": asked}
        one["most"] = sys.maxsize  # batches to hand out
        one["stream"] = _length_of(iterator) is None
        one["epoch"] = getattr(distributed_sampler(loader), "epoch", None)
        values[_PASS], values[_NUMBER] = one, len(passes)
        passes.append(one)

    @contextlib.contextmanager
    def part_of_rank_0(self, loader: Any) -> Iterator[None]:
        """A context: the pass that begins is for rank 0's part of what one process has, where that is asked for."""
        (numbers,) = self._recorder.orders.get(OF_RANK_0, [[]])
        if len(self._recorder.facts["passes"]) not in numbers or not isinstance(loader, lockstep.DataLoader):
            yield
            return
        before, loader._rank_and_size = loader._rank_and_size, (0, self._recorder.settings.world_size)
        yield
        loader._rank_and_size = before

    def take_index(self, iterator: Any, index: Any) -> Any:
        """What is fetched in place of the samples that a loader has chosen; notes it."""
        values = vars(iterator)
        number = values.setdefault(_NUMBER, len(self._recorder.facts["passes"]))  # workers ask before the pass begins
        asked = values.setdefault(_ASKED, [])
        given = self._recorder.orders.get(number)
        if given is not None and len(asked) >= len(given):
            raise StopIteration
        index = index if given is None else given[len(asked)]
        is_known = isinstance(index, Sequence) and iterator._dataset_kind == _DatasetKind.Map
        asked.append(_numbers(index) if is_known else None)
        values.setdefault(_COUNTS, deque()).append(list(index) if is_known else None)
        return index

    def take_next(self, iterator: Any, take: Callable[[], Any]) -> Any:
        """The next batch of a pass, for the script; see [Note: when it ends] in recorder.py."""
        recorder, one = self._recorder, vars(iterator).get(_PASS)
        if one is None or self._depth:
            return take()
        recorder.check_time()
        trains = one["loader"] in self._trains
        if recorder.is_cut and trains:
            if one["trains"]:
                raise StopIteration
            recorder.begin_epoch()
            one["most"] = max(1, len(recorder.steps[0]["backwards"]))  # a loader may fetch one more than is trained on
        if len(one["keys"]) >= one["most"]:
            raise StopIteration
        try:
            batch = self._fetch(iterator, take)
            if trains and not recorder.is_cut and self._is_time_for_last(iterator):
                batch = self._last(iterator, one, batch, take)
        except StopIteration:
            one["finished"] = True
            if trains and not one["stream"]:
                recorder.end_whole_epoch()
            raise
        self._note(iterator, one, batch)
        if recorder.is_cut and trains:
            recorder.end()
        return batch

    def _fetch(self, iterator: Any, take: Callable[[], Any]) -> Any:
        ahead = vars(iterator).get(_AHEAD)
        if ahead:
            return ahead.popleft()
        self._depth += 1
        try:
            with self._recorder.aside():
                return take()
        finally:
            self._depth -= 1

    def _is_time_for_last(self, iterator: Any) -> bool:
        recorder = self._recorder
        is_next = len(recorder.steps) + max(1, len(recorder.optimizers)) >= recorder.settings.steps
        has_begun = any(batch["loader"] in self._trains for batch in recorder.step["batches"])
        return recorder.has_last_batch and is_next and not has_begun and not recorder.is_last_batch

    def _last(self, iterator: Any, one: dict[str, Any], batch: Any, take: Callable[[], Any]) -> Any:
        self._recorder.is_last_batch = True
        length = _length_of(iterator)
        if length is None:
            return self._look_ahead(iterator, one, batch, take)
        if self._recorder.train_whole_epochs(length):
            return batch
        self._recorder.until += 1
        # Whole windows of accumulation, so that as many batches are left over as there really are.
        last = self._recorder.steps[-1]["batches"] if self._recorder.steps else []
        window = max(1, sum(each["loader"] == one["loader"] for each in last))
        skipped = (length - len(one["keys"]) - 1) // window * window
        with contextlib.suppress(StopIteration):
            for _ in range(skipped):
                batch = self._fetch(iterator, take)
                counts = vars(iterator).get(_COUNTS)
                if counts:
                    counts.popleft()  # of the batch before
        return batch

    def _look_ahead(self, iterator: Any, one: dict[str, Any], batch: Any, take: Callable[[], Any]) -> Any:
        """How long a stream is: on each rank as it is, for ranks may have unlike numbers of batches."""
        ahead = deque([batch])
        with contextlib.suppress(StopIteration):
            while len(one["keys"]) + len(ahead) <= FEW_BATCHES:
                ahead.append(self._fetch(iterator, take))
        vars(iterator)[_AHEAD] = ahead
        self._recorder.train_whole_epochs(len(one["keys"]) + len(ahead))
        return ahead.popleft()

    def _note(self, iterator: Any, one: dict[str, Any], batch: Any) -> None:
        recorder = self._recorder
        counts = vars(iterator).get(_COUNTS)
        indices = counts.popleft() if counts else None
        share = getattr(iterator, "share", None)
        count = share.rows if share is not None and share.rows else len(indices or ())
        with recorder.aside():
            is_filler = lockstep.is_filler(batch)
            time_first = is_time_first(batch, count, recorder.settings.time_first)
            keys = sample_keys(samples_first(tensors_in(batch), count) if time_first else batch, count)
        if not is_filler:
            one["keys"].append(keys)
            one["finished"] |= len(one["keys"]) == recorder.facts["loaders"][one["loader"]]["batches"]
        if not recorder.is_cut and torch.is_grad_enabled():  # else it is evaluated
            lengths = [each.size(0) for each in tensors_in(batch) if each.ndim]
            recorder.has_last_batch = _may_come_to_last(iterator)
            recorder.begin_work()
            self._forget_looked_at(iterator, one["loader"])
            recorder.note_line("batch")
            recorder.step["batches"].append(
                {
                    "loader": one["loader"],
                    "pass": vars(iterator)[_NUMBER],
                    "keys": keys,
                    "rows": count if count and share is None else len(keys),
                    "time_first": time_first,
                    "joins": not time_first and any(length > count > 0 for length in lengths),
                    "filler": is_filler,
                    "weight": None if share is None else share.local_samples / share.global_samples,
                    "indices": _numbers(indices),
                }
            )

    def note_step(self) -> None:
        """A step was taken: its batches were to train on."""
        loaders, passes = [batch["loader"] for batch in self._recorder.step["batches"]], self._recorder.facts["passes"]
        self._trains.update(loaders)
        for number in set(loaders):
            # The latest, which may have ended before the step; none that was only looked into before.
            latest = [one for one in passes if one["loader"] == number][-1]
            if latest["stream"] and not latest["trains"]:
                self._recorder.end_whole_epoch()
            latest["trains"] = True

    def _forget_looked_at(self, iterator: Any, loader: int) -> None:
        """Leave out batches of passes that were given up before anything was computed of them."""
        step, number = self._recorder.step, vars(iterator)[_NUMBER]
        self._iterators[number] = weakref.ref(iterator)
        if step["backwards"]:
            return
        are_gone = {each for each, reference in self._iterators.items() if reference() is None}
        step["batches"] = [each for each in step["batches"] if each["loader"] != loader or each["pass"] not in are_gone]


def _numbers(indices: Sequence[Any] | None) -> list[int] | None:
    """Indices of a dataset; None where they are something else."""
    return indices if indices and all(type(index) is int for index in indices) else None  # type: ignore[return-value]


def _length_of(thing: Any) -> int | None:
    try:
        return len(thing)
    except TypeError:
        return None


def _may_come_to_last(iterator: Any) -> bool:
    length = _length_of(iterator)
    return length is None or 1 < length <= _MOST_SKIPPED


def _describe(loader: Any) -> dict[str, Any]:
    sampler = distributed_sampler(loader)
    return {
        "own": isinstance(loader, lockstep.DataLoader),
        "batch_size": getattr(loader, "batch_size", None),
        "samples": _length_of(loader.dataset),
        "batches": _length_of(loader),
        "splits": sampler is not None,
        "draws_order": not isinstance(getattr(loader, "sampler", None), SequentialSampler),
        "shuffles": bool(sampler is not None and sampler.shuffle),
        "padding": 0 if sampler is None or sampler.drop_last else sampler.total_size - len(sampler.dataset),
    }


def _init(sizes: Sequence[int | None], made: list[int | None]) -> Callable[..., Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
            if not isinstance(self, lockstep.DataLoader) and "_lockstep_made" not in vars(self):
                object.__setattr__(self, "_lockstep_made", len(made))
                asked = sizes[len(made)] if len(made) < len(sizes) else None
                own = kwargs.get("batch_sampler", args[2] if len(args) > 2 else None)
                size = batch_size if own is None else getattr(own, "batch_size", None)
                made.append(size if isinstance(size, int) else None)
                if asked is not None and own is not None:
                    with contextlib.suppress(AttributeError):
                        own.batch_size = asked
                elif asked is not None:
                    batch_size = asked
            original(self, dataset, batch_size, *args, **kwargs)

        return init

    return make


def _iterate(watch: LoaderWatch, aside: Callable[[], Any]) -> Callable[..., Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(self: Any) -> Any:
            for name in (_PASS, _COUNTS, _ASKED, _NUMBER, _AHEAD):  # workers that persist keep their iterator
                vars(getattr(self, "_iterator", None) or watch).pop(name, None)
            with aside(), watch.part_of_rank_0(self):
                iterator = original(self)
            if isinstance(iterator, EpochIterator | _BaseDataLoaderIter):
                is_inner = isinstance(self, lockstep.DataLoader) and not isinstance(iterator, EpochIterator)
                if not is_inner:
                    watch.begin_pass(self, iterator)
            return iterator

        return iterate

    return make


def install(recorder: StepRecorder) -> LoaderWatch:
    """Watch all loaders of this process from now on."""
    watch = LoaderWatch(recorder)

    def take_next(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda iterator: watch.take_next(iterator, lambda: original(iterator))

    wrap(DataLoader, "__init__", _init(recorder.settings.batch_sizes, recorder.facts["made"]))
    wrap(DataLoader, "__iter__", _iterate(watch, recorder.aside))
    wrap(lockstep.DataLoader, "__iter__", _iterate(watch, recorder.aside))
    wrap(_BaseDataLoaderIter, "__next__", take_next)
    wrap(_BaseDataLoaderIter, "_next_index", lambda original: lambda one: watch.take_index(one, original(one)))
    wrap(EpochIterator, "__next__", take_next)
    return watch
