"""Passes over data: which loader the script reads from, how many samples, and whether it trains meanwhile.

Records `pass` for every pass over a `torch.utils.data.DataLoader`: `number` (among the loader's passes), `epoch`,
`shuffles`, `was_told` (whether the sampler's `set_epoch` was ever called), `padding` (samples that the sampler adds),
`length` (of the data set), `samples` (0 if unknown), `backwards` and `trained` (backward passes and optimizer steps
meanwhile), `finished`, `content` (see `contents`; only for passes that evaluate a model which all ranks train
together); and where loader and sampler were created.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.rehearse.sites import chain
from lockstep.tools.rehearse.watch.contents import Contents
from lockstep.tools.rehearse.watch.recorder import recorder
from lockstep.tools.shared import distributed_sampler

__all__ = ["Pass", "add_model", "current", "install", "loader_of_data", "made_at", "on_batch"]

_MADE = "_lockstep_made_at"
_TOLD = "_lockstep_was_told"
_SIZES = "_lockstep_sizes"


class Pass:
    """One pass over a loader.

    Attributes:
        loader: the loader that it reads from.
        sites: the lines at which the pass began.
        number: 0 for the loader's first pass.
        samples: number of samples read so far; 0 if unknown.
        last_size: samples in the last batch; 0 if unknown.
        backwards: backward passes meanwhile.
        steps: optimizer steps meanwhile.
        is_finished: whether the loader is exhausted.
        contents: hash of the samples; None after a batch that may have been for training.
    """

    def __init__(self, loader: Any, sites: tuple[Site, ...], number: int) -> None:
        self.loader = loader
        self.sites = sites
        self.number = number
        self.samples = self.last_size = self.backwards = self.steps = 0
        self.is_finished = False
        self.contents: Contents | None = Contents()
        self.sampler = distributed_sampler(loader)
        self.epoch = None if self.sampler is None else self.sampler.epoch

    def take(self, batch: Any, size: int) -> None:
        """Count a batch of `size` samples; 0 if unknown."""
        self.last_size = size
        self.samples += size
        if self.contents is not None:
            if _evaluates():
                self.contents.add(batch, self.last_size)
            else:
                self.contents = None


_current: Pass | None = None  # the pass that yielded the last batch
_listeners: list[Callable[[], None]] = []
_passes: list[Pass] = []
_is_trained = False  # whether there is a model that all ranks train together
_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # such models, as far as known
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# Id of a data set -> where its loader was created, for workers, which have no loader.
loader_of_data: dict[int, tuple[Site, ...]] = {}


def current() -> Pass | None:
    """The pass that the script is in or has just finished."""
    return _current


def add_model(model: torch.nn.Module | None) -> None:
    """Register a model that all ranks train together on different samples; None if it is unknown which."""
    global _is_trained
    _is_trained = True
    if model is not None:
        _models.add(model)


def _evaluates() -> bool:
    """Whether the script evaluates its next batch: gradients are disabled, or a model is in evaluation mode."""
    is_said = any(not model.training for model in _models)
    return _is_trained and (is_said or not torch.is_grad_enabled())


def made_at(thing: Any) -> tuple[Site, ...]:
    """The lines that created a loader or sampler, innermost first."""
    return getattr(thing, _MADE, ())


def _remember_maker(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, _MADE):
            object.__setattr__(self, _MADE, chain())
        original(self, *args, **kwargs)

    return init


def _begin(original: Callable[..., Any]) -> Callable[..., Any]:
    def iterate(self: Any) -> Any:
        loader_of_data[id(self.dataset)] = made_at(self)
        number = _counts.get(self, 0)
        _counts[self] = number + 1
        one = Pass(self, chain(), number)
        iterator = original(self)
        iterator._lockstep_pass = one
        _passes.append(one)
        return iterator

    return iterate


def _next_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """Counts the samples that the loader requests from its data set; a batch itself may have any form.

    A loader with workers requests them ahead of the batches that it yields, so the sizes are queued.
    """

    def take_index(self: Any) -> Any:
        index = original(self)
        # An iterable data set may end at any time, and a single index may stand for a whole batch.
        is_known = isinstance(index, Sequence) and self._dataset_kind == _DatasetKind.Map
        vars(self).setdefault(_SIZES, deque()).append(len(index) if is_known else 0)
        return index

    return take_index


def _reset(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `_reset`: with persistent workers, the next pass uses the same iterator."""

    def reset(self: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).pop(_SIZES, None)
        original(self, *args, **kwargs)

    return reset


def _size_of_next(iterator: Any) -> int:
    sizes = vars(iterator).get(_SIZES)
    in_order = getattr(iterator, "_in_order", True)  # new in torch 2.7
    return sizes.popleft() if sizes and in_order else 0


def _next(original: Callable[..., Any]) -> Callable[..., Any]:
    def take_next(self: Any) -> Any:
        global _current
        one: Pass | None = getattr(self, "_lockstep_pass", None)
        try:
            batch = original(self)
        except StopIteration:
            if one is not None:
                one.is_finished = True
            raise
        if one is not None:
            one.take(batch, _size_of_next(self))
            _current = one
            for listener in _listeners:
                listener()
        return batch

    return take_next


def on_batch(listener: Callable[[], None]) -> None:
    """Call `listener` whenever a loader yields a batch."""
    _listeners.append(listener)


def _told(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_epoch(self: Any, epoch: int) -> None:
        object.__setattr__(self, _TOLD, True)
        original(self, epoch)

    return set_epoch


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            _current.backwards += 1
        return original(*args, **kwargs)

    return backward


def _finish() -> None:
    for one in _passes:
        sampler = one.sampler
        length = len(sampler.dataset) if sampler is not None else 0
        padding = 0 if sampler is None or sampler.drop_last else sampler.total_size - length
        recorder.note(
            "pass",
            one.sites,
            number=one.number,
            loader=[site.dump() for site in made_at(one.loader)],
            sampler=[site.dump() for site in made_at(sampler)],
            has_sampler=sampler is not None,
            epoch=one.epoch,
            shuffles=bool(sampler is not None and sampler.shuffle),
            was_told=bool(getattr(sampler, _TOLD, False)),
            padding=padding,
            length=length,
            batch_size=getattr(one.loader, "batch_size", None),
            samples=one.samples,
            backwards=one.backwards,
            trained=one.steps,
            finished=one.is_finished,
            content="" if one.contents is None else one.contents.text(),
        )


def install() -> None:
    """Watch loaders and samplers."""
    wrap(DataLoader, "__init__", _remember_maker)
    wrap(DataLoader, "__iter__", _begin)
    wrap(DistributedSampler, "__init__", _remember_maker)
    wrap(DistributedSampler, "set_epoch", _told)
    for name, make in (("__next__", _next), ("_next_index", _next_index), ("_reset", _reset)):
        wrap(_BaseDataLoaderIter, name, make)
    wrap(torch.Tensor, "backward", _backward)
    wrap(torch.autograd, "backward", _backward)
    recorder.finishers.append(_finish)
