"""Sparse gradients, from layers with `sparse=True`, averaged by their entries.

[Note: sparse gradients] The gradient of `Embedding(sparse=True)` has an entry for each row that the batch looked up,
which differ between ranks, so it does not fit a bucket. After the buckets, the ranks exchange their numbers of entries,
and then the entries themselves, for all such parameters in one message. Each rank adds them up itself, in rank order,
16-bit floats in float32. The weights of an uneven batch are already in the entries, as in any gradient ([Note: exact
weighting] in `forward_pass.py`).

A gradient that is dense on any rank (a weight that a dense layer also uses) is dense on all of them after averaging, as
on one process.

[Note: entries of fillers] An optimizer for sparse gradients updates the rows that have an entry, SparseAdam even if it
is zero. The rows that a filler looks up may be in no batch of one process: a loader's filler repeats a sample, but a
user may supply another one (`samples(0)`). So a backward pass that includes a filler drops entries of zeros.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.agreement import collective_device, gather
from lockstep.parallel.graph import AccumulationHook, Listener, remove_all
from lockstep.torch_private.tensors import indices_of, make_sparse, values_of

__all__ = ["SparseGradients"]

_NO_GRADIENT, _DENSE = -1, -2  # in place of a number of entries
_ALIGNMENT_BYTES = 16  # that of the widest dtype
_INDEX_BYTES = 8
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # dtypes in which entries are added up


class SparseGradients:
    """Averages the gradients of some parameters of an engine by their entries.

    Args:
        parameters: parameters of layers with `sparse=True`; the same on all ranks.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup, backward: Listener) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._world_size = group.size()
        function = functools.partial(_without_zeros_of_fillers, weakref.ref(backward))
        hooks = [AccumulationHook(parameter, function, is_before=True) for parameter in parameters]
        weakref.finalize(self, remove_all, hooks).atexit = False  # the parameters may outlive the engine

    def gradient(self, index: int) -> torch.Tensor:
        """The gradient of a parameter as a sparse COO tensor, without entries if there is none. Local."""
        parameter = self._parameters[index]
        own = _normalised(parameter.grad)
        if own is None:
            shape = parameter.shape
            indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            return make_sparse(indices, parameter.new_empty((0, *shape[1:])).detach(), shape)
        return own if own.is_sparse else own.to_sparse(1)

    @torch.no_grad()
    def put(self, index: int, mean: torch.Tensor) -> None:
        """Set the gradient of a parameter, by writing into the existing one, which may have other references. Local."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        kind = mean.layout, _has_rows(mean)
        if gradient is not None and not gradient.requires_grad and (gradient.layout, _has_rows(gradient)) == kind:
            gradient.copy_(mean)
        else:
            parameter.grad = mean

    @torch.no_grad()
    def average(self) -> None:
        """Replace the gradients by their mean over ranks; it stays None if no rank has one. Collective."""
        if not self._parameters or self._world_size == 1:
            return
        own = [_normalised(parameter.grad) for parameter in self._parameters]
        device = collective_device(self._group, self._device)
        counts = torch.tensor([_count(gradient) for gradient in own], dtype=torch.int64, device=device)
        by_rank = gather(counts, self._group).tolist()
        sparse = []
        for index, of_ranks in enumerate(zip(*by_rank, strict=True)):
            if _DENSE in of_ranks:
                gradient = own[index]
                mean = torch.zeros_like(self._parameters[index]) if gradient is None else gradient.to_dense().clone()
                dist.all_reduce(mean.div_(self._world_size), group=self._group)
                self.put(index, mean)
            elif max(of_ranks) > _NO_GRADIENT:
                sparse.append(index)
        self._average_entries(sparse, own, by_rank)

    def _average_entries(
        self, indices: Sequence[int], own: Sequence[torch.Tensor | None], by_rank: Sequence[Sequence[int]]
    ) -> None:
        """The same for parameters without a dense gradient on any rank. Collective."""
        parameters = [self._parameters[index] for index in indices]
        row_bytes = [parameter.shape[1:].numel() * parameter.element_size() for parameter in parameters]
        widths = [
            (index, each) for index, width in zip(indices, row_bytes, strict=True) for each in (_INDEX_BYTES, width)
        ]
        sizes = [[max(of_rank[index], 0) * width for index, width in widths] for of_rank in by_rank]
        most = max(sum(map(_padded, of_rank)) for of_rank in sizes)
        mine = torch.zeros(most, dtype=torch.uint8, device=self._device)
        start = 0
        for index in indices:
            gradient = own[index]
            for part in () if gradient is None else (gradient.indices().flatten(), gradient.values()):
                flat = part.contiguous().to(self._device).flatten()
                mine[start : start + flat.nbytes] = flat.view(torch.uint8)
                start += _padded(flat.nbytes)
        rows = [torch.empty_like(mine) for _ in by_rank]
        if len(mine):
            dist.all_gather(rows, mine, group=self._group)
        parts = list(map(_cut, rows, sizes))
        for number, index in enumerate(indices):
            self.put(index, self._add_up(parameters[number], [each[2 * number : 2 * number + 2] for each in parts]))

    def _add_up(self, parameter: torch.Tensor, parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The mean for one parameter, from the bytes of each rank's indices and values."""
        shape, dtype = parameter.shape, parameter.dtype
        indices = torch.cat([each.view(torch.int64) for each, _ in parts])
        values = torch.cat([each.view(dtype) for _, each in parts]).view(len(indices), *shape[1:])
        values = values.to(_WIDE.get(dtype, dtype))
        total = make_sparse(indices.unsqueeze(0), values, shape).coalesce()
        mean = (total.values() / self._world_size).to(dtype)
        return make_sparse(total.indices(), mean, shape, is_coalesced=True).to(parameter.device)


def _normalised(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient without its graph: coalesced if its entries are rows, otherwise dense."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return gradient.coalesce() if _has_rows(gradient) else gradient.to_dense()


def _has_rows(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1


def _count(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NO_GRADIENT
    return gradient.indices().size(1) if gradient.is_sparse else _DENSE


def _cut(row: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Split a row of bytes into parts of these sizes, each padded."""
    padded = list(map(_padded, sizes))
    return [part[:size] for part, size in zip(torch.split(row[: sum(padded)], padded), sizes, strict=True)]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _without_zeros_of_fillers(
    backward: weakref.ref[Listener], gradients: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...] | None:
    """A hook before a gradient is accumulated. See [Note: entries of fillers]."""
    alive = backward()
    return tuple(map(_without_zeros, gradients)) if alive is not None and alive.has_filler else None


def _without_zeros(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or not _has_rows(gradient):
        return gradient
    indices, values = indices_of(gradient.detach()), values_of(gradient.detach())
    is_kept = (values != 0).flatten(1).any(1)
    return make_sparse(indices[:, is_kept], values[is_kept], gradient.shape)
