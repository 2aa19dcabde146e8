"""Networks by name.

ResNets are defined here, so that the program runs without torchvision. They equal torchvision's networks of these
names, with the same parameter names and, for the same seed, the same initial weights; torchvision's trained weights can
be loaded. `tiny` is a small residual network for tests and small images, with group normalization, so that results do
not depend on how a batch is split. `tiny-bn` is the same with batch normalization.
All other names are looked up in torchvision, then in timm.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import InputError, SetupError

__all__ = ["ResNet", "Tiny", "check_name", "check_size", "create_model"]

_Norm = Callable[[int], nn.Module]
_TINY_GROUPS = 8


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: _Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        self.downsample = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return result


class _Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions with a skip connection."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: _Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = norm(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        result: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return result


def _shortcut(inputs: int, outputs: int, stride: int, norm: _Norm) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))


class ResNet(nn.Module):
    """A residual network (He et al., "Deep Residual Learning for Image Recognition", 2015).

    Args:
        block: type of block.
        depths: blocks in each of the four stages.
        num_classes: number of outputs.
    """

    def __init__(self, block: type[_BasicBlock] | type[_Bottleneck], depths: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = 64
        self._stages = [f"layer{number}" for number in range(1, len(depths) + 1)]
        for number, (stage, depth) in enumerate(zip(self._stages, depths, strict=True)):
            width, blocks = 64 << number, []
            for place in range(depth):
                stride = 2 if number > 0 and place == 0 else 1
                blocks.append(block(inputs, width, stride))
                inputs = width * block.expansion
            self.add_module(stage, nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, classes)` of images `(n, 3, height, width)`."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in self._stages:
            x = self.get_submodule(stage)(x)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


class Tiny(nn.Module):
    """A residual network of three blocks, for images of 8 pixels or more; 78 thousand parameters with 10 classes.

    Args:
        num_classes: number of outputs.
        norm: creates a normalization layer for a number of channels; group normalization by default.
    """

    def __init__(self, num_classes: int, norm: _Norm = lambda channels: nn.GroupNorm(_TINY_GROUPS, channels)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.bn1 = norm(16)
        self.relu = nn.ReLU(inplace=True)
        self.layers = nn.Sequential(
            _BasicBlock(16, 16, 1, norm), _BasicBlock(16, 32, 2, norm), _BasicBlock(32, 64, 2, norm)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, classes)` of images `(n, 3, height, width)`."""
        x = self.layers(self.relu(self.bn1(self.conv1(images))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


_BUILT_HERE: dict[str, Callable[[int], nn.Module]] = {
    "tiny": Tiny,
    "tiny-bn": lambda classes: Tiny(classes, nn.BatchNorm2d),
    "resnet18": lambda classes: ResNet(_BasicBlock, (2, 2, 2, 2), classes),
    "resnet34": lambda classes: ResNet(_BasicBlock, (3, 4, 6, 3), classes),
    "resnet50": lambda classes: ResNet(_Bottleneck, (3, 4, 6, 3), classes),
    "resnet101": lambda classes: ResNet(_Bottleneck, (3, 4, 23, 3), classes),
    "resnet152": lambda classes: ResNet(_Bottleneck, (3, 8, 36, 3), classes),
}
_INSTALL = "pip install torchvision"


def create_model(name: str, num_classes: int, *, pretrained: bool = False, size: int = 224) -> nn.Module:
    """Create a network, on the CPU in float32, with initial weights from the process-wide generator. Local.

    Args:
        name: see the module's docstring.
        num_classes: number of outputs.
        pretrained: load torchvision's or timm's trained weights, which are downloaded once. If they are for another
            number of classes, the last layer keeps its initial weights.
        size: edge length of the images in pixels, for networks made for one size.

    Raises:
        InputError: the network is unknown, or has no trained weights.
        SetupError: it needs a package that is not installed, or its weights cannot be downloaded.
    """
    check_name(name)
    if name in _BUILT_HERE:
        model = _BUILT_HERE[name](num_classes)
        return _load_torchvision_weights(model, name) if pretrained else model
    models = _torchvision_models()
    if models is not None and name in models.list_models(module=models):
        # Two of them have a second output for training, which is not used here.
        options: dict[str, Any] = {}
        if name in ("googlenet", "inception_v3"):
            options = {"aux_logits": False, "init_weights": True}
        elif name.startswith("vit_"):
            options = {"image_size": size}
        model = models.get_model(name, num_classes=num_classes, **options)
        return _load_torchvision_weights(model, name) if pretrained else model
    try:
        return _timm().create_model(name, pretrained=pretrained, num_classes=num_classes)  # type: ignore[no-any-return]
    except (OSError, RuntimeError) as error:
        raise SetupError(f"timm could not make {name}: {str(error).splitlines()[0]}") from error


def check_name(name: str) -> None:
    """Check that there is a network of that name, before anything is set up. Local.

    Raises:
        InputError: the network is unknown.
        SetupError: it needs a package that is not installed.
    """
    if name in _BUILT_HERE:
        return
    models = _torchvision_models()
    if models is not None and name in models.list_models(module=models):
        return
    timm = _timm()
    if timm is None or not timm.is_model(name):
        raise _unknown(name, models, has_timm=timm is not None)


def check_size(model: nn.Module, name: str, size: int) -> None:
    """Check, with one image, that a network of another library accepts a size. Local.

    Args:
        model: the network, on the CPU.
        name: name of the network.
        size: edge length of the images, in pixels.

    Raises:
        InputError: it does not; quotes the network's error.
    """
    if name in _BUILT_HERE:
        return
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, size, size))
    except (AssertionError, RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"--arch {name} does not accept images of --size {size}: {said}") from error
    finally:
        model.train(was_training)


def _unknown(name: str, models: Any, *, has_timm: bool) -> InputError | SetupError:
    known = sorted({*_BUILT_HERE, *(models.list_models(module=models) if models is not None else ())})
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    if models is None:
        return SetupError(
            f"--arch {name} needs torchvision, which is not installed: {_INSTALL}. Without it: "
            f"{', '.join(_BUILT_HERE)}{hint}"
        )
    timm = "neither torchvision nor timm has" if has_timm else "torchvision does not have (timm is not installed)"
    return InputError(f"--arch is {name!r}, which {timm}{hint}")


def _timm() -> Any:
    """`timm`, or None if it is not installed."""
    return importlib.import_module("timm") if find_spec("timm") else None


def _torchvision_models() -> Any:
    """`torchvision.models`, or None if it is not installed."""
    if not find_spec("torchvision"):
        return None
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError, AttributeError) as error:  # built for another release of torch
        raise SetupError(
            f"torchvision cannot be imported ({str(error).splitlines()[0]}): it must be the release "
            f"that matches torch {torch.__version__}"
        ) from error


def _load_torchvision_weights(model: nn.Module, name: str) -> nn.Module:
    """Replace the initial weights by torchvision's trained ones."""
    models = _torchvision_models()
    if name.startswith("tiny"):
        raise InputError(f"--pretrained: there are no trained weights for {name}; leave --pretrained out")
    if models is None:
        raise SetupError(f"--pretrained needs torchvision, which is not installed: {_INSTALL}")
    try:
        state = models.get_model_weights(name).DEFAULT.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise SetupError(f"--pretrained: the weights of {name} cannot be downloaded: {error}") from error
    own = model.state_dict()
    last = next(key for key in reversed(own) if key.endswith(".weight")).rpartition(".")[0]
    ours = {
        key: value
        for key, value in state.items()
        if key in own and not (key.startswith(f"{last}.") and value.shape != own[key].shape)
    }
    missing = [key for key in own if key not in ours and not key.startswith(f"{last}.")]
    if missing:
        raise SetupError(f"--pretrained: torchvision's weights of {name} lack {missing[0]}")
    model.load_state_dict(ours, strict=False)
    return model
