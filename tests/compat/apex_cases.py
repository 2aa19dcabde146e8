"""What the tests of the Apex shim share: small models, and a clean Amp for each test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.compat.apex.amp._amp_state import AmpState, _amp_state

__all__ = ["Net", "batches", "clean_amp", "make_net", "make_sgd", "same_parameters"]


@contextmanager
def clean_amp() -> Iterator[AmpState]:
    """Amp as in a new process, afterwards too."""
    try:
        yield _amp_state
    finally:
        if _amp_state.handle is not None:
            _amp_state.handle._deactivate()
        vars(_amp_state).clear()
        _amp_state.__init__()  # type: ignore[misc]


class Net(nn.Module):
    """Convolution, normalization with and without parameters, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(images)).relu().flatten(1))


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def make_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(6, 3, 6, 6, generator=generator), torch.randint(0, 5, (6,), generator=generator))
        for _ in range(count)
    ]


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
