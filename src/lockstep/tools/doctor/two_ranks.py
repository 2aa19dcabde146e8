"""The function of the two ranks of `lockstep doctor`."""

from __future__ import annotations

__all__ = ["add_ones"]


def add_ones() -> float:
    """The sum of a one from each rank. Collective."""
    import torch
    import torch.distributed as dist

    import lockstep

    with lockstep.init(device="cpu"):
        ones = torch.ones(1000)
        dist.all_reduce(ones)
        return float(ones.max())
