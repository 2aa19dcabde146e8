"""ResNet-50 (He et al., 2015, with the stride in the 3x3 convolution), since torchvision may be missing."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["resnet50"]


class _Bottleneck(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, num_out, 1, bias=False), nn.BatchNorm2d(num_out)),
        )
        self.skip = nn.Sequential()
        if stride != 1 or num_in != num_out:
            self.skip = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[n, c, h, w] -> [n, 4·width, h/stride, w/stride]."""
        return self.relu(self.body(values) + self.skip(values))


def resnet50(width: int = 64, num_classes: int = 1000) -> nn.Module:
    """float [n, 3, 224, 224] -> [n, num_classes].

    Args:
        width: of the first stage; 64 is ResNet-50 with its 25.6 million parameters.
        num_classes: of the head.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            layers.append(_Bottleneck(channels, width << stage, 2 if stage and not block else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
