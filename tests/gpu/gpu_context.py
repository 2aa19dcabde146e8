"""What checks share: where they run, how they compare, and how they say that something cannot be had."""

from __future__ import annotations

from typing import Any

import torch

import lockstep

__all__ = ["Context", "Skip", "close", "make_model", "same"]


class Skip(Exception):
    """What the check needs is not here."""


class Context:
    """Where a check runs.

    Args:
        kind: "cuda", or "cpu" for tests of the checks themselves.
    """

    def __init__(self, kind: str) -> None:
        self.is_cuda = kind == "cuda"
        self.device = torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")
        # Comparisons with one process are exact to rounding of the dtype.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False

    def backend(self, name: str) -> str:
        """That backend, or what stands for it on the CPU."""
        if self.is_cuda:
            return name
        return {"nccl": "gloo", "cpu:lockstep,cuda:nccl": "cpu:lockstep,cuda:gloo"}.get(name, name)

    def init(self, backend: str, **options: Any) -> Any:
        """`lockstep.init`, with all ranks on the first GPU."""
        world = lockstep.init(backend=self.backend(backend), device=str(self.device), **options)
        assert world.device == self.device, f"{world.device} is not {self.device}"
        return world

    def to(self, thing: Any) -> Any:
        """A tensor or module on the device, as old scripts write it."""
        return thing.cuda() if self.is_cuda else thing

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()


def make_model(dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.nn.Module:
    """A small network with batch-free layers, the same for every caller with the seed: [n, 12] -> [n, 5]."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 64),
        torch.nn.GELU(),
        torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 48),
        torch.nn.Tanh(),
        torch.nn.Linear(48, 5),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(device, dtype)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> float:
    """The greatest difference relative to the greatest expected value.

    Raises:
        AssertionError: above the tolerance, or a shape, dtype or device differs.
    """
    assert found.shape == expected.shape, f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    assert found.device == expected.device, f"{what}: on {found.device}, expected {expected.device}"
    scale = max(expected.abs().max().item(), 1e-30)
    difference = (found - expected).abs().max().item() / scale
    assert difference <= tolerance, f"{what}: {difference:.3g} off, more than {tolerance:g}"
    return float(difference)


def same(found: Any, expected: Any, what: str) -> None:
    """
    Raises:
        AssertionError: they differ.
    """
    assert found == expected, f"{what}: {found!r}, expected {expected!r}"
