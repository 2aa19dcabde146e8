"""Checks that the ranks of an engine do the same, when the model is wrapped and with each averaging.

A difference is an error.

Each rank sends a few words with every averaging (`Words`): its claim, that is its interpretation of the batch; which
batches of a loader its gradients come from; one value of one parameter; whether gradients bypassed the engine. On a
lockstep group of one host they are in shared memory, and the claim is part of the description that the averaging
compares anyway. On other groups it travels with the gradients (`claims.py`), and the rest is compared only now and
then.

All checks compare ranks with each other, so none can fail if the ranks do the same.

[Note: comparisons] In the first averaging the ranks compare some values of each parameter, as of the first backward
pass: a script may have changed them since it wrapped the model. From then on, in shared memory, every averaging carries
one value, of another parameter each time; if it differs between ranks, or gradients bypassed the engine on one, the
ranks compare parameters again. Other groups need a collective for this, and compare in averaging 4, 16, 64 and so on,
or with a communication hook only in the first. With the parameters they compare the batches that the gradients come
from, which in shared memory also come with every averaging. This detects data that differ between ranks, and a rank
that skipped a backward pass. A rank whose batches have lost their tags takes no part.

[Note: rounding] On different processors, or with different numbers of threads, the same gradients may lead to
parameters that differ in the last bits. So a difference after the first averaging is an error only if it is far
greater than rounding; otherwise it is checked again after twice as many averagings.

[Note: different on purpose] Local SGD steps with gradients from `no_sync()`, and sharpness-aware minimisation may use
them to move each rank's parameters temporarily. So a rank whose parameters changed after a pass that was not averaged
is no longer compared. The results of a communication hook may differ between ranks, and ranks that have joined (`Join`)
keep older parameters: then only the first averaging is compared. When the world is left, all are compared
(`drift/comparison.py`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from lockstep.agreement import gather, texts_that_differ
from lockstep.comm.backend import mismatch_in
from lockstep.comm.flight_recorder import fingerprint
from lockstep.comm.staging import is_capturing
from lockstep.comm.wording import describe_tensor
from lockstep.drift.comparison import rounding_of
from lockstep.errors import ModelMismatch
from lockstep.parallel.claims import Claims
from lockstep.torch_private.autograd import version_of

__all__ = ["NO_WORDS", "RankAgreement", "Words", "check_same_model", "describe_batches", "fingerprint_of"]

_COMPARED_VALUES = 4096  # per parameter
_MEASURED_PARAMETERS = 8  # of those that differ
_COLLECTIVE_EVERY = 4  # factor between the averagings that are compared
_POSITION_STEP = 2654435761  # between the compared positions of a parameter; modulo its size it reaches all of them
_UNKNOWN, _ZERO = 0, 1  # values of `Words.sample`
_STRAYED = 1  # a value of `Words.signs`
_LOOKS_AT_STRAYS = 3  # comparisons after which gradients that bypass the engine count as equal, as a regulariser's are
_MAX_SHOWN = 4
_INTEGER, _FLOAT = struct.Struct("<q"), struct.Struct("<d")
_NAME = re.compile(r"samples (\d+) to \d+ of epoch (\d+)")
_FIRST_BITS, _EPOCH_BITS, _HASH_BITS = 32, 12, 18
_FIRST_MASK, _EPOCH_MASK, _HASH_MASK = (1 << _FIRST_BITS) - 1, (1 << _EPOCH_BITS) - 1, (1 << _HASH_BITS) - 1

_ADVICE_ON_DATA = (
    "their loaders hold different samples, or the same in another order. All ranks need the same. Ranks differ in "
    "what they draw without a seed or once the model trains (data, a split, a shuffle, negatives), find in a folder, "
    "or collect from a loader (features, or losses that become a sampler's weights). Draw with one seed on all ranks, "
    "such as torch.Generator().manual_seed(0) or np.random.default_rng(epoch); sort what is found; combine what ranks "
    "collected with lockstep.all_gather; give each loader the same seed and all of the data, which it splits. If "
    "each rank has its own data, use a loader with rank=0 and world_size=1"
)
_ADVICE_ON_BATCHES = (
    "One rank has left out a backward pass, or used an extra batch. Every rank must take the batches of a "
    "lockstep.DataLoader in the same order, and run the same backward passes. If one skips a step (a loss that is "
    "not finite, an error), all must: agree on it first with lockstep.any(flag). A closure must return the loss of all "
    "ranks: lockstep.mean(loss * len(y), len(y))"
)
_ADVICE_AT_FIRST = (
    "All had rank 0's values when DistributedDataParallel was created. Initialize or load the model before "
    "that, or identically on every rank. Once the model trains, each rank draws its own random numbers"
)
_ADVICE_ON_PARAMETERS = (
    "So one rank has a different learning rate (give ReduceLROnPlateau, and anything else that uses a loss, the loss "
    "of all ranks: lockstep.mean(loss * len(y), len(y))), has left out a step, or has changed parameters by itself: "
    "loaded them, added noise, or clipped its gradients by a value of its own. All ranks must do the same"
)
_ADVICE_ON_STRAYS = (
    "Since then, gradients bypassed DistributedDataParallel, which averages those of its own forward passes. Call "
    "model(x), where model = lockstep.DistributedDataParallel(net), not net(x) or model.module(x). If a loss "
    "contains gradients (create_graph=True), call backward() once, on the whole loss"
)


class Words(NamedTuple):
    """The data that one rank sends with an averaging.

    Attributes:
        claim: its interpretation of the batches, as readable text that is compared; "" for none.
        batches: the batches that the gradients come from, see `fingerprint_of`; 0 if unknown.
        sample: one value of one parameter, in 64 bits; 0 if it is not compared.
        signs: 1 if gradients bypassed the engine, else 0.
    """

    claim: str = ""
    batches: int = 0
    sample: int = _UNKNOWN
    signs: int = 0


NO_WORDS = Words()


def fingerprint_of(batches: Collection[tuple[str, int]]) -> int:
    """Batches as one number: first sample and epoch of one of them, and a hash of all.

    Args:
        batches: name and fingerprint of each: a name such as "samples 4 to 7 of epoch 0", or "" if unknown; and a
            number that identifies its data.

    Returns:
        A positive number; 0 if any batch is unknown, or there is none.

    >>> describe_batches(fingerprint_of([("samples 4 to 7 of epoch 2", 0)]))
    'samples 4 … of epoch 2'
    """
    in_order = sorted(batches)
    names = [_NAME.fullmatch(name) for name, _ in in_order]
    if not names or names[0] is None or None in names:
        return 0
    first, epoch = int(names[0][1]) & _FIRST_MASK, int(names[0][2]) & _EPOCH_MASK
    short = crc32(str(in_order).encode()) & _HASH_MASK
    return (short << _EPOCH_BITS | epoch) << _FIRST_BITS | first | 1 << 62


def describe_batches(value: int) -> str:
    """The batch that a number from `fingerprint_of` describes."""
    return f"samples {value & _FIRST_MASK} … of epoch {value >> _FIRST_BITS & _EPOCH_MASK}"


class RankAgreement:
    """Collects one engine's words about its steps, and compares them with those of other ranks.

    Args:
        names: names of the parameters, the same on all ranks.
        parameters: the parameters, with the same shapes and dtypes on all ranks.
        group: the ranks that compare.
        device: device of tensors in the group's collectives.

    Attributes:
        claims: compares claims over groups that do not compare descriptions.
        sends_samples: whether words are sent to other ranks with each averaging.
        num_averagings: number of averagings so far.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._names = list(names)
        self._parameters = list(parameters)
        self._on_cpu = [each.device.type == "cpu" and each.numel() > 0 for each in parameters]
        self._group = group
        self._device = device
        self._claims: set[str] = set()  # from the backward passes since the last averaging
        self._batches: set[tuple[str, int]] = set()  # their batches, and fingerprints
        self._has_strayed = False
        self._looks_at_strays_left = _LOOKS_AT_STRAYS
        self._first: list[int] | None = None  # hashes of the parameters in the first backward pass
        self.num_averagings = 0
        self._next_look = 1  # number of averagings at the next comparison
        self._version_accumulated: int | None = None  # versions of all parameters when a pass without averaging began
        self._is_known = True  # see [Note: different on purpose]
        self.sends_samples = True
        self.claims = Claims(group, device)

    # ---- what happens between two averagings ------------------------------------------------------

    def pass_begins(self) -> None:
        """A backward pass that will be averaged begins. Local."""
        if self.num_averagings == 0 and self._first is None:
            self._first = _digests(self._parameters)

    def gradient_accumulates(self) -> None:
        """A gradient has come that is not averaged, and that no step has used yet. Local."""
        self.pass_begins()
        if self._version_accumulated is None:
            self._version_accumulated = self._version()

    def gradient_strays(self) -> None:
        """A gradient has come from outside all forward passes of the engine. Local."""
        self._has_strayed = True

    @property
    def has_claims(self) -> bool:
        """Whether there are claims for gradients since the last averaging."""
        return bool(self._claims)

    def claim(self, text: str, batch: str, batch_fingerprint: int = 0) -> None:
        """Add the interpretation of a forward pass that gradients come from. Local.

        Args:
            text: readable text that is compared.
            batch: name of its batch; "" if unknown.
            batch_fingerprint: fingerprint of its data; 0 if unknown.
        """
        self._claims.add(text)
        self._batches.add((batch, batch_fingerprint))

    def forget_claims(self) -> None:
        """Forget claims whose gradients were discarded. Local."""
        if self._claims:
            self._claims, self._batches = set(), set()

    # ---- the exchange -----------------------------------------------------------------------------

    def take_words(self) -> Words:
        """This rank's words for this averaging. Local."""
        signs = _STRAYED if self._has_strayed and self._looks_at_strays_left else 0
        texts = sorted(self._claims)  # the order of forward passes does not matter
        if len(texts) > _MAX_SHOWN:
            rest = texts[_MAX_SHOWN:]
            texts[_MAX_SHOWN:] = [f"{len(rest)} more ({fingerprint(str(rest)):x})"]
        batches = 0 if ("", 0) in self._batches else fingerprint_of(self._batches)
        words = Words(", ".join(texts), batches, self._sample(), signs)
        self.forget_claims()
        return words

    def compare(self, by_rank: Sequence[Words] | None, own: Words = NO_WORDS, is_first_only: bool = False) -> None:
        """Compare the ranks' words, and parameters if it is time. Collective; called in each averaging.

        Args:
            by_rank: the words of all ranks of the group; None if unknown.
            own: the words of this rank.
            is_first_only: whether ranks may hold different parameters after the first averaging.

        Raises:
            CollectiveMismatch: on every rank; the gradients come from different batches or data.
            ModelMismatch: on every rank; names the first parameter that differs.
        """
        self.num_averagings += 1
        self._has_strayed = False
        is_first = self.num_averagings == 1
        if by_rank is None:
            is_due = not is_first_only and self.num_averagings >= self._next_look
            has_strayed = False
        else:
            self._compare_batches([words.batches for words in by_rank])
            has_strayed = any(words.signs for words in by_rank)
            self._looks_at_strays_left -= has_strayed
            samples = {words.sample for words in by_rank}
            samples.discard(_UNKNOWN)
            differ = len(samples) > 1 and self.num_averagings >= self._next_look
            is_due = (differ or has_strayed) and not is_first_only
        if not (is_first or is_due) or is_capturing(self._parameters[0].device):
            return
        self._next_look = self.num_averagings * (_COLLECTIVE_EVERY if by_rank is None else 2)
        self._compare_parameters(is_first, own, has_strayed)

    # ---- claims and batches -----------------------------------------------------------------------

    def _compare_batches(self, batches: Sequence[int]) -> None:
        if len({value for value in batches if value}) < 2:
            return
        known = {rank: describe_batches(value) for rank, value in enumerate(batches) if value}
        if len(set(known.values())) == 1:
            what, advice = f"{known.popitem()[1]}, but with different data", _ADVICE_ON_DATA
            raise mismatch_in(self._group, f"the ranks averaged gradients of {what}: {advice}")
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in known.items())
        what = f"different batches (ranks as numbered in the group):\n{lines}\n{_ADVICE_ON_BATCHES}"
        raise mismatch_in(self._group, f"the ranks averaged gradients of {what}")

    # ---- parameters -------------------------------------------------------------------------------

    def _sample(self) -> int:
        if self._version_accumulated is not None:
            self._is_known = self._is_known and self._version_accumulated == self._version()
            self._version_accumulated = None
        index = self.num_averagings % len(self._parameters)
        if not (self.sends_samples and self._is_known and self._on_cpu[index]):
            return _UNKNOWN
        parameter = self._parameters[index]
        offset = _offset_of(parameter, self.num_averagings * _POSITION_STEP % parameter.numel())
        value = torch.as_strided(parameter, (), (), offset).item()
        bits: int = _INTEGER.unpack(_FLOAT.pack(value.real))[0]
        return bits or _ZERO

    def _compare_parameters(self, is_first: bool, own: Words, has_strayed: bool) -> None:
        differing = self._differing(is_first, own.batches)
        if not differing:
            return
        if is_first:
            self._raise(differing, min(differing), "", _ADVICE_AT_FIRST)
        index, distance = self._farthest(sorted(differing)[:_MEASURED_PARAMETERS])
        if not distance <= rounding_of(self._parameters[index].dtype):
            what = (
                f", by up to {distance:.1g} times its largest magnitude. They were equal {self.num_averagings - 1} "
                "averagings ago, and have received the same gradients since"
            )
            self._raise(differing, index, what, _ADVICE_ON_STRAYS if has_strayed else _ADVICE_ON_PARAMETERS)

    def _raise(self, differing: dict[int, int], index: int, what: str, advice: str) -> NoReturn:
        rank = dist.get_process_group_ranks(self._group)[differing[index]]
        raise ModelMismatch(
            f"ranks hold different values of {len(differing)} parameter(s), such as {self._names[index]} on rank "
            f"{rank}{what}. {advice}"
        )

    def _version(self) -> int:
        return sum(map(version_of, self._parameters))

    def _differing(self, is_first: bool, batches: int) -> dict[int, int]:
        """Parameters that differ: index -> a rank of the group whose values differ from the first rank's. Collective.

        Raises:
            CollectiveMismatch: the averaged gradients are from different batches.
        """
        digests = self._first if is_first else None
        self._first = None
        own = [batches, int(self._is_known), *(digests or _digests(self._parameters))]
        values = gather(torch.tensor(own, device=self._device), self._group)
        self._compare_batches(values[:, 0].tolist())
        values = values[:, 1:]
        known = values[:, 0].nonzero().flatten()
        if len(known) < 2:
            return {}
        others = values[known, 1:] != values[known[0], 1:]
        return {index: int(known[others[:, index]][0]) for index in others.any(0).nonzero().flatten().tolist()}

    def _farthest(self, indices: Sequence[int]) -> tuple[int, float]:
        """The parameter that differs most, and by how much relative to its largest value. Collective."""
        parts = [_some_values(self._parameters[index]) for index in indices]
        parts = [(torch.view_as_real(part) if part.is_complex() else part).reshape(-1).double() for part in parts]
        own = torch.cat([parts[0].new_tensor([float(self._is_known)]), *parts])
        rows = gather(own.to(self._device), self._group)
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


def _offset_of(tensor: torch.Tensor, position: int) -> int:
    """Offset in the storage of the element at a position of the flattened tensor."""
    offset = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return offset + position
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        position, index = divmod(position, size)
        offset += index * stride
    return offset


def _digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A non-negative hash of some values of each tensor. Local; waits for a GPU once."""
    parts = [_some_values(tensor).view(torch.uint8) for tensor in tensors]
    if len({part.device for part in parts}) == 1:
        parts = list(torch.split(torch.cat(parts).cpu(), [len(part) for part in parts]))
    texts = [part.cpu().numpy().tobytes() for part in parts]
    return [fingerprint(text) for text in texts]


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _COMPARED_VALUES)].contiguous()


# ---- when the model is wrapped -------------------------------------------------------------------


def check_same_model(
    tensors: Mapping[str, torch.Tensor], settings: Mapping[str, object], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Compare names, shapes, dtypes, memory formats and requires_grad over ranks, and settings. Collective.

    Args:
        tensors: name -> parameter or buffer, in order.
        settings: name -> value, in order, of other things that ranks must agree on.
        group: the ranks that compare.
        device: device of tensors in the group's collectives.

    Raises:
        ModelMismatch: on every rank; names the first entry that differs, on both sides.
    """
    lines = [f"{name}: {_describe(tensor)}" for name, tensor in tensors.items()]
    lines += [f"{name}={value}" for name, value in settings.items()]
    found = texts_that_differ("\n".join(lines), group, device)
    if not found:
        return
    (first, ours), (other, theirs) = found
    pairs = zip_longest(ours.split("\n"), theirs.split("\n"), fillvalue="nothing more")
    here, there = next((here, there) for here, there in pairs if here != there)
    raise ModelMismatch(
        f"ranks have different models. First difference: rank {first} has {here or 'nothing'}; rank {other} has "
        f"{there or 'nothing'}. Build the same model on every rank, and wrap it with the same arguments"
    )


def _describe(tensor: torch.Tensor) -> str:
    text = describe_tensor(tensor)
    if not tensor.requires_grad:
        return f"{text} (no gradient)"
    # Gradients are stored in buckets in memory order.
    laid_out = torch.empty_like(tensor, device="meta")
    return text if laid_out.is_contiguous() else f"{text} with strides {list(laid_out.stride())}"
