"""Records the samples of every batch, and gives the one process the batches of all ranks.

[Note: given streams] A stream (an IterableDataset), or a loader without a batch size, has no order or batch size that
could be set in one process. So each rank saves the batches that it trains on, unless they are too large or cannot be
saved, and one process is given these: joined, one of each rank at a time, or one after the other if it runs the
passes of all ranks.

Writes `batches` of a step (`loader` and `pass`: their numbers; `keys`; `rows`: number of samples; `time_first`: None if
unknown; `joins`: whether rows are parts of samples, such as nodes of graphs; `filler`; `weight`: its fraction of the
global batch, or None; `indices` of the dataset, or None), the facts `asked` and `made` (batch sizes of torch's loaders
in order of creation, as the script set them and as they are), `loaders` (see `_describe`), `ends` (see `_endings`) and
`passes` (`loader`; `anew`: whether it is the first over this object; `line`; `keys`; `trains`; `optimizer`: the last
that stepped with its batches; `finished`; `asked`: the indices of each batch, None if they are not integers; `endless`:
whether it has no length; `drawn`: the first batch's indices as the loader chose them, before others were given to it;
`stream` and `kept`: see [Note: given streams]; `epoch`: that of its sampler). `made` of a pass is the position of its
loader in the fact of this name.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

import lockstep
from lockstep.data.iteration import EpochIterator
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.shared import distributed_sampler
from lockstep.tools.verify.by_sample import fetch_by_sample
from lockstep.tools.verify.recorder import FEW_BATCHES, StepRecorder, line_of_script
from lockstep.tools.verify.rows import PADDING, is_time_first, joins, sample_keys, samples_first
from lockstep.tools.verify.settings import IN_TURN, OF_RANK_0, RANKS, Orders
from lockstep.torch_private.trees import tree_flatten, tree_unflatten
from lockstep.tree import tensors_in

__all__ = ["LoaderWatch"]

_PASS, _MADE = "_lockstep_pass", "_lockstep_made"
# Number of batches fetched without training on them to reach the last one of an epoch.
_MOST_SKIPPED = 500
# Number of batches that a training loop may fetch before it uses them.
_MOST_AHEAD = 4
# Total size of the batches of streams that a rank saves for the one process.
_MOST_BYTES_KEPT = 1 << 30


@dataclass
class _Pass:
    """One pass over a loader, kept with its iterator.

    Attributes:
        number: number among all passes, from 0.
        asked, drawn: see the facts, which share them.
        facts: its entry in `passes`; empty before it begins, when its workers already request samples.
        most: number of batches to yield.
        fetching: requested indices of each batch that has not been yielded yet.
        has_own_batches: whether one process could not get the batches of N ranks by another batch size or order.
        given: number of batches that came from the ranks.
        ahead: batches fetched to find out how many there are.
    """

    number: int
    asked: list[list[int] | None] = field(default_factory=list)
    drawn: list[list[int] | None] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    most: int = sys.maxsize
    fetching: deque[list[Any] | None] = field(default_factory=deque)
    ahead: deque[Any] = field(default_factory=deque)
    has_own_batches: bool = False
    given: int = 0


class LoaderWatch:
    """Watches the loaders of this process.

    Args:
        recorder: recorder of this process.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._passes = recorder.facts["passes"]
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._trains: set[int] = set()
        self._iterators: dict[int, weakref.ref[Any]] = {}  # by number of the pass
        self._ended: set[int] = set()  # passes that were iterated to the end
        self._depth = self._bytes_kept = 0
        orders = recorder.settings.file("orders")
        is_given = recorder.settings.is_reference and orders.exists()
        self._orders: Orders = torch.load(orders, weights_only=True) if is_given else {}

    def install(self) -> None:
        """Watch from now on."""
        wrap(DataLoader, "__init__", self._init)
        wrap(DataLoader, "__iter__", self._iterate)
        wrap(lockstep.DataLoader, "__iter__", self._iterate)
        wrap(_BaseDataLoaderIter, "__next__", self._next)
        wrap(_BaseDataLoaderIter, "_next_index", self._next_index)
        wrap(EpochIterator, "__next__", self._next)
        if self._recorder.settings.by_sample:
            wrap(_MapDatasetFetcher, "fetch", fetch_by_sample)

    def note_step(self) -> None:
        """Note that a step was taken, so that its batches were for training."""
        numbers = {batch["loader"] for batch in self._recorder.step["batches"]}
        self._trains |= numbers
        for number in numbers:
            # The latest pass, which may have ended before the step; earlier ones may only have shown a batch.
            latest = [one for one in self._passes if one["loader"] == number][-1]
            if latest["endless"] and not latest["trains"]:
                self._recorder.end_whole_epoch()
            latest["trains"] = True
            latest["optimizer"] = self._recorder.step["optimizer"]

    # ---- a pass --------------------------------------------------------------------------------------

    def _init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Constructor of torch's loader, with the batch size for the one process."""
        facts, sizes = self._recorder.facts, self._recorder.settings.batch_sizes
        made = facts["made"]

        def init(loader: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
            if not isinstance(loader, lockstep.DataLoader) and _MADE not in vars(loader):
                object.__setattr__(loader, _MADE, len(made))
                asked = sizes[len(made)] if len(made) < len(sizes) else None
                own = kwargs.get("batch_sampler", args[2] if len(args) > 2 else None)
                size = batch_size if own is None else getattr(own, "batch_size", None)
                facts["asked"].append(size if isinstance(size, int) else None)
                made.append(asked or facts["asked"][-1])
                if asked is not None and own is not None:
                    with contextlib.suppress(AttributeError):
                        own.batch_size = asked
                elif asked is not None:
                    batch_size = asked
            original(loader, dataset, batch_size, *args, **kwargs)

        return init

    def _iterate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(loader: Any) -> Any:
            persistent = getattr(loader, "_iterator", None)
            if persistent is not None:  # persistent workers keep their iterator
                vars(persistent).pop(_PASS, None)
            with self._recorder.aside(), self._part_of_rank_0(loader):
                iterator = original(loader)
            is_inner = isinstance(loader, lockstep.DataLoader) and not isinstance(iterator, EpochIterator)
            if isinstance(iterator, EpochIterator | _BaseDataLoaderIter) and not is_inner:
                self._begin_pass(loader, iterator)
            return iterator

        return iterate

    @contextlib.contextmanager
    def _part_of_rank_0(self, loader: Any) -> Iterator[None]:
        """Context manager within which a new pass yields only rank 0's part, if requested."""
        (numbers,) = self._orders.get(OF_RANK_0, [[]])
        if len(self._passes) not in numbers or not isinstance(loader, lockstep.DataLoader):
            yield
            return
        before, loader._rank_and_size = loader._rank_and_size, (0, self._recorder.settings.world_size)
        yield
        loader._rank_and_size = before

    def _pass_of(self, iterator: Any) -> _Pass:
        one: _Pass = vars(iterator).setdefault(_PASS, _Pass(len(self._passes)))
        return one

    def _begin_pass(self, loader: Any, iterator: Any) -> None:
        is_new = loader not in self._numbers
        one = self._pass_of(iterator)
        one.number = len(self._passes)
        if isinstance(iterator, _BaseDataLoaderIter):
            is_stream = iterator._dataset_kind == _DatasetKind.Iterable
            one.has_own_batches = is_stream or self._recorder.facts["made"][vars(loader)[_MADE]] is None
        one.facts = {
            "loader": self._number_of(loader),
            "anew": is_new,
            "line": line_of_script(),
            "optimizer": None,
            "keys": [],
            "trains": False,
            "finished": False,
            "asked": one.asked,
            "drawn": one.drawn,
            "endless": _length_of(iterator) is None,
            "made": vars(loader).get(_MADE),
            "stream": one.has_own_batches,
            "kept": True,
            "epoch": getattr(distributed_sampler(loader), "epoch", None),
        }
        self._passes.append(one.facts)

    def _number_of(self, loader: Any) -> int:
        """A loader's number; scripts may recreate it for each epoch, so it gets that of an equal one that was freed."""
        if loader not in self._numbers:
            loaders, described = self._recorder.facts["loaders"], _describe(loader)
            gc.collect()
            kept = set(self._numbers.values())
            gone = [number for number, each in enumerate(loaders) if each == described and number not in kept]
            self._numbers[loader] = gone[-1] if gone else len(loaders)
            loaders += [] if gone else [described]
        return self._numbers[loader]

    def _next_index(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Replaces the samples that a loader has chosen, if requested."""

        def next_index(iterator: Any) -> Any:
            one = self._pass_of(iterator)
            given = self._orders.get(one.number)
            if given is not None and len(one.asked) >= len(given):
                raise StopIteration
            try:
                index = original(iterator)
            except StopIteration:
                if given is None:
                    raise
                index = None  # a last batch that is only padded on ranks
            is_map = iterator._dataset_kind == _DatasetKind.Map
            if not one.drawn:
                one.drawn.append(_numbers(index) if isinstance(index, Sequence) and is_map else None)
            if given is not None:
                index = given[len(one.asked)]
            is_known = isinstance(index, Sequence) and is_map
            one.asked.append(_numbers(index) if is_known else None)
            one.fetching.append(list(index) if is_known else None)
            return index

        return next_index

    def _next(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def take_next(iterator: Any) -> Any:
            one: _Pass | None = vars(iterator).get(_PASS)
            if one is None or not one.facts or self._depth:
                return original(iterator)
            return self._take(iterator, one, lambda: self._fetch(one, iterator, original))

        return take_next

    def _fetch(self, one: _Pass, iterator: Any, original: Callable[[Any], Any]) -> Any:
        if one.ahead:
            return one.ahead.popleft()
        if self._recorder.settings.streams and one.has_own_batches and torch.is_grad_enabled():
            return self._batch_of_ranks(one)
        self._depth += 1
        try:
            with self._recorder.aside():
                return original(iterator)
        finally:
            self._depth -= 1

    def _batch_of_ranks(self, one: _Pass) -> Any:
        """The next batch from the ranks' streams for the one process; see [Note: given streams]."""
        settings = self._recorder.settings
        number, rank = divmod(one.given, settings.world_size) if settings.streams == IN_TURN else (one.given, None)
        ranks = range(settings.world_size) if rank is None else [rank]
        files = [settings.file("stream", one.number, number, each) for each in ranks]
        if not all(file.exists() for file in files):
            raise StopIteration
        one.given += 1
        # Trusted, as ranks of the same script wrote them.
        batches = [torch.load(file, weights_only=False) for file in files]
        return batches[0] if rank is not None else _joined(batches, 1 if settings.time_first else 0)

    def _take(self, iterator: Any, one: _Pass, fetch: Callable[[], Any]) -> Any:
        """The next batch of a pass, for the script; see [Note: when it ends] in recorder.py."""
        recorder, facts = self._recorder, one.facts
        recorder.check_time()
        trains = facts["loader"] in self._trains
        if recorder.is_cut and trains:
            if facts["trains"]:
                raise StopIteration
            recorder.begin_epoch()
            one.most = max(1, len(recorder.steps[0]["backwards"]))  # a loader may fetch one more than is trained on
        if len(facts["keys"]) >= one.most:
            raise StopIteration
        try:
            batch = fetch()
            if trains and not recorder.is_cut and self._is_time_for_last():
                batch = self._last(one, batch, _length_of(iterator), fetch)
        except StopIteration:
            facts["finished"] = True
            self._ended.add(one.number)
            recorder.note_progress(one.number)
            if trains and not facts["endless"]:
                recorder.end_whole_epoch()
            raise
        self._note(iterator, one, batch)
        if recorder.is_cut and trains:
            recorder.end()
        return batch

    # ---- the last batch ------------------------------------------------------------------------------

    def _is_time_for_last(self) -> bool:
        recorder = self._recorder
        is_next = len(recorder.steps) + max(1, len(recorder.optimizers)) >= recorder.settings.steps
        has_begun = any(batch["loader"] in self._trains for batch in recorder.step["batches"])
        return recorder.has_last_batch and is_next and not has_begun and not recorder.is_last_batch

    def _last(self, one: _Pass, batch: Any, length: int | None, fetch: Callable[[], Any]) -> Any:
        """The batch to train on next: the last one of the epoch, or the current one if whole epochs are trained."""
        recorder, taken = self._recorder, len(one.facts["keys"])
        recorder.is_last_batch = True
        if length is None:
            # Fetch ahead to find the stream's length, on each rank, as ranks may have different numbers of batches.
            ahead = deque([batch])
            with contextlib.suppress(StopIteration):
                while taken + len(ahead) <= FEW_BATCHES:
                    ahead.append(fetch())
            one.ahead = ahead
            recorder.train_whole_epochs(taken + len(ahead))
            return ahead.popleft()
        if recorder.train_whole_epochs(length):
            return batch
        recorder.until += 1
        # Skip whole accumulation windows, so that as many batches remain as without skipping.
        last = recorder.steps[-1]["batches"] if recorder.steps else []
        window = max(1, sum(each["loader"] == one.facts["loader"] for each in last))
        kept = deque([batch])  # those of a window, as the loader may end earlier than it says
        with contextlib.suppress(StopIteration):
            for _ in range((length - taken - 1) // window * window):
                following = fetch()
                if len(kept) == window:
                    for _ in range(min(window, len(one.fetching))):
                        one.fetching.popleft()
                    kept.clear()
                kept.append(following)
        one.ahead.extend(kept)
        return one.ahead.popleft()

    # ---- a batch -------------------------------------------------------------------------------------

    def _note(self, iterator: Any, one: _Pass, batch: Any) -> None:
        recorder, facts, share = self._recorder, one.facts, getattr(iterator, "share", None)
        indices = one.fetching.popleft() if one.fetching else None
        count = share.rows if share is not None and share.rows else len(indices or ())
        with recorder.aside():
            is_filler = lockstep.is_filler(batch)
            time_first = is_time_first(batch, count, recorder.settings.time_first)
            samples = samples_first(tensors_in(batch), count) if time_first else batch
            keys = sample_keys(samples, count, recorder.settings.padding)
            recorder.facts["ends"] += _endings(samples)
        if not is_filler:
            facts["keys"].append(keys)
            facts["finished"] |= len(facts["keys"]) == recorder.facts["loaders"][facts["loader"]]["batches"]
        recorder.note_progress(one.number)
        if recorder.is_cut or not torch.is_grad_enabled():  # without gradients, the batch is for evaluation
            return
        recorder.has_last_batch = _may_come_to_last(iterator)
        recorder.begin_batch()
        self._iterators[one.number] = weakref.ref(iterator)
        self._forget_looked_at(facts["loader"])
        recorder.note_line("batch")
        self._keep(one, batch)
        recorder.step["batches"].append(
            {
                "loader": facts["loader"],
                "pass": one.number,
                "keys": keys,
                "rows": count if count and share is None else len(keys),
                "time_first": time_first,
                "joins": not time_first and count > 0 and joins(batch, count),
                "filler": is_filler,
                "weight": None if share is None else share.local_samples / share.global_samples,
                "indices": _numbers(indices),
            }
        )

    def _keep(self, one: _Pass, batch: Any) -> None:
        """Save a batch of a stream for the one process; see [Note: given streams]."""
        if not one.has_own_batches or self._recorder.settings.role != RANKS:
            return
        path = self._recorder.settings.file("stream", one.number, len(one.facts["keys"]) - 1, self._recorder.rank)
        try:
            with self._recorder.aside():
                torch.save(batch, path)
            self._bytes_kept += path.stat().st_size
        except Exception:  # a batch may hold anything
            one.facts["kept"] = False
        one.facts["kept"] &= self._bytes_kept <= _MOST_BYTES_KEPT

    def _forget_looked_at(self, loader: int) -> None:
        """Drop batches of passes that were abandoned before anything was computed from them, or that evaluated.

        The latter were iterated to the end without a backward pass; some scripts turn gradients off for each batch, and
        Ignite takes the last batch without asking for more.
        """
        step = self._recorder.step
        used = 1 + max((each["batch"] for each in step["backwards"]), default=-1)
        gone = {each for each, reference in self._iterators.items() if reference() is None}
        unused = Counter(each["pass"] for each in step["batches"][used:] if each["loader"] != loader)
        self._ended |= {
            each for each, count in unused.items() if count > _MOST_AHEAD and self._passes[each]["finished"]
        }
        self._recorder.forget_batches(
            {
                place
                for place, each in enumerate(step["batches"])
                if place >= used
                and (each["pass"] in self._ended or (each["loader"] == loader and each["pass"] in gone))
            }
        )


def _endings(batch: Any) -> Iterator[tuple[int, int, int]]:
    """(position, width, last number) for rows of tables whose last two numbers are an equal integer, as if padded."""
    for place, table in enumerate(tensors_in(batch)):
        is_numeric = table.dtype is torch.int64 or table.is_floating_point()
        if is_numeric and not table.is_nested and table.layout is torch.strided and table.ndim == 2:
            ends = table[table[:, -1:].eq(table[:, -2:]).all(1), -1:].flatten().tolist()
            yield from ((place, table.size(1), int(end)) for end in ends if end not in PADDING and end % 1 == 0)


def _numbers(indices: Sequence[Any] | None) -> list[int] | None:
    """Indices of a dataset if they are integers, else None."""
    return indices if indices and all(type(index) is int for index in indices) else None  # type: ignore[return-value]


def _length_of(thing: Any) -> int | None:
    try:
        return len(thing)
    except TypeError:
        return None


def _joined(batches: Sequence[Any], dim: int) -> Any:
    """Concatenate batches of one structure; raises ValueError if they hold other than tensors and equal values."""
    batches = [each for each in batches if each is not None] or batches[:1]  # None from a rank without samples
    flat, specs = zip(*map(tree_flatten, batches), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ValueError("lockstep verify: the ranks' batches have different structures")
    leaves = []
    for column in zip(*flat, strict=True):
        if isinstance(column[0], torch.Tensor):
            leaves.append(torch.cat(column, dim))
        elif all(each == column[0] for each in column):
            leaves.append(column[0])
        else:
            raise ValueError(f"lockstep verify: the ranks' batches hold other things than tensors: {column[0]!r}")
    return tree_unflatten(leaves, specs[0])


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
        "shuffles": bool(loader.shuffle if isinstance(loader, lockstep.DataLoader) else sampler and sampler.shuffle),
    }
