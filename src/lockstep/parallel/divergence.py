"""Compares the parameters of all ranks from time to time, and raises ModelMismatch if they differ.

Averaged gradients keep parameters equal if nothing else differs. Ranks diverge without any collective failing when, for
example, one rank lowers its learning rate by its own loss, skips a step, adds noise of its own or loads another
checkpoint.

[Note: comparisons] In the first averaging the ranks compare some values of each parameter, as they were in the first
backward pass: a script may have changed them since it wrapped the model. From then on one value, of another
parameter each time, travels with every averaging in shared memory; if the values of two ranks differ, the ranks compare
parameters again. Other groups would need a collective for it: those compare in averaging 4, 16, 64 and so on. With the
parameters they compare which batches the gradients come from (`claims.fingerprint_of`), which in shared memory travels
with every averaging, too.

[Note: rounding] On processors of different kinds, or with other numbers of threads, ranks may step the same gradients
to values that differ in the last bits. So a difference behind the first averaging is an error only if it is far
greater than rounding; else it is looked at again when there have been twice as many averagings.

[Note: different on purpose] Local SGD steps by gradients of `no_sync()`, and sharpness-aware minimisation may move each
rank's parameters by them for a moment. So a rank whose parameters have changed behind a pass that was not averaged is
not compared any more. What a communication hook returns may differ between ranks, and those that have joined (`Join`)
stay behind: there, nothing is compared but the first averaging.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from lockstep.errors import ModelMismatch
from lockstep.parallel.claims import check_fingerprints
from lockstep.torch_private.autograd import version_of

__all__ = ["DivergenceCheck"]

_COMPARED_VALUES = 4096  # of each parameter
_MEASURED_PARAMETERS = 8  # of those that differ
_COLLECTIVE_EVERY = 4  # times as many averagings
_POSITION_STEP = 2654435761  # from one value to the next of a parameter: it goes round, and everywhere
# Times the distance from 1.0 to the next number, relative to the greatest value; and at most.
_ROUNDING, _MOST_ROUNDING = 1000, 0.01
_UNKNOWN, _ZERO = 0, 1  # samples
_INTEGER, _FLOAT = struct.Struct("<q"), struct.Struct("<d")

_ADVICE_AT_FIRST = (
    ". All had those of rank 0 when DistributedDataParallel was made: initialise or load the model before, or do so on "
    "every rank alike. After lockstep.init each rank draws random numbers of its own"
)
_ADVICE = (
    "So a rank has another learning rate (give ReduceLROnPlateau, and whatever else goes by a loss, that of all ranks: "
    "lockstep.mean(loss * len(y), len(y))), has left out a step, or has changed parameters by itself: loaded them, or "
    "added noise that it has drawn. All ranks must do so alike"
)


class DivergenceCheck:
    """Compares the parameters of an engine over its ranks.

    Args:
        names: of the parameters, the same on all ranks.
        parameters: the same shapes and dtypes on all ranks.
        group: the ranks that compare.
        device: where the group's collectives want their tensors.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._names = list(names)
        self._parameters = list(parameters)
        self._group = group
        self._device = device
        self._first: list[int] | None = None  # hashes of the parameters in the first backward pass
        self._num_averagings = 0
        self._next_look = 1  # with so many averagings
        self._version_accumulated: int | None = None  # of all parameters, when a pass began that is not averaged
        self._is_known = True  # see [Note: different on purpose]

    @property
    def averages_nothing(self) -> bool:
        """Whether nothing was averaged, and nothing came that was not to be averaged."""
        return self._num_averagings == 0 and self._version_accumulated is None

    def note(self) -> None:
        """A backward pass begins. Local."""
        if self._num_averagings == 0 and self._first is None:
            self._first = _digests(self._parameters)

    def note_accumulated(self) -> None:
        """A gradient has come that is not to be averaged, and nobody has stepped by it yet. Local."""
        self.note()
        if self._version_accumulated is None:
            self._version_accumulated = self._version()

    def sample(self) -> int:
        """One value of one parameter, in 64 bits, others in other averagings; 0 where it is not to be compared. Local.

        Call it in each averaging.
        """
        if self._version_accumulated is not None:
            self._is_known = self._is_known and self._version_accumulated == self._version()
            self._version_accumulated = None
        parameter = self._parameters[self._num_averagings % len(self._parameters)]
        numel = parameter.numel()
        if not self._is_known or parameter.device.type != "cpu" or numel == 0:
            return _UNKNOWN
        offset = _offset_of(parameter, self._num_averagings * _POSITION_STEP % numel)
        value = torch.as_strided(parameter, (), (), offset).item()
        bits: int = _INTEGER.unpack(_FLOAT.pack(value.real))[0]
        return bits or _ZERO

    def compare(self, samples: Sequence[int] | None, batches: int = 0, is_first_only: bool = False) -> None:
        """Compare parameters, if it is time, or samples differ. Collective; call it in each averaging.

        Args:
            samples: of all ranks; None if they are not known.
            batches: which ones this rank's gradients come from, see `claims.fingerprint_of`; 0 if not known.
            is_first_only: the ranks may hold different parameters from the first averaging on.

        Raises:
            CollectiveMismatch: on every rank; the gradients come from different batches, or from different data.
            ModelMismatch: on every rank; names the first parameter that differs.
        """
        self._num_averagings += 1
        is_first = self._num_averagings == 1
        differ = samples is None or len({sample for sample in samples if sample != _UNKNOWN}) > 1
        if self._num_averagings < self._next_look or not (is_first or (differ and not is_first_only)):
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self._next_look = self._num_averagings * (_COLLECTIVE_EVERY if samples is None else 2)
        differing = self._differing(is_first, batches)
        if not differing:
            return
        if is_first:
            self._raise(differing, min(differing), _ADVICE_AT_FIRST)
        index, distance = self._farthest(sorted(differing)[:_MEASURED_PARAMETERS])
        if not distance <= min(_ROUNDING * torch.finfo(self._parameters[index].dtype).eps, _MOST_ROUNDING):
            self._raise(
                differing,
                index,
                f", by up to {distance:.1g} times its greatest value. All were alike {self._num_averagings - 1} "
                f"averagings ago, and have got the same gradients since. {_ADVICE}",
            )

    def _raise(self, differing: dict[int, int], index: int, what: str) -> NoReturn:
        rank = dist.get_process_group_ranks(self._group)[differing[index]]
        raise ModelMismatch(
            f"ranks hold different values of {len(differing)} parameter(s), such as {self._names[index]} on rank "
            f"{rank}{what}"
        )

    def _version(self) -> int:
        return sum(map(version_of, self._parameters))

    def _differing(self, is_first: bool, batches: int) -> dict[int, int]:
        """Parameters that differ: index -> a rank of the group that has another than the first. Collective.

        Raises:
            CollectiveMismatch: what averaged is of different batches, see `compare`.
        """
        digests = self._first if is_first else None
        self._first = None
        own = [batches, int(self._is_known), *(digests or _digests(self._parameters))]
        values = self._gather(torch.tensor(own, device="cpu"))
        check_fingerprints(values[:, 0].tolist())
        values = values[:, 1:]
        known = values[:, 0].nonzero().flatten()
        if len(known) < 2:
            return {}
        others = values[known, 1:] != values[known[0], 1:]
        return {index: int(known[others[:, index]][0]) for index in others.any(0).nonzero().flatten().tolist()}

    def _farthest(self, indices: Sequence[int]) -> tuple[int, float]:
        """Of these, the parameter that is farthest apart, and how far, relative to its greatest value. Collective."""
        parts = [_some_values(self._parameters[index]) for index in indices]
        parts = [(torch.view_as_real(part) if part.is_complex() else part).reshape(-1).double() for part in parts]
        rows = self._gather(torch.cat([parts[0].new_tensor([float(self._is_known)]), *parts]))
        found = []
        for index, values in zip(
            indices, torch.split(rows[rows[:, 0] > 0, 1:], [len(part) for part in parts], 1), strict=True
        ):
            least, greatest = values.amin(0), values.amax(0)
            are_same = (least == greatest) | values.isnan().all(0)
            distance = torch.where(are_same, 0.0, greatest - least).max() / values.abs().max().clamp(min=1e-300)
            found.append((float(distance.nan_to_num(torch.inf)), index))
        distance_of_all, index = max(found)
        return index, distance_of_all

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, stacked, on the host. Collective."""
        own = own.to(self._device)
        rows = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(rows, own, group=self._group)
        return torch.stack(rows).cpu()


def _offset_of(tensor: torch.Tensor, position: int) -> int:
    """Where the element lies in its storage that is at a position of the flattened tensor."""
    offset = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return offset + position
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        position, index = divmod(position, size)
        offset += index * stride
    return offset


def _digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A hash of some values of each tensor, not negative. Local; a GPU is waited for once."""
    parts = [_some_values(tensor).view(torch.uint8) for tensor in tensors]
    if len({part.device for part in parts}) == 1:
        parts = list(torch.split(torch.cat(parts).cpu(), [len(part) for part in parts]))
    texts = [part.cpu().numpy().tobytes() for part in parts]
    return [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1 for text in texts]


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _COMPARED_VALUES)].contiguous()
