"""What the tests of `DistributedDataParallel` share: a plain twin of the model, and the mean of its gradients."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import DistributedDataParallel, log
from lockstep.errors import LockstepError

backends = pytest.mark.parametrize("backend", ["lockstep", "gloo"])

# Means over ranks may be added in another order than here: a few units in the last place of a float64.
TOLERANCE = 1e-13


def twins(module: nn.Module, **options: Any) -> tuple[DistributedDataParallel, nn.Module]:
    """The module wrapped, and a plain copy of it that started from the same parameters."""
    module = module.double()
    plain = copy.deepcopy(module)
    return DistributedDataParallel(module, **options), plain


def data(*shape: int, seed: int = 0) -> Tensor:
    """Float64 numbers, others on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def mean_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Collective."""
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def clear(*models: nn.Module) -> None:
    for model in models:
        model.zero_grad()


def assert_averaged(model: DistributedDataParallel, plain: nn.Module, scale: float = 1.0) -> None:
    """The engine's gradients are the mean of the plain copies'; None where no rank has one. Collective."""
    group = model.process_group
    for (name, ours), theirs in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        used = torch.tensor([int(theirs.grad is not None)])
        dist.all_reduce(used, group=group)
        if not used.item():
            assert ours.grad is None, f"{name} has a gradient, though no rank used it"
            continue
        mean = mean_over_ranks(torch.zeros_like(theirs) if theirs.grad is None else theirs.grad, group) * scale
        assert ours.grad is not None, f"{name} has no gradient"
        assert ours.grad.shape == mean.shape
        difference = (ours.grad - mean).abs().max().item() if mean.numel() else 0.0
        assert difference <= TOLERANCE * max(1.0, mean.abs().max().item() if mean.numel() else 1.0), (
            f"{name} differs by {difference}"
        )


def assert_same_on_all_ranks(*tensors: Tensor) -> None:
    """Bit for bit. Collective."""
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.detach().contiguous())
        assert all(torch.equal(part, parts[0]) for part in parts)


def num_collectives() -> int:
    """How many collectives this rank has entered on the default group, which must be a lockstep group."""
    group = dist.group.WORLD
    return group.engine.recorder.number  # type: ignore[union-attr]


def error_of(function: Any, *args: Any, **kwargs: Any) -> LockstepError:
    """What a call raises, which must be one of Lockstep's errors."""
    try:
        function(*args, **kwargs)
    except LockstepError as error:
        return error
    raise AssertionError(f"{function} raised nothing")


class Heads(nn.Module):
    """A trunk and two heads; `forward` chooses what it uses and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 2)

    def forward(self, inputs: Tensor, use: str = "both") -> Any:
        features = torch.tanh(self.trunk(inputs))
        if use == "left":
            return self.left(features)
        if use == "right":
            return self.right(features)
        return self.left(features), self.right(features)


def mlp(*, batch_norm: bool = False, width: int = 8) -> nn.Sequential:
    """4 inputs, 3 outputs."""
    middle = [nn.BatchNorm1d(width)] if batch_norm else []
    return nn.Sequential(nn.Linear(4, width), *middle, nn.Tanh(), nn.Linear(width, 3))


@contextlib.contextmanager
def warnings_of_lockstep() -> Iterator[list[str]]:
    """What is logged inside; each text once more, whatever this worker has said before."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log._warned.clear()
    logger = log.get_logger("lockstep")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
