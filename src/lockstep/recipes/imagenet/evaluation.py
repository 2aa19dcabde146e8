"""Top-1, top-5 and loss over the validation images, each counted once on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep.metrics import Accuracy, Mean, Sum, synchronize

__all__ = ["evaluate"]

_MOST_GUESSES = 5


def evaluate(
    module: nn.Module,
    loader: lockstep.DataLoader[Any],
    forward: Callable[[nn.Module, Tensor], Tensor],
    num_classes: int,
    note: Callable[[Tensor, Tensor], None] | None = None,
) -> dict[str, float]:
    """Evaluate a network. Collective at the end; ranks may have different numbers of batches.

    Args:
        module: the network, in evaluation mode.
        loader: yields `(images, labels, indices)` of this rank, with `evaluation=True`; labels below 0 mark images
            that cannot be read.
        forward: `forward(module, images)` returns logits, on any device.
        num_classes: number of classes.
        note: called with the indices and labels of each batch.

    Returns:
        "loss", "accuracy" (top-1) and "top5" over the readable images; "correct" and "images", their numbers;
        "expected", the number of all images.
    """
    guesses = min(_MOST_GUESSES, num_classes)
    loss, top1, top5, counted = Mean(), Accuracy(), Accuracy(top_k=guesses), Sum()
    for images, labels, indices in loader:
        if note is not None:
            note(indices, labels)
        logits = forward(module, images)
        labels = labels.to(logits.device)
        readable = labels >= 0
        # Selecting the readable rows would wait for the device; the others get weight 0 instead.
        losses = cross_entropy(logits, labels.clamp_min(0), reduction="none")
        loss.update(losses, weight=readable)
        top1.update(logits, labels)  # a label below 0 is never predicted
        top5.update(logits, labels)
        counted.update(readable)
    values = synchronize({"loss": loss, "accuracy": top1, "top5": top5, "images": counted})
    expected, images = len(loader.dataset), values["images"]  # type: ignore[arg-type]
    # Shares of all rows so far; unreadable ones count as wrong.
    scale = expected / images if images else 0.0
    return {
        **values,
        "accuracy": values["accuracy"] * scale,
        "top5": values["top5"] * scale,
        "correct": round(values["accuracy"] * expected),
        "expected": expected,
    }
