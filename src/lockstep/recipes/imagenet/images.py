"""Images for training: read from files by Pillow, cropped and flipped at random.

A sample is `(image, label, index)`. The image is uint8 `(height, width, 3)`, a quarter of the size of floats on its way
from the loader worker to the device, where it is normalized. Random numbers of a sample come from the
generator that the loader passes, seeded by (seed, epoch, index): an image is cropped in the same way on any number of
ranks and loader workers, with any strategy.

The crops are the usual ones for ImageNet: an area of 8 to 100 % with an aspect ratio of 3:4 to 4:3, resized to a
square, and flipped with probability 1/2; for evaluation, the shorter edge is resized to 256 / 224 of the crop's, which
is taken from the centre. *Rejected:* torchvision's transforms, which draw from the process-wide generator, and crop and
resize in two passes.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import DataError
from lockstep.recipes.imagenet.listing import Listing

__all__ = ["BROKEN", "DummyImages", "FolderImages", "centre_box", "normalize", "random_box", "read_image"]

BROKEN = -1  # the label of an image that cannot be read

Sample = tuple[Tensor, int, int]
Box = tuple[float, float, float, float]

_AREA = (0.08, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
_MARGIN = 256 / 224
_ORIENTATION = 0x0112
# Operations that undo EXIF's orientations 2 … 8.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MEAN, _STD = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # of ImageNet's training images; pretrained weights expect them
_DUMMY_SIZES = {"train": 1_281_167, "val": 50_000}
_DUMMY_CLASSES = 1000


def read_image(path: Path) -> Image.Image:
    """Read the image in a file as RGB, upright.

    The content of a file decides, not its name: a PNG named .JPEG is read as PNG. Grayscale, CMYK, palettes and 16
    bits per channel become RGB with 8; transparency is dropped. EXIF's orientation is applied.

    Raises:
        DataError: the file cannot be read, or is not a complete image; names it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata
            with Image.open(path) as image:
                image.load()
                upright = _UPRIGHT.get(_orientation(image))
                picture = _as_rgb(image)
                return picture if upright is None else picture.transpose(upright)
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the system, not the decoder
            raise DataError(f"{path} cannot be opened: {error.strerror}") from error
        raise DataError(
            f"{path} cannot be read as an image ({error}). Repair or remove it, or use --skip-broken to leave such "
            "images out"
        ) from None


def random_box(width: int, height: int, generator: torch.Generator) -> Box:
    """A random crop for training.

    Args:
        width: width of the image, in pixels.
        height: height of the image, in pixels.
        generator: random number generator.

    Returns:
        Left, top, right, bottom, in whole pixels.
    """
    low, high = (math.log(ratio) for ratio in _ASPECT)
    for _ in range(_TRIES):
        draws = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        area = width * height * (_AREA[0] + draws[0] * (_AREA[1] - _AREA[0]))
        aspect = math.exp(low + draws[1] * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draws[2] * (width - w + 1)), int(draws[3] * (height - h + 1))
            return left, top, left + w, top + h
    # The largest centre crop with an allowed aspect ratio.
    w = min(width, max(round(height * _ASPECT[1]), 1))
    h = min(height, max(round(width / _ASPECT[0]), 1))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre_box(width: int, height: int) -> Box:
    """The square centre crop for evaluation."""
    edge = min(width, height) / _MARGIN
    left, top = (width - edge) / 2, (height - edge) / 2
    return left, top, left + edge, top + edge


def normalize(images: Tensor, dtype: torch.dtype, *, channels_last: bool = False) -> Tensor:
    """Normalize a batch for the network.

    Args:
        images: uint8 `(n, height, width, 3)`.
        dtype: dtype of the result.
        channels_last: whether the memory format of the result is channels last.

    Returns:
        `(n, 3, height, width)`, with ImageNet's mean per channel subtracted, divided by its standard deviation.
    """
    images = images.permute(0, 3, 1, 2)  # now channels last in memory
    if not channels_last:
        images = images.contiguous()
    mean, std = (torch.tensor(values, dtype=dtype, device=images.device).view(3, 1, 1) for values in (_MEAN, _STD))
    return images.to(dtype).div_(255).sub_(mean).div_(std)


class FolderImages(Dataset[Sample]):
    """The images of a listing.

    Args:
        listing: the files and labels.
        size: edge length of the result, in pixels.
        augment: whether to crop and flip at random; otherwise a centre crop.
        skip_broken: an image that cannot be read is black, with label `BROKEN`; otherwise it is an error.
    """

    def __init__(self, listing: Listing, size: int, *, augment: bool, skip_broken: bool = False) -> None:
        self.listing, self.size, self.augment, self.skip_broken = listing, size, augment, skip_broken

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.listing.classes)

    def name(self, index: int) -> str:
        """The path of an image, for messages."""
        return str(self.listing.path(index))

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(  # type: ignore[override]  # the loader passes the generator
        self, index: int, *, generator: torch.Generator
    ) -> Sample:
        try:
            picture = read_image(self.listing.path(index))
        except DataError as error:
            is_systems = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None
            if not self.skip_broken or is_systems:
                raise
            return torch.zeros(self.size, self.size, 3, dtype=torch.uint8), BROKEN, index
        flips = self.augment and bool(torch.rand((), generator=generator) < 0.5)
        box = random_box(*picture.size, generator) if self.augment else centre_box(*picture.size)
        square = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if flips:
            square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(square)), int(self.listing.labels[index]), index


class DummyImages(Dataset[Sample]):
    """Noise of ImageNet's size, for benchmarks without decoding.

    Args:
        part: "train" (1,281,167 images) or "val" (50,000 images).
        size: edge length in pixels.
    """

    num_classes = _DUMMY_CLASSES

    def __init__(self, part: str, size: int) -> None:
        self.length, self.size = _DUMMY_SIZES[part], size

    def name(self, index: int) -> str:
        """The name of an image, for messages."""
        return f"dummy image {index}"

    def __len__(self) -> int:
        return self.length

    def __getitem__(  # type: ignore[override]
        self, index: int, *, generator: torch.Generator
    ) -> Sample:
        shape = (self.size, self.size, 3)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator), index % _DUMMY_CLASSES, index


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 … 8; 1 if there is none."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # Pillow's errors about damaged metadata; the image itself is fine
        return 1
    return found if isinstance(found, int) else 1


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow would clip 16 bits at 255 instead of scaling them
        wide = np.asarray(image, dtype=np.float64)
        scaled = np.clip(wide / 257, 0, 255).astype(np.uint8)
        return Image.fromarray(scaled).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")
