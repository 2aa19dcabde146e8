"""Whether the ranks of an engine do the same: compared when the model is wrapped and once with each averaging.

A difference is an error.

Each rank says a few words with every averaging (`Words`): its claim, what it takes the batch to be; which batches of a
loader its gradients come from; one value of one parameter; whether gradients came past the engine. On a lockstep group
of one host they lie in shared memory, and what a batch is taken to be is part of the description that the averaging
compares anyhow: no collective more. Other groups compare by one small all_reduce what a batch is taken to be, and the
rest now and then. With a GPU nobody waits for the answer: it is read when it has arrived, in one of the next steps or
when the world is left.

All of it compares ranks with each other, so none of it can fire where ranks do the same.

[Note: comparisons] In the first averaging the ranks compare some values of each parameter, as they were in the first
backward pass: a script may have changed them since it wrapped the model. From then on one value, of another parameter
each time, travels with every averaging in shared memory; if the values of two ranks differ, or gradients came past the
engine on one, the ranks compare parameters again. Other groups need a collective for it, and compare in averaging 4,
16, 64 and so on, with a communication hook in the first alone. With the parameters they compare which batches the
gradients come from, which in shared memory travels with every averaging, too. So data that are not the same on all
ranks are found, and a rank that left out a backward pass. A rank whose batches have lost their tags takes no part.

[Note: rounding] On processors of different kinds, or with other numbers of threads, ranks may step the same gradients
to values that differ in the last bits. So a difference after the first averaging is an error only if it is far
greater than rounding; else it is looked at again when there have been twice as many averagings.

[Note: different on purpose] Local SGD steps by gradients of `no_sync()`, and sharpness-aware minimisation may move each
rank's parameters by them for a moment. So a rank whose parameters have changed after a pass that was not averaged is
not compared any more. What a communication hook returns may differ between ranks, and those that have joined (`Join`)
keep older parameters: there, nothing is compared but the first averaging. When the world is left, all are compared
(`drift/comparison.py`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from lockstep.comm.flight_recorder import fingerprint
from lockstep.comm.wording import describe_tensor
from lockstep.drift.comparison import rounding_of
from lockstep.errors import CollectiveMismatch, ModelMismatch
from lockstep.torch_private.autograd import version_of

__all__ = [
    "ADVICE",
    "NO_WORDS",
    "RankAgreement",
    "Words",
    "all_reduce_number",
    "all_reduce_options",
    "broadcast_tensors",
    "check_same_model",
    "describe_batches",
    "fingerprint_of",
    "gather",
    "texts_that_differ",
]

_GROUP_BYTES = 32 << 20  # of tensors that begin in one call of broadcast, as many small ones do
_COMPARED_VALUES = 4096  # of each parameter
_MEASURED_PARAMETERS = 8  # of those that differ
_COLLECTIVE_EVERY = 4  # times as many averagings
_POSITION_STEP = 2654435761  # from one value to the next of a parameter: it goes round, and everywhere
_MOST_UNREAD = 16  # steps by which a host may be ahead of its GPU without waiting for what ranks claim
_UNKNOWN, _ZERO = 0, 1  # samples
_STRAYED = 1  # a sign
_LOOKS_AT_STRAYS = 3  # after which gradients past the engine are taken for equal, as a regulariser's are
_MAX_SHOWN = 4
_INTEGER, _FLOAT = struct.Struct("<q"), struct.Struct("<d")
_NAME = re.compile(r"samples (\d+) to \d+ of epoch (\d+)")
_FIRST_BITS, _EPOCH_BITS, _HASH_BITS = 32, 12, 18
_FIRST_MASK, _EPOCH_MASK, _HASH_MASK = (1 << _FIRST_BITS) - 1, (1 << _EPOCH_BITS) - 1, (1 << _HASH_BITS) - 1

ADVICE = (
    "If the ranks came with different numbers of rows, say how many samples the loss on each is the mean over: `with "
    "model.samples(n):`; hand a loss that is divided by a count of all ranks to lockstep.global_loss, too"
)
_ADVICE_ON_DATA = (
    "their loaders hold other samples, or the same in another order. All ranks need the same, and a rank has of its "
    "own what it draws after lockstep.init (a split, a shuffle, negatives), finds in a folder, or collects from a "
    "loader, such as features, or a loss for each sample that becomes a sampler's weight. So draw by a generator with "
    "one seed, as torch.Generator().manual_seed(0) or np.random.default_rng(epoch); sort what is found; put together "
    "by lockstep.all_gather what the ranks have collected; give each loader the same seed, and all of the data, which "
    "it splits. Data that is a rank's own goes into a loader with rank=0 and world_size=1"
)
_ADVICE_ON_BATCHES = (
    "One of them has left out a backward pass, or taken a batch more. Every rank must take the batches of a "
    "lockstep.DataLoader in the same order, and make the same backward passes: where one skips a step (a loss that is "
    "not finite, an error), all must; let them agree on it first, by lockstep.any(flag)"
)
_ADVICE_AT_FIRST = (
    "All had those of rank 0 when DistributedDataParallel was made: initialise or load the model before, or do so on "
    "every rank alike. After lockstep.init each rank draws random numbers of its own"
)
_ADVICE_ON_PARAMETERS = (
    "So a rank has another learning rate (give ReduceLROnPlateau, and whatever else goes by a loss, that of all ranks: "
    "lockstep.mean(loss * len(y), len(y))), has left out a step, or has changed parameters by itself: loaded them, or "
    "added noise that it has drawn. All ranks must do so alike"
)
_ADVICE_ON_STRAYS = (
    "Gradients came past DistributedDataParallel since, which averages those of its own forward passes. Call model(x), "
    "where model = lockstep.DistributedDataParallel(net), and neither net(x) nor model.module(x); and where a loss "
    "contains gradients (create_graph=True), call backward() once, on the whole loss"
)


class Words(NamedTuple):
    """What one rank says with an averaging.

    Attributes:
        claim: what it takes the batches to be, for people, and compared; "" for nothing.
        batches: which ones the gradients come from, see `fingerprint_of`; 0 where they are not known.
        sample: one value of one parameter, in 64 bits; 0 where it is not to be compared.
        signs: 1 if gradients came past the engine, else 0.
    """

    claim: str = ""
    batches: int = 0
    sample: int = _UNKNOWN
    signs: int = 0


NO_WORDS = Words()


def fingerprint_of(batches: Collection[tuple[str, int]]) -> int:
    """Batches as one number: first sample and epoch of one of them, and a hash of all.

    Args:
        batches: name and fingerprint of each: such as "samples 4 to 7 of epoch 0", "" for one that is not known; and a
            number for the data that it is of.

    Returns:
        More than 0; 0 where a batch is not known, or there is none.

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
    """The batch that `fingerprint_of` has made a number of."""
    return f"samples {value & _FIRST_MASK} … of epoch {value >> _FIRST_BITS & _EPOCH_MASK}"


class RankAgreement:
    """What one engine says of its steps, and compares with the other ranks'.

    Args:
        names: of the parameters, the same on all ranks.
        parameters: the same shapes and dtypes on all ranks.
        group: the ranks that compare.
        device: where the group's collectives want their tensors.

    Attributes:
        sends_samples: whether words reach the other ranks with each averaging.
        num_averagings: so far.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._names = list(names)
        self._parameters = list(parameters)
        self._on_cpu = [each.device.type == "cpu" and each.numel() > 0 for each in parameters]
        self._group = group
        self._device = device
        self._claims: set[str] = set()  # of the backward passes since the last averaging
        self._batches: set[tuple[str, int]] = set()  # that they are of, and their fingerprints
        self._has_strayed = False
        self._looks_at_strays_left = _LOOKS_AT_STRAYS
        self._first: list[int] | None = None  # hashes of the parameters in the first backward pass
        self.num_averagings = 0
        self._next_look = 1  # with so many averagings
        self._version_accumulated: int | None = None  # of all parameters, when a pass began that is not averaged
        self._is_known = True  # see [Note: different on purpose]
        self.sends_samples = True
        self._claim: str | None = None  # the one that the pair says
        self._on_gpu = device.type != "cpu"
        self._options = all_reduce_options(dist.ReduceOp.MAX)
        self._pair = torch.empty(0, device=device)  # of what ranks claim the greatest, and the least times -1
        self._work: Any = None
        # Of a GPU: the claim, the compared values on the host, and the event that their copy ends with.
        self._unread: list[tuple[str, torch.Tensor, torch.cuda.Event]] = []
        self._spare: list[tuple[torch.Tensor, torch.cuda.Event]] = []  # have been read

    # ---- what happens between two averagings ------------------------------------------------------

    def pass_begins(self) -> None:
        """Gradients come that will be averaged. Local."""
        if self.num_averagings == 0 and self._first is None:
            self._first = _digests(self._parameters)

    def gradient_accumulates(self) -> None:
        """One has come that is not to be averaged, and nobody has stepped by it yet. Local."""
        self.pass_begins()
        if self._version_accumulated is None:
            self._version_accumulated = self._version()

    def gradient_strays(self) -> None:
        """One has come outside of all forward passes of the engine. Local."""
        self._has_strayed = True

    @property
    def has_claims(self) -> bool:
        """Whether gradients have come since the last averaging of which it was said what they are of."""
        return bool(self._claims)

    def claim(self, text: str, batch: str, batch_fingerprint: int = 0) -> None:
        """What a forward pass that gradients come from was understood to hold. Local.

        Args:
            text: for people, and compared.
            batch: its name; "" if not known.
            batch_fingerprint: of the data that it is of; 0 if not known.
        """
        self._claims.add(text)
        self._batches.add((batch, batch_fingerprint))

    def forget_claims(self) -> None:
        """The gradients that they were of were thrown away. Local."""
        if self._claims:
            self._claims, self._batches = set(), set()

    # ---- the exchange -----------------------------------------------------------------------------

    def take_words(self) -> Words:
        """What this rank says with this averaging. Local."""
        signs = _STRAYED if self._has_strayed and self._looks_at_strays_left else 0
        texts = sorted(self._claims)  # the order of forward passes does not count
        if len(texts) > _MAX_SHOWN:
            rest = texts[_MAX_SHOWN:]
            texts[_MAX_SHOWN:] = [f"{len(rest)} more ({fingerprint(str(rest)):x})"]
        batches = 0 if ("", 0) in self._batches else fingerprint_of(self._batches)
        words = Words(", ".join(texts), batches, self._sample(), signs)
        self.forget_claims()
        return words

    def begin_comparing_claims(self, words: Words) -> Callable[[], None] | None:
        """Begin to compare over a group that does not compare descriptions, while other things are waited for.

        Collective.

        Returns:
            What waits for the result, if there is one to wait for. It raises CollectiveMismatch if ranks claim
            different things, of this step or, on a GPU, of one of the sixteen before.
        """
        if self._is_capturing():
            return None  # A graph repeats one step, and nobody could be told of what it finds.
        self.read_claims(_MOST_UNREAD)
        # Also what a tag tells: another rank may have copied its batch, and knows it by its size alone.
        if words.claim != self._claim:
            # Made on the device: a copy from the host would wait for it.
            self._pair = torch.full((2,), fingerprint(words.claim), dtype=torch.int64, device=self._device)
            self._pair[1].neg_()
            self._claim = words.claim
        # Where all claim the same, the greatest is the least: the pair stays as it is, for the next step.
        self._work = self._group.allreduce([self._pair], self._options)
        return self._end_comparing

    def _end_comparing(self) -> None:
        self._work.wait()
        assert self._claim is not None  # it has begun
        if not self._on_gpu:
            self._compare_claims(self._claim, self._pair)
            return
        values, event = self._spare.pop() if self._spare else (_pinned_pair(), torch.cuda.Event())  # type: ignore[no-untyped-call]
        values.copy_(self._pair, non_blocking=True)
        event.record()
        self._unread.append((self._claim, values, event))

    def read_claims(self, num_unread: int) -> None:
        """Look at what was compared on a GPU and has arrived; wait for it, but for so many of the latest. Local.

        Raises:
            CollectiveMismatch: ranks claimed different things.
        """
        while self._unread and (len(self._unread) > num_unread or self._unread[0][2].query()):  # type: ignore[no-untyped-call]
            text, values, event = self._unread.pop(0)
            event.synchronize()
            self._compare_claims(text, values)
            self._spare.append((values, event))

    def compare(self, by_rank: Sequence[Words] | None, own: Words = NO_WORDS, is_first_only: bool = False) -> None:
        """Compare what the ranks have said, and parameters, if it is time. Collective; call it in each averaging.

        Args:
            by_rank: the words of all ranks of the group; None if they are not known.
            own: those of this rank.
            is_first_only: the ranks may hold different parameters from the first averaging on.

        Raises:
            CollectiveMismatch: on every rank; the gradients come from different batches, or from different data.
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
        if not (is_first or is_due) or self._is_capturing():
            return
        self._next_look = self.num_averagings * (_COLLECTIVE_EVERY if by_rank is None else 2)
        self._compare_parameters(is_first, own, has_strayed)

    # ---- claims and batches -----------------------------------------------------------------------

    def _is_capturing(self) -> bool:
        return self._on_gpu and self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _compare_claims(self, text: str, pair: torch.Tensor) -> None:
        greatest, negative_least = pair.tolist()
        if greatest != -negative_least:
            self._claim = None
            came = f"rank {dist.get_rank()} came with {text}, another rank with something else"
            if not self._on_gpu:  # there, ranks may have come to other things by now
                found = _first_that_differ(text, self._group, self._device)
                came = ", ".join(f"rank {rank} came with {each or 'an averaging'}" for rank, each in found)
            raise CollectiveMismatch(
                f"the ranks averaged gradients of different batches: {came}. Every rank must make the same passes, and "
                f"take the batches of a lockstep.DataLoader in the same order. {ADVICE}"
            )

    def _compare_batches(self, batches: Sequence[int]) -> None:
        if len({value for value in batches if value}) < 2:
            return
        known = {rank: describe_batches(value) for rank, value in enumerate(batches) if value}
        if len(set(known.values())) == 1:
            what, advice = f"{known.popitem()[1]}, but of different data", _ADVICE_ON_DATA
            raise CollectiveMismatch(f"the ranks averaged gradients of {what}: {advice}")
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in known.items())
        raise CollectiveMismatch(
            "the ranks averaged gradients of different batches (ranks of the engine's group):\n"
            f"{lines}\n{_ADVICE_ON_BATCHES}"
        )

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
                f", by up to {distance:.1g} times its greatest value. All were alike {self.num_averagings - 1} "
                "averagings ago, and have got the same gradients since"
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
        """Parameters that differ: index -> a rank of the group that has another than the first. Collective.

        Raises:
            CollectiveMismatch: what averaged is of different batches.
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
        """Of these, the parameter that is farthest apart, and how far, relative to its greatest value. Collective."""
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


def _pinned_pair() -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, pin_memory=True, device="cpu")


def all_reduce_options(op: Any) -> Any:
    """What a group's own `allreduce` takes, for a call that is waited for later. Local."""
    options: Any = dist.AllreduceOptions()
    options.reduceOp = op
    if hasattr(options, "asyncOp"):  # from torch 2.7 on; before, all were
        options.asyncOp = True
    return options


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
    return [fingerprint(text) for text in texts]


def gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks, stacked, on the host. Collective."""
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group=group)
    return torch.stack(rows).cpu()


def all_reduce_number(number: int, op: Any, group: dist.ProcessGroup, device: torch.device) -> int:
    """The sum, or the greatest, of what each rank gives; through a tensor on that device. Collective."""
    combined = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(combined, op, group=group)
    return int(combined.item())


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _COMPARED_VALUES)].contiguous()


# ---- when the model is wrapped -------------------------------------------------------------------


def check_same_model(
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, object],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Compare names, shapes, dtypes, memory formats and requires_grad over ranks, and settings. Collective.

    Args:
        tensors: name -> parameter or buffer, in order.
        settings: name -> value, in order, of whatever else ranks must agree on.
        group: the ranks that compare.
        device: where the group's collectives want their tensors.

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
        f"ranks hold different models. First difference: rank {first} has {here or 'nothing'}; rank {other} has "
        f"{there or 'nothing'}. Build the same model on every rank, and wrap it with the same arguments"
    )


def _describe(tensor: torch.Tensor) -> str:
    text = describe_tensor(tensor)
    if not tensor.requires_grad:
        return f"{text} (no gradient)"
    # Gradients lie in the buckets in the order of memory.
    laid_out = torch.empty_like(tensor, device="meta")
    return text if laid_out.is_contiguous() else f"{text} with strides {list(laid_out.stride())}"


def texts_that_differ(text: str, group: dist.ProcessGroup, device: torch.device) -> list[tuple[int, str]]:
    """Rank and text of the first rank, and of the first that says another thing; nothing if none does. Collective."""
    number = fingerprint(text)
    pair = torch.tensor([number, -number], dtype=torch.int64, device=device)  # as `begin_comparing_claims` compares
    dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
    return _first_that_differ(text, group, device) if int(pair.sum()) else []


def _first_that_differ(text: str, group: dist.ProcessGroup, device: torch.device) -> list[tuple[int, str]]:
    own = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
    lengths = gather(torch.tensor(len(own), device=device), group)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device="cpu")
    padded[: len(own)] = own
    texts = [bytes(row.numpy()).rstrip(b"\0").decode() for row in gather(padded.to(device), group)]
    other = next(rank for rank, each in enumerate(texts) if each != texts[0])
    return [(dist.get_global_rank(group, rank), texts[rank]) for rank in (0, other)]


def broadcast_tensors(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int | None = None) -> None:
    """Overwrite `tensors` by those of one rank. Collective.

    Args:
        tensors: the same list of shapes and dtypes on all ranks.
        group: the ranks that take part.
        source: rank in the group whose tensors all get; default the first.

    Writes through `.data`, so that a tensor which autograd has saved may be overwritten: the running
    statistics of batch normalisation, which its backward pass does not use.
    """
    if group.size() == 1:
        return
    source_in_group = source or 0
    global_source = dist.get_process_group_ranks(group)[source_in_group]
    together: dict[tuple[torch.dtype, torch.device, int], list[torch.Tensor]] = {}
    num_bytes = 0
    for tensor in tensors:
        if tensor.numel() > 0:
            together.setdefault((tensor.dtype, tensor.device, num_bytes // _GROUP_BYTES), []).append(tensor.data)
            num_bytes += tensor.nbytes
    for members in together.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        dist.broadcast(flat, global_source, group=group)
        if group.rank() != source_in_group:
            pieces = torch.split(flat, [tensor.numel() for tensor in members])
            for tensor, piece in zip(members, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
