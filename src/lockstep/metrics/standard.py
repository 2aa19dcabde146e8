"""The metrics that come with Lockstep."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import InputError, InputTypeError
from lockstep.metrics.metric import Metric

__all__ = ["Accuracy", "Mean", "Sum"]


def _as_values(name: str, value: Tensor | float | Sequence[float]) -> Tensor:
    """`value` as a detached real tensor, float64 if its device supports that."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError):
        raise InputTypeError(f"{name}: expected a number, or several, got {value!r} ({type(value).__name__})") from None
    tensor = tensor.detach()
    if tensor.is_complex():
        raise InputTypeError(f"{name}: expected real numbers, got {tensor.dtype}. Pass value.abs() or its real part")
    return tensor if tensor.device.type == "mps" else tensor.to(torch.float64)


class Mean(Metric):
    """A weighted mean of a loss, or of one value per sample.

    The value before the first update is nan.

        >>> loss = Mean()
        >>> loss.update(2.0, weight=3)
        >>> loss.update(torch.tensor([4.0, 6.0]))
        >>> loss.compute()
        3.2
    """

    num_sums = 2  # weighted values, weights

    def update(self, value: Tensor | float | Sequence[float], weight: Tensor | float | None = None) -> None:
        """Add a batch.

        Args:
            value: a scalar (number or 0-dim tensor) is taken as the mean over this rank's samples, as losses are; the
                elements of a list, array, or tensor of any other shape count once each.
            weight: how often `value` counts; a tensor is broadcast against `value`. By default a scalar is weighted by
                this rank's number of samples in the current batch, and by 1 outside a loader. A filler batch never
                counts, even with a weight. For a loss that is a mean over tokens, pass the number of tokens.

        Raises:
            InputError: `weight` does not broadcast to the shape of `value`; or a scalar has no weight and the current
                batch is unknown (a loop that fetches ahead).
            InputTypeError: complex numbers, or no numbers.
        """
        values = _as_values("Mean.update", value)
        if weight is None:
            share = self.share_in_hand() if values.dim() == 0 else None
            weight = 1 if share is None else share.local_samples
        if not isinstance(weight, Tensor):
            # Not multiplied by zero: the mean over nothing is nan.
            self.accumulate(values.sum() * weight if weight else 0.0, values.numel() * weight)
            return
        weights = _as_values("Mean.update", weight).to(values.device)
        try:
            weights = weights.expand(values.shape)
        except RuntimeError:
            raise InputError(
                f"Mean.update: weight of shape {list(weight.shape)} does not broadcast to value of shape "
                f"{list(values.shape)}. Pass one weight, or one per value"
            ) from None
        self.accumulate(torch.where(weights == 0, 0, values * weights).sum(), weights.sum())

    def from_sums(self, sums: Sequence[float]) -> float:
        total, weight = sums
        return total / weight if weight else math.nan


class Sum(Metric):
    """A total over all samples of all ranks, such as tokens, errors or seconds. 0.0 before the first update."""

    num_sums = 1

    def update(self, value: Tensor | float | Sequence[float]) -> None:
        """Add `value`, a number, or a tensor, list or array of any shape, which is summed; nothing for a filler batch.

        Raises:
            InputTypeError: complex numbers, or no numbers.
        """
        self.accumulate(_as_values("Sum.update", value).sum())

    def from_sums(self, sums: Sequence[float]) -> float:
        return sums[0]


class Accuracy(Metric):
    """The fraction of samples whose class is among the `top_k` highest scores.

    The value before the first update is nan. Ties are broken by `torch.topk`, and nan counts as the highest score, as
    it does there.

    Args:
        top_k: number of highest scores to consider, at least 1.

    Raises:
        InputError: `top_k` below 1.

        >>> accuracy = Accuracy()
        >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        >>> accuracy.compute()
        0.5
    """

    num_sums = 2  # correct, all

    def __init__(self, top_k: int = 1) -> None:
        super().__init__()
        if not isinstance(top_k, int) or top_k < 1:
            raise InputError(f"Accuracy: top_k is {top_k!r}; expected an integer of at least 1")
        self.top_k = top_k

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add a batch. Adds nothing for a filler batch.

        Args:
            predictions: scores (logits or probabilities) [N, C] or [N, C, ...], of any floating dtype; or, with
                `top_k=1`, predicted classes in the shape of `targets`, of an integer dtype.
            targets: classes [N] or [N, ...], of an integer dtype.

        Raises:
            InputError: the shapes do not match, or there are fewer than `top_k` classes.
            InputTypeError: not tensors, or classes that are not integers.
        """
        self._check_types(predictions, targets)
        if predictions.shape == targets.shape:
            self._check_classes(predictions)
            hits = predictions == targets
        else:
            self._check_scores(predictions, targets)
            # Users compare with argmax, and it is cheaper than topk.
            guesses = (
                predictions.argmax(1, keepdim=True) if self.top_k == 1 else predictions.topk(self.top_k, 1).indices
            )
            hits = (guesses == targets.unsqueeze(1)).any(1)
        self.accumulate(hits.sum(), targets.numel())

    @staticmethod
    def _check_types(predictions: Tensor, targets: Tensor) -> None:
        for name, given in (("predictions", predictions), ("targets", targets)):
            if not isinstance(given, Tensor):
                raise InputTypeError(f"Accuracy.update: {name} is a {type(given).__name__}; expected a tensor")
        if targets.is_floating_point() or targets.is_complex():
            raise InputTypeError(
                f"Accuracy.update: targets are {targets.dtype}; expected classes of an integer dtype, one per sample. "
                "For one-hot or mixed targets pass targets.argmax(1)"
            )

    def _check_classes(self, predictions: Tensor) -> None:
        if self.top_k != 1:
            raise InputError(
                f"Accuracy.update: predictions of shape {list(predictions.shape)} are one class per sample, but "
                f"top_k={self.top_k} needs a score per class, shape [N, C]"
            )
        if predictions.is_floating_point():
            raise InputTypeError(
                f"Accuracy.update: predictions have the shape of targets, {list(predictions.shape)}, so they must be "
                f"classes of an integer dtype, got {predictions.dtype}. For binary scores pass (scores > 0.5).long()"
            )

    def _check_scores(self, predictions: Tensor, targets: Tensor) -> None:
        shape = predictions.shape
        if predictions.dim() < 2 or (shape[0], *shape[2:]) != tuple(targets.shape):
            raise InputError(
                f"Accuracy.update: predictions {list(shape)} and targets {list(targets.shape)} do not match: expected "
                "scores [N, C] and classes [N]"
            )
        if shape[1] == 1:
            raise InputError(
                f"Accuracy.update: predictions {list(shape)} are one score per sample, which is always the highest. "
                "For binary scores pass (scores > 0.5).long().squeeze(1)"
            )
        if shape[1] < self.top_k:
            raise InputError(
                f"Accuracy.update: top_k={self.top_k}, but predictions {list(shape)} have {shape[1]} classes"
            )

    def from_sums(self, sums: Sequence[float]) -> float:
        correct, total = sums
        return correct / total if total else math.nan

    def label(self) -> str:
        return f"{type(self).__name__}(top_k={self.top_k})"
