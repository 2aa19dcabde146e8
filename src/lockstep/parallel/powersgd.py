"""PowerSGD: gradients are sent as products of two thin matrices, with error feedback.

A communication hook for `lockstep.DistributedDataParallel` and for torch's, over any group:

    >>> import lockstep, torch
    >>> with lockstep.init(device="cpu") as world:
    ...     model = lockstep.DistributedDataParallel(torch.nn.Linear(64, 64))
    ...     model.register_comm_hook(PowerSGDState(matrix_rank=4), powersgd_hook)

[Note: algorithm] Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, algorithms 1 and 2. A gradient of shape (n, …) is a matrix M of n rows and m columns. Each
rank adds its error of the last step. Then, with Q of shape m x r from the last step::

    P = orthonormal basis of mean(M Q)        n x r sent
    Q = mean(M^T P)                           m x r sent
    result = P Q^T                            the same on all ranks
    error = M - result                        kept by each rank

[Note: bounds] The result is the orthogonal projection of mean(M) on r directions. So

* the omitted part, mean(error) = (1 - P P^T) mean(M), is never larger than mean(M) itself, in the Frobenius norm;
* a mean(M) of rank r or less is exact up to rounding (if Q is not orthogonal to its rows);
* nothing is lost: the results of T steps add up to the mean gradients of T steps, minus the mean error kept at the end.

Vectors, and matrices that would hardly shrink, are sent uncompressed. So are all gradients in the first steps, whose
directions predict later ones poorly.

[Note: overflow] Gradients may be infinite or nan, with a `GradScaler` even by design. Such a gradient on any rank makes
mean(M Q) non-finite, which all ranks see. They then return nan for that matrix, as an all_reduce would, and keep error
and Q of the previous step: otherwise all later results would be non-finite. This is decided on the device, without the
host waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from lockstep.errors import InputError
from lockstep.torch_private.stores import GradBucket

__all__ = ["PowerSGDState", "powersgd_hook"]


@dataclass
class _Memory:
    """The state of one parameter between steps: its error, and Q."""

    error: torch.Tensor  # in the shape of the matrix: (n, m)
    q: torch.Tensor  # (m, r)


@dataclass(eq=False)
class PowerSGDState:
    """The state of PowerSGD on one rank.

    Args:
        process_group: the group over which gradients are averaged; by default the default group.
        matrix_rank: r, the number of columns of the thin matrices. Larger is more exact but sends more; 1 to 4 are
            usual.
        start_step: number of initial steps without compression.
        min_compression: a matrix that would not shrink by this factor is sent uncompressed.
        seed: seed of the first Q; the same on all ranks.

    Attributes:
        step: steps so far.
        sent_numel: number of elements that this rank has passed to all_reduce so far.
        exact_numel: the same without compression.

    Raises:
        InputError: an invalid number.
    """

    process_group: dist.ProcessGroup | None = None
    matrix_rank: int = 2
    start_step: int = 10
    min_compression: float = 2.0
    seed: int = 0
    step: int = field(default=0, init=False)
    sent_numel: int = field(default=0, init=False)
    exact_numel: int = field(default=0, init=False)
    _memories: dict[torch.Tensor, _Memory] = field(default_factory=dict, init=False, repr=False)  # buckets may change

    def __post_init__(self) -> None:
        if self.matrix_rank < 1 or self.start_step < 0 or self.min_compression < 1:
            raise InputError(
                f"PowerSGDState(matrix_rank={self.matrix_rank}, start_step={self.start_step}, "
                f"min_compression={self.min_compression}): expected a matrix_rank of at least 1, a start_step of at "
                "least 0 and a min_compression of at least 1"
            )

    def compresses(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient of that shape is sent as thin matrices. Local."""
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        rows = gradient.size(0)
        columns = gradient.numel() // rows
        rank = min(self.matrix_rank, rows, columns)
        return (rows + columns) * rank * self.min_compression <= gradient.numel()

    def memory(self, parameter: torch.Tensor) -> _Memory:
        """The state of a parameter; initially no error, and a random Q that is the same on all ranks. Local."""
        kept = self._memories.get(parameter)
        if kept is None:
            rows = parameter.size(0)
            columns = parameter.numel() // rows
            generator = torch.Generator().manual_seed(self.seed + len(self._memories))
            q = torch.randn(columns, min(self.matrix_rank, rows, columns), generator=generator, device="cpu")
            dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
            error = torch.zeros(rows, columns, dtype=dtype, device=parameter.device)
            kept = self._memories[parameter] = _Memory(error, q.to(device=parameter.device, dtype=dtype))
        return kept

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors of one dtype with their mean over ranks. Collective; one call for all of them."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.sent_numel += flat.numel()
        dist.all_reduce(flat, group=self.process_group)
        flat.div_(dist.get_world_size(self.process_group))
        for tensor, mean in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view(tensor.shape))


def powersgd_hook(state: PowerSGDState, bucket: Any) -> Future[torch.Tensor]:
    """Average one bucket of gradients by PowerSGD; see [Note: algorithm]. Collective.

    Mirrors `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook`.

    Args:
        state: made with the same arguments on all ranks.
        bucket: torch's `GradBucket`, or ours.

    Returns:
        A finished future of the bucket's flat tensor, which holds the mean.
    """
    given: GradBucket = bucket
    buffer = given.buffer()
    with torch.no_grad():
        state.exact_numel += buffer.numel()
        if state.step < state.start_step:
            state.average([buffer])
        else:
            _average_compressed(state, given.gradients(), given.parameters())
    if given.is_last():
        state.step += 1
    future: Future[torch.Tensor] = Future()
    future.set_result(buffer)
    return future


# torch compares these with the types themselves.
powersgd_hook.__annotations__.update({"bucket": GradBucket, "return": Future[torch.Tensor]})


def _average_compressed(
    state: PowerSGDState, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> None:
    plain = [gradient for gradient in gradients if not state.compresses(gradient)]
    matrices: list[tuple[torch.Tensor, torch.Tensor, _Memory]] = []  # gradient, M, memory
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if state.compresses(gradient):
            memory = state.memory(parameter)
            matrices.append((gradient, memory.error + gradient.reshape(memory.error.shape), memory))
    bases = [matrix @ memory.q for _, matrix, memory in matrices]
    for group in _by_dtype([*plain, *bases]):
        state.average(group)
    are_finite = [basis.isfinite().all() for basis in bases]  # see [Note: overflow]
    bases = [
        torch.linalg.qr(torch.where(is_finite, basis, 0.0)).Q
        for basis, is_finite in zip(bases, are_finite, strict=True)
    ]
    qs = [matrix.T @ basis for basis, (_, matrix, _) in zip(bases, matrices, strict=True)]
    for group in _by_dtype(qs):
        state.average(group)
    for basis, q, is_finite, (gradient, matrix, memory) in zip(bases, qs, are_finite, matrices, strict=True):
        gradient.copy_((basis @ q.T).view(gradient.shape))
        is_kept = is_finite & gradient.isfinite().all()  # 16-bit values may have overflown only now
        # The part that this rank has not sent.
        error = matrix.sub_(gradient.reshape(matrix.shape))
        memory.error, memory.q = torch.where(is_kept, error, memory.error), torch.where(is_kept, q, memory.q)
        gradient.masked_fill_(~is_kept, torch.nan)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
