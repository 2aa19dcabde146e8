"""The data and the model of the digits recipe.

scikit-learn includes 1797 handwritten digits of 8×8 pixels (a part of the UCI data
set "Optical Recognition of Handwritten Digits"), so nothing is downloaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import Dataset, TensorDataset

__all__ = ["DigitsNet", "ShiftedDigits", "load_digits", "stratified_split"]

_SPLIT_SEED = 0  # not an option, so that all runs are compared on the same held-out images
_HELD_OUT = 0.2


def load_digits(dtype: torch.dtype = torch.float32) -> tuple[TensorDataset, TensorDataset]:
    """The digits, in a fixed split into training and held-out images.

    Args:
        dtype: dtype of the images.

    Returns:
        Training set (1438 samples) and held-out set (359). A sample is an image `(1, 8, 8)` with values
        in 0 … 1, and its label, an int64 in 0 … 9.
    """
    from sklearn import datasets  # type: ignore[import-untyped]  # slow to import, and an extra

    images, labels = datasets.load_digits(return_X_y=True)
    images = torch.as_tensor(images, dtype=dtype).reshape(-1, 1, 8, 8) / 16  # pixels are 0 … 16
    labels = torch.as_tensor(labels, dtype=torch.int64)
    train, held_out = stratified_split(labels, _HELD_OUT, _SPLIT_SEED)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of two parts with the same proportions of classes.

    Args:
        labels: int64 `(n,)`.
        fraction: fraction of each class that goes into the second part, rounded to whole samples.
        seed: seed of the choice of these samples.

    Returns:
        Two ascending int64 tensors, which together contain each index once.

    >>> stratified_split(torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]), 0.25, seed=0)[1].numel()
    2
    """
    generator = torch.Generator().manual_seed(seed)
    second = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        second[members[order[: round(fraction * len(members))]]] = True
    return (~second).nonzero().flatten(), second.nonzero().flatten()


class ShiftedDigits(Dataset[tuple[Tensor, Tensor]]):
    """Digits shifted by up to one pixel in each direction, differently in every epoch.

    The loader passes the generator, seeded by (seed, epoch, index): an image is shifted in the
    same way on any number of ranks and loader workers.

    Args:
        digits: images `(1, 8, 8)` with labels.
    """

    def __init__(self, digits: TensorDataset) -> None:
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(  # type: ignore[override]  # the loader passes the generator
        self, index: int, *, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        image, label = self.digits[index]
        down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
        height, width = image.shape[-2:]
        return pad(image, (1, 1, 1, 1))[..., down : down + height, right : right + width], label


class DigitsNet(nn.Module):
    """A small convolutional network with 66 thousand parameters.

    Group normalization works on one image at a time. Batch normalization would work on each rank's
    part of the batch, so that results would depend on the number of ranks.

    Args:
        width: channels of the first layer, a multiple of 4; the others have twice as many.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.GroupNorm(8, 2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GroupNorm(8, 2 * width),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(2 * width * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, 10)` of images `(n, 1, 8, 8)`."""
        logits: Tensor = self.classifier(self.features(images))
        return logits
