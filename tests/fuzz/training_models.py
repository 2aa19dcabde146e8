"""The model and the data of random training programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from training_programs import NUM_HEADS, Program

__all__ = ["Net", "dataset"]

WIDTH = 9


class Net(nn.Module):
    """Every kind of parameter: of a convolution, tied, complex, without dimensions, empty, frozen at first."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        conv = nn.Conv2d(2, 3, 2)
        self.conv = conv.to(memory_format=torch.channels_last) if program.channels_last else conv
        self.trunk = nn.Sequential(nn.Linear(12, WIDTH), nn.Tanh())
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(NUM_HEADS)])
        self.tie()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        if program.sparse:
            self.words = nn.Embedding(4, WIDTH, sparse=True)
        self.double()
        self.turn = nn.Parameter(torch.randn(2, 2, dtype=torch.complex128))

    def tie(self) -> None:
        """One weight in two places, where the program wants that."""
        if self.program.tied:
            self.heads[1].weight = self.heads[0].weight

    def forward(self, inputs: Tensor, heads: tuple[int, ...]) -> Tensor:
        which, _, how = self.program.checkpoint.partition(" ")
        if which == "all":
            return checkpoint(self.run, inputs, heads, use_reentrant=bool(how))  # type: ignore[no-any-return]
        return self.run(inputs, heads)

    def run(self, inputs: Tensor, heads: tuple[int, ...]) -> Tensor:
        features = self.conv(inputs).relu().flatten(1)
        which, _, how = self.program.checkpoint.partition(" ")
        features = (
            checkpoint(self.trunk, features, use_reentrant=bool(how)) if which == "parts" else self.trunk(features)
        )
        features = features + self.frozen(features)
        if self.program.sparse:
            features = features + self.words((inputs.detach().flatten(1)[:, :2] > 0).sum(1) + 1)  # never row 0
        outputs = sum((self.heads[head](features) * (head + 1) for head in heads), torch.zeros(2, dtype=inputs.dtype))
        turned = outputs.to(torch.complex128) @ self.turn
        # Its gradients are bounded: no program diverges, and rounding stays what it is.
        return (turned.real.square() + turned.imag.square()).log1p() * self.scale + self.empty.sum()


def dataset(program: Program, shift: int) -> TensorDataset:
    """Samples of a program, `shift` more of them than it says: float64 [num_samples + shift, 2, 3, 3]."""
    generator = torch.Generator().manual_seed(program.seed + shift)
    return TensorDataset(torch.randn(program.num_samples + shift, 2, 3, 3, generator=generator, dtype=torch.float64))
