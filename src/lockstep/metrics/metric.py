"""What all metrics share: float64 sums that add up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep import batch
from lockstep.errors import InputError, InputTypeError

__all__ = ["Metric"]


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
        """
        share = batch.current()
        if share is not None and share.local_samples == 0:
            return
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

    def compute(self) -> float:
        """The value over what this rank has seen. Local; waits for the device.

        `synchronize` gives the value over all ranks.
        """
        return self.from_sums(self.state().tolist())

    def reset(self) -> None:
        """Forget everything seen. Local."""
        self._sums = None

    def merge(self, *others: Metric) -> None:
        """Add what other metrics of the same kind have seen, as if this one had. Local.

        Raises:
            InputTypeError: another kind of metric, or other settings.
        """
        for other in others:
            if self.label() != other.label():
                raise InputTypeError(f"cannot merge {other.label()} into {self.label()}: their sums mean other things")
            self.load_state(self.state() + other.state().to(self.state().device))

    def state(self) -> Tensor:
        """The sums. States of several metrics of one kind may be added.

        Returns:
            float64 [num_sums], a copy, on the device of the updates (zeros on the CPU before any).
        """
        return torch.zeros(self.num_sums, dtype=torch.float64) if self._sums is None else self._sums.clone()

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

    def label(self) -> str:
        """Kind and settings; metrics with equal labels may be added."""
        return type(self).__name__

    def __repr__(self) -> str:
        return f"<{self.label()}, this rank: {self.compute():.6g}>"
