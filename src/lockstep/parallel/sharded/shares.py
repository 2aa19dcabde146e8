"""Which rank owns which elements of each parameter, and the mean gradient of this rank's share."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

from lockstep.shm.algorithms import reduce_into, share_bounds
from lockstep.shm.kernels import Kernel, divide

__all__ = ["Share", "flat_of", "layout_of", "shaped_like", "share_out"]

# In elements: shares begin at whole cache lines, even for 16-bit numbers.
_ALIGNMENT = 64
# A parameter with fewer elements per rank than this goes to one rank as a whole.
_WORTH_CUTTING = 8 << 10


def share_out(parameters: Sequence[torch.Tensor], rank: int, loads: list[int], is_cut: bool = True) -> list[Share]:
    """Share parameters among ranks: large ones in equal parts, each small one to the rank with the fewest elements.

    Args:
        parameters: the same on all ranks.
        rank: this rank.
        loads: number of elements that each rank already owns; updated.
        is_cut: if False, every parameter goes to one rank as a whole.

    Returns:
        For each parameter the share of this rank.

    >>> [each.bounds for each in share_out([torch.empty(65536), torch.empty(10), torch.empty(20)], 0, [0, 0])]
    [[0, 32768, 65536], [0, 0, 10], [0, 20, 20]]
    """
    world_size = len(loads)
    found: dict[int, Share] = {}
    for index in sorted(range(len(parameters)), key=lambda each: -parameters[each].numel()):
        numel = parameters[index].numel()
        if is_cut and numel // world_size >= _WORTH_CUTTING:
            bounds = share_bounds(numel, world_size, _ALIGNMENT)
        else:
            owner = min(range(world_size), key=loads.__getitem__)
            bounds = [0 if each <= owner else numel for each in range(world_size + 1)]
        for each in range(world_size):
            loads[each] += bounds[each + 1] - bounds[each]
        found[index] = Share(parameters[index], bounds, rank)
    return [found[index] for index in range(len(parameters))]


def flat_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in the memory order of `like`, of the same shape; a view if possible."""
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.detach().view(-1)
    dense = torch.empty_like(like, device="meta")
    if tensor.stride() != dense.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `flat_of`: a flat tensor in the shape and strides of `like`."""
    dense = torch.empty_like(like, device="meta")
    return flat.as_strided(like.shape, dense.stride(), flat.storage_offset())


def layout_of(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of a tensor without gaps, which give each element's position; without dimensions of size 1."""
    sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return [size for size, _ in sizes], [stride for _, stride in sizes]


class Share:
    """This rank's share of one parameter.

    Its gradient is that of one backward pass: `expect_sum` gives the location of the sum over ranks, `expect` that of
    each rank's elements. The mean is computed there, once, when it is first needed.

    Args:
        parameter: the parameter; its shape and strides must not change.
        bounds: bounds of all ranks' shares, in elements of the flat parameter.
        rank: this rank.

    Attributes:
        first: index of this rank's first element.
        last: one past its last element.
        norms: norms that all ranks have computed together, by order; cleared when the gradient changes.
        carried: the mean of earlier backward passes that was not set to zero, to be added.
    """

    def __init__(self, parameter: torch.Tensor, bounds: Sequence[int], rank: int) -> None:
        # `.grad` of a parameter refers to this, which Python's garbage collector does not see.
        self._parameter = weakref.ref(parameter)
        self.bounds = bounds
        self.rank = rank
        self.first, self.last = bounds[rank], bounds[rank + 1]
        self.norms: dict[float, torch.Tensor] = {}
        self.carried: torch.Tensor | None = None
        self._mean: torch.Tensor | None = None
        self._sources: Sequence[torch.Tensor] = ()  # until the mean has been made
        self._kernel: Kernel | None = None  # None if the source is the sum
        self._divisor = 1

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter, which the optimizer keeps alive."""
        parameter = self._parameter()
        assert parameter is not None
        return parameter

    @property
    def gradient(self) -> torch.Tensor | None:
        """The parameter's `.grad`; None if the parameter was freed."""
        parameter = self._parameter()
        return None if parameter is None else parameter.grad

    @property
    def numel(self) -> int:
        """Number of elements of this rank."""
        return self.last - self.first

    @property
    def largest(self) -> int:
        """Number of elements of the rank with the most."""
        return max(last - first for first, last in itertools.pairwise(self.bounds))

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass has been sent, and its gradient was not dropped."""
        return self._mean is not None

    def expect(self, target: torch.Tensor, sources: Sequence[torch.Tensor], kernel: Kernel) -> None:
        """Note that a backward pass is sent.

        Args:
            target: where to compute the mean; one of the sources.
            sources: this share's elements from each rank, flat, once the ranks have met; a single one is the mean.
            kernel: averages them.
        """
        self._mean, self._sources, self._kernel = target, sources, kernel
        self.norms.clear()

    def expect_sum(self, total: torch.Tensor | None, count: int) -> None:
        """Note that a backward pass is sent.

        Args:
            total: the sum of this share's elements over all ranks, flat, once the ranks have met; its dtype may be
                wider than the gradient's. None if there are no elements.
            count: number of ranks.
        """
        if total is None or total.dtype != self.parameter.dtype:
            self._mean = torch.empty(self.numel, dtype=self.parameter.dtype, device="cpu")
        else:
            self._mean = total
        self._sources, self._kernel, self._divisor = (self._mean if total is None else total,), None, count
        self.norms.clear()

    def drop(self) -> None:
        """Drop the gradient of the last pass."""
        self._mean = self.carried = None
        self._sources = ()

    def carry(self) -> None:
        """Keep the mean of the last pass, to add it to the next one's. Call before a rank overwrites its elements."""
        self.carried = self.mean().clone()

    def settle(self) -> None:
        """Note that all elements of the mean have been computed, by `mean_of`."""
        self._sources, self.carried = (), None

    def mean(self) -> torch.Tensor:
        """The mean of this rank's elements over all ranks, flat. Local; the ranks have met since the backward pass."""
        assert self._mean is not None
        if self._sources:
            self.mean_of(0, self.numel)
            self.settle()
        return self._mean

    def mean_of(self, start: int, stop: int) -> torch.Tensor:
        """A part of the mean, in elements of this rank's share; compute each part once, then call `settle`."""
        assert self._mean is not None
        own = self._mean[start:stop]
        if self._sources and self._kernel is None:
            total = self._sources[0][start:stop]
            divide(total, self._divisor)
            if total.dtype != own.dtype:
                own.copy_(total)
        elif len(self._sources) > 1 and self._kernel is not None:
            reduce_into([own], [each[start:stop] for each in self._sources], self._kernel)
        if self._sources and self.carried is not None:
            own.add_(self.carried[start:stop])
        return own

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor of the parameter's shape, flat."""
        return flat_of(tensor, self.parameter)[self.first : self.last]
