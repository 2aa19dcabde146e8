"""What all metrics share: float64 sums that add up.

[Note: data of an evaluation] Ranks whose loaders hold other data would add up parts of different evaluations. So a
metric notes which data its values are of, and `synchronize` compares them, where that is certain: where all are of
one iteration of a loader with `evaluation=True`, which splits over the ranks that synchronize, and no other such
iteration has begun since. Else a metric that is not updated with every batch (of a rare class, say) may hold values of
one loader on this rank and of another on that. Batches for training are compared with the gradients.
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


_OTHER = (0, 0)  # of data that nobody compares


class Metric(ABC):
    """Sums that add up over batches and ranks, and the value they stand for.

    Subclasses set `num_sums` and write `update`, which hands the batch's contributions to
    `accumulate`,
    and `from_sums`. Metrics can be pickled and deep-copied.

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
        """The value for given sums, `num_sums` of them; for sums of zero what an empty metric is."""

    def accumulate(self, *contributions: Tensor | float) -> None:
        """Add one number to each sum; for `update` to call. Adds nothing under a filler batch.

        Args:
            *contributions: `num_sums` 0-dim tensors or Python numbers.

        Raises:
            InputError: not one number for each sum; or this may be a filler batch, or not.
        """
        self._check_contributions(contributions)
        if self._is_filler():
            return
        self._data |= self._data_in_hand()
        device = next((one.device for one in contributions if isinstance(one, Tensor)), torch.device("cpu"))
        if self._sums is None:
            # Apple's GPUs have no float64: their sums are kept on the host.
            home = torch.device("cpu") if device.type == "mps" else device
            with torch.inference_mode(False):  # else only updates inside inference mode could follow
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
            f"of shapes {', '.join(map(str, shapes)) or 'none'}; hand the numbers of a tensor over one by one: "
            "self.accumulate(*tensor.flatten())"
        )

    def share_in_hand(self) -> BatchShare | None:
        """What this rank holds of the batch that `update` was called for; None outside of a loader. Local.

        The arguments of `update` tell it if one of them came with a batch, or in a graph from an engine; else the
        loop does ([Note: in hand] in `lockstep/batch/hand.py`).

        Raises:
            InputError: it may be one of several batches, of which this rank holds different numbers of samples.
        """
        found = self._asked.candidates()
        if len(found) > 1:
            held = " or ".join(str(share.local_samples) for share in found)
            raise InputError(
                f"{type(self).__name__}.update: cannot tell which batch this value is of, and so whether it is a mean "
                f"over {held} samples: the loop fetches batches ahead, or has several loaders at work. Pass the number "
                "of samples: Mean.update(loss, weight=len(labels))"
            )
        return found[0] if found else None

    def _is_filler(self) -> bool:
        found = self._asked.candidates()
        fillers = [share for share in found if share.local_samples == 0]
        if not fillers:
            return False
        if not self._asked.is_told and self._asked.rows is not None and fillers[0].rows:
            # Other data in between, of another loader, has another size; and so has a full batch's share.
            return self._asked.rows == fillers[0].rows
        if len(fillers) == len(found):
            return True
        raise InputError(
            f"{type(self).__name__}.update: cannot tell whether this is a filler, which repeats samples that other "
            "ranks hold and must not count: the loop fetches batches ahead, or has several loaders at work. Hand "
            "update a tensor that the loader yielded (the labels), or leave the batch out where "
            "lockstep.is_filler(batch)"
        )

    def _data_in_hand(self) -> set[tuple[int, int]]:
        if len(self._data) > 1:
            return set()  # not certain any more
        found = {
            (each.fingerprint, each.world_size) if each.evaluation else _OTHER for each in self._asked.candidates()
        }
        return found or {_OTHER}

    def data_seen(self, world_size: int) -> int:
        """A number below 2**48 for the data that all values are of; 0 where it is not certain, or there is none. Local.

        Args:
            world_size: of the group that compares; data that others share are not certain.
        """
        latest = batch.hand.latest_evaluation()
        is_certain = self._data == {latest} and latest[1] == world_size
        return latest[0] if is_certain else 0

    def compute(self) -> float:
        """The value over what this rank has seen. Local; waits for the device.

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
            InputTypeError: another kind of metric, or other settings.
        """
        for other in others:
            if self.label() != other.label():
                raise InputTypeError(f"cannot merge {other.label()} into {self.label()}: their sums mean other things")
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
        """Take over the sums of a metric of the same kind.

        Args:
            state: float64 [num_sums], as `state` returned it; copied.

        Raises:
            InputError: it has another shape or dtype.
        """
        if state.shape != (self.num_sums,) or state.dtype != torch.float64:
            raise InputError(
                f"{self.label()}: a state is float64 [{self.num_sums}], got {state.dtype} {list(state.shape)}"
            )
        with torch.inference_mode(False):  # as in `accumulate`
            self._sums = state.detach().clone()
        self._data = {_OTHER}

    def label(self) -> str:
        """Kind and settings; metrics with equal labels may be added."""
        return type(self).__name__

    def __repr__(self) -> str:
        return f"<{self.label()}, this rank: {self.compute():.6g}>"


class _Asked:
    """What a metric knows of the batch while `update` runs.

    Attributes:
        is_asked: `update` runs.
        rows: first size of the first argument that is a tensor with dimensions; None without one.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.rows: int | None = None
        self._shares: list[BatchShare] = []  # that the arguments tell
        self._iteration: weakref.ref[batch.hand.Iteration] | None = None
        self._num_updates = 0  # in that iteration, before this one

    @property
    def is_told(self) -> bool:
        """Whether the arguments tell which batch it is; the loop need not be asked."""
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
        """Shares that the batch may have; see `batch.hand.in_hand`."""
        return self._shares or batch.hand.in_hand(self._updates_in)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # of this process, and this moment

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def _knowing_the_batch(update: Callable[..., None]) -> Callable[..., None]:
    """Wrap `update`: while it runs, the metric knows what its arguments tell of the batch.

    It may call that of its parent class, whose arguments, such as a loss, tell less.
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
