"""The base class of metrics: float64 sums that add up over batches and ranks.

[Note: data of an evaluation] If the loaders of ranks held different data, the ranks would add up parts of different
evaluations. So a metric notes which data its values come from, and `synchronize` compares that between ranks. It does
so only where the origin is certain: all values come from one iteration of a loader with `evaluation=True`, which splits
over the ranks that synchronize, and no other such iteration has begun since. Otherwise a metric that is not updated
with every batch (one of a rare class, say) could hold values of one loader on this rank and of another on that one.
Training batches are compared when gradients are averaged.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep import batch
from lockstep.batch.share import BatchShare
from lockstep.errors import InputError, InputTypeError
from lockstep.tree import tensors_in

__all__ = ["Metric"]


_OTHER = (0, 0)  # data that is not compared


class Metric(ABC):
    """Sums that add up over batches and ranks, and the value computed from them.

    Subclasses set `num_sums` and define `update`, which passes the batch's contributions to `accumulate`, and
    `from_sums`. Metrics can be pickled and deep-copied.

    Attributes:
        num_sums: number of sums it keeps.
    """

    num_sums: ClassVar[int]

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # float64 [num_sums]; made on the device of the first update
        self._asked = _Asked()
        self._data: set[tuple[int, int]] = set()  # fingerprints and world sizes; see [Note: data of an evaluation]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "update" in vars(cls):
            cls.update = _knowing_the_batch(cls.update)  # type: ignore[method-assign]

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch. Local, and without waiting for the device."""

    @abstractmethod
    def from_sums(self, sums: Sequence[float]) -> float:
        """Compute the value from `num_sums` sums; if all are zero, the value of an empty metric."""

    def accumulate(self, *contributions: Tensor | float) -> None:
        """Add one number to each sum; to be called by `update`. Adds nothing for a filler batch.

        Args:
            *contributions: `num_sums` 0-dim tensors or Python numbers.

        Raises:
            InputError: not one number for each sum; or it is unknown whether the batch is a filler.
        """
        self._check_contributions(contributions)
        if self._is_filler():
            return
        self._data |= self._data_in_hand()
        device = next((one.device for one in contributions if isinstance(one, Tensor)), torch.device("cpu"))
        if self._sums is None:
            # Apple's GPUs have no float64: their sums are kept on the host.
            home = torch.device("cpu") if device.type == "mps" else device
            with torch.inference_mode(False):  # otherwise all later updates would have to be inside inference mode
                self._sums = torch.zeros(self.num_sums, dtype=torch.float64, device=home)
        for place, contribution in zip(self._sums, contributions, strict=True):
            if isinstance(contribution, Tensor):
                contribution = contribution.detach().to(place.device).to(torch.float64)
            place.add_(contribution)

    def _check_contributions(self, contributions: Sequence[Tensor | float]) -> None:
        shapes = [list(one.shape) if isinstance(one, Tensor) else [] for one in contributions]
        if len(shapes) == self.num_sums and not any(shapes):
            return
        raise InputError(
            f"{type(self).__name__}.accumulate: expected {self.num_sums} single numbers, one for each sum, got values "
            f"of shapes {', '.join(map(str, shapes)) or 'none'}. Pass the numbers of a tensor one by one: "
            "self.accumulate(*tensor.flatten())"
        )

    def share_in_hand(self) -> BatchShare | None:
        """This rank's share of the batch that `update` was called for; None outside a loader. Local.

        It is taken from the arguments of `update` if one of them came with a batch, or has the graph of an engine's
        output; otherwise from the loop ([Note: in hand] in `lockstep/batch/hand.py`).

        Raises:
            InputError: it may be any of several batches, of which this rank holds different numbers of samples.
        """
        found = self._asked.candidates()
        if len(found) > 1:
            held = " or ".join(str(share.local_samples) for share in found)
            raise InputError(
                f"{type(self).__name__}.update: cannot tell which batch this value belongs to, and so whether it is a "
                f"mean over {held} samples, because the loop prefetches batches or uses several loaders. Pass the "
                "number of samples: Mean.update(loss, weight=len(labels))"
            )
        return found[0] if found else None

    def _is_filler(self) -> bool:
        found = self._asked.candidates()
        fillers = [share for share in found if share.local_samples == 0]
        if not fillers:
            return False
        if not self._asked.is_told and self._asked.rows is not None and fillers[0].rows:
            # Other data in between, from another loader, differs in size; and so does the share of a full batch.
            return self._asked.rows == fillers[0].rows
        if len(fillers) == len(found):
            return True
        raise InputError(
            f"{type(self).__name__}.update: cannot tell whether this is a filler, which repeats other ranks' samples "
            "and must not count, because the loop prefetches batches or uses several loaders. Pass a tensor that the "
            "loader yielded (the labels), or skip the batch if lockstep.is_filler(batch)"
        )

    def _data_in_hand(self) -> set[tuple[int, int]]:
        if len(self._data) > 1:
            return set()  # not certain any more
        found = {
            (each.fingerprint, each.world_size) if each.evaluation else _OTHER for each in self._asked.candidates()
        }
        return found or {_OTHER}

    def data_seen(self, world_size: int) -> int:
        """A number below 2**48 that identifies the data of all values; 0 if that is uncertain, or there is none. Local.

        Args:
            world_size: size of the group that compares; data split over another number of ranks count as uncertain.
        """
        latest = batch.hand.latest_evaluation()
        is_certain = self._data == {latest} and latest[1] == world_size
        return latest[0] if is_certain else 0

    def compute(self) -> float:
        """The value over the samples that this rank has seen. Local; waits for the device.

        `synchronize` gives the value over all ranks.
        """
        return self.from_sums(self.state().tolist())

    def reset(self) -> None:
        """Forget everything seen. Local."""
        self._sums = None
        self._data = set()

    def merge(self, *others: Metric) -> None:
        """Add what other metrics of the same kind have seen, as if this one had. Local.

        Raises:
            InputTypeError: a metric of another kind, or with other settings.
        """
        for other in others:
            if self.label() != other.label():
                raise InputTypeError(
                    f"cannot merge {other.label()} into {self.label()}: their sums have different meanings"
                )
            data = self._data | other._data
            self.load_state(self.state() + other.state().to(self.state().device))
            self._data = data

    def state(self) -> Tensor:
        """The sums. States of several metrics of one kind may be added.

        Returns:
            float64 [num_sums], a copy, on the device of the updates (zeros on the CPU before any).
        """
        return (
            torch.zeros(self.num_sums, dtype=torch.float64, device="cpu") if self._sums is None else self._sums.clone()
        )

    def load_state(self, state: Tensor) -> None:
        """Replace the sums by those of a metric of the same kind.

        Args:
            state: float64 [num_sums], as `state` returned it; copied.

        Raises:
            InputError: wrong shape or dtype.
        """
        if state.shape != (self.num_sums,) or state.dtype != torch.float64:
            raise InputError(
                f"{self.label()}: a state is float64 [{self.num_sums}], got {state.dtype} {list(state.shape)}"
            )
        with torch.inference_mode(False):  # as in `accumulate`
            self._sums = state.detach().clone()
        self._data = {_OTHER}

    def label(self) -> str:
        """Kind and settings as text; metrics with equal labels may be added."""
        return type(self).__name__

    def __repr__(self) -> str:
        return f"<{self.label()}, this rank: {self.compute():.6g}>"


class _Asked:
    """What a metric knows about the batch while `update` runs.

    Attributes:
        is_asked: whether `update` is running.
        rows: first dimension's size of the first tensor argument that has dimensions; None without one.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.rows: int | None = None
        self._shares: list[BatchShare] = []  # found from the arguments
        self._iteration: weakref.ref[batch.hand.Iteration] | None = None
        self._num_updates = 0  # in that iteration, before this one

    @property
    def is_told(self) -> bool:
        """Whether the arguments identify the batch, so that the loop need not be consulted."""
        return bool(self._shares)

    def begin(self, arguments: Any) -> None:
        """Note that `update` is called with these arguments."""
        self.is_asked = True
        tensors = tensors_in(arguments)
        self.rows = next((tensor.size(0) for tensor in tensors if tensor.dim() > 0), None)
        tags = [tag for tag in map(batch.tags.find_tag, tensors) if tag is not None]
        self._shares = [tags[0].share] if tags else []
        if not tags and batch.graph.marks_tell_shares():
            forwards = [forward for tensor in tensors for forward in batch.graph.find_marks(tensor)]
            shares = [forward.feed.share for forward in forwards if forward.feed.share is not None]
            self._shares = list({share.local_samples: share for share in shares}.values())

    def end(self) -> None:
        """Note that `update` has returned."""
        self._shares = []
        iteration = batch.hand.latest_iteration()
        if iteration is None:
            return
        if self._iteration is None or self._iteration() is not iteration:
            self._iteration, self._num_updates = weakref.ref(iteration), 0
        self._num_updates += 1

    def _updates_in(self, iteration: batch.hand.Iteration) -> int:
        return self._num_updates if self._iteration is not None and self._iteration() is iteration else 0

    def candidates(self) -> list[BatchShare]:
        """The possible shares of the batch; see `batch.hand.in_hand`."""
        return self._shares or batch.hand.in_hand(self._updates_in)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # its state is only valid in this process, at this moment

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def _knowing_the_batch(update: Callable[..., None]) -> Callable[..., None]:
    """Wrap `update`: while it runs, the metric knows what its arguments reveal about the batch.

    It may call its parent class's `update`, whose arguments, such as a loss, reveal less.
    """

    @functools.wraps(update)
    def wrapper(self: Metric, *args: Any, **kwargs: Any) -> None:
        if self._asked.is_asked:
            update(self, *args, **kwargs)
            return
        self._asked.begin((args, kwargs))
        try:
            update(self, *args, **kwargs)
        finally:
            self._asked.is_asked = False
        self._asked.end()

    return wrapper
