"""Compares how large each rank takes the batch of a step to be; ranks that disagree raise.

A rank that weights a batch by its size, or by its tag, claims how large the batch is. On a lockstep group of one host
the claims are part of the description that the averaging compares anyhow. On other groups they cost a small collective,
so only claims that go by a size are compared there. The check does not wait for a GPU: it reads the comparison of a
step at the end of a later step, when it has arrived.

The ranks also compare which batches of a loader their gradients come from (`fingerprint_of`): in shared memory with
each averaging, on other groups with the parameters, in the first averaging, the fourth, the sixteenth and so on, and
with a communication hook in the first alone (`divergence.py`). So they find data that are not the same on all ranks,
and a rank that left out a backward pass: without the comparison its gradients would be averaged with those of another
batch from then on. A rank whose batches have lost their tags takes no part in this comparison.

[Note: open forward passes] Batches of other loaders, such as torch's, have no tag. There it tells that a rank which
skips a backward pass has made a forward pass that no gradient came to. Such a pass is open, until a gradient comes. The
engine counts those in training mode whose gradients would be averaged, and with each averaging the ranks compare how
many they have opened since the last one, less those that they have closed. That need not be zero: with a GAN, or in a
loop that looks ahead, it is some other number, the same on all ranks. A rank may also open a pass that nobody misses,
to look at an output, so this is a warning and no error. The number travels where claims do, in a word of shared memory
or in the low bits of the claim, and costs no collective. Where only tags are claimed, other groups compare nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist

from lockstep.comm.flight_recorder import fingerprint
from lockstep.errors import CollectiveMismatch
from lockstep.log import get_logger

__all__ = [
    "ADVICE",
    "NO_CLAIMS",
    "ClaimCheck",
    "Claims",
    "OpenPassCheck",
    "check_fingerprints",
    "describe_fingerprint",
    "fingerprint_of",
    "join_claims",
]


ADVICE = (
    "If the ranks came with different numbers of rows, say how many samples the loss on each is the mean over: `with "
    "model.samples(n):`; hand a loss that is divided by a count of all ranks to lockstep.global_loss, too"
)

_MAX_SHOWN = 4
_OPEN_BITS = 8  # of a claim, where a group sends it as one number
_OPEN_MASK = (1 << _OPEN_BITS) - 1
_NAME = re.compile(r"samples (\d+) to \d+ of epoch (\d+)")
_FIRST_BITS, _EPOCH_BITS, _HASH_BITS = 32, 12, 18
_FIRST_MASK, _EPOCH_MASK, _HASH_MASK = (1 << _FIRST_BITS) - 1, (1 << _EPOCH_BITS) - 1, (1 << _HASH_BITS) - 1


@dataclass(frozen=True)
class Claims:
    """What one rank claims of a step.

    Attributes:
        text: for people, and compared; "" for nothing.
        is_certain: every claim comes from a tag, none from a size.
        fingerprint: of the batches that the gradients come from, see `fingerprint_of`; 0 where they are not known.
        num_open: see [Note: open forward passes]; negative where more were closed.
    """

    text: str = ""
    is_certain: bool = True
    fingerprint: int = 0
    num_open: int = 0


NO_CLAIMS = Claims()


def fingerprint_of(batches: Collection[tuple[str, int]]) -> int:
    """Batches as one number: first sample and epoch of one of them, and a hash of all.

    Args:
        batches: name and fingerprint of each: such as "samples 4 to 7 of epoch 0", "" for one that is not known; and a
            number for the data that it is of.

    Returns:
        More than 0; 0 where a batch is not known, or there is none.

    >>> describe_fingerprint(fingerprint_of([("samples 4 to 7 of epoch 2", 0)]))
    'samples 4 … of epoch 2'
    """
    in_order = sorted(batches)
    names = [_NAME.fullmatch(name) for name, _ in in_order]
    if not names or names[0] is None or None in names:
        return 0
    first, epoch = int(names[0][1]) & _FIRST_MASK, int(names[0][2]) & _EPOCH_MASK
    short = crc32(str(in_order).encode()) & _HASH_MASK
    return (short << _EPOCH_BITS | epoch) << _FIRST_BITS | first | 1 << 62


def describe_fingerprint(value: int) -> str:
    """The batch that a fingerprint names."""
    return f"samples {value & _FIRST_MASK} … of epoch {value >> _FIRST_BITS & _EPOCH_MASK}"


def check_fingerprints(fingerprints: Sequence[int]) -> None:
    """Raise CollectiveMismatch if ranks, of those that know, bring gradients of different batches. Local.

    Args:
        fingerprints: of all ranks of the group.
    """
    if len({value for value in fingerprints if value}) < 2:
        return
    known = {rank: describe_fingerprint(value) for rank, value in enumerate(fingerprints) if value}
    if len(set(known.values())) == 1:
        raise CollectiveMismatch(
            f"the ranks averaged gradients of {known.popitem()[1]}, but of different data: their loaders hold other "
            "samples, or the same in another order. After lockstep.init each rank draws random numbers of its own: "
            "give random_split a generator=torch.Generator().manual_seed(0), shuffle with random.Random(0), sort what "
            "os.listdir or glob has found, let a dataset draw its records (negatives, mixtures) from "
            "np.random.default_rng(epoch), and give each loader the same seed. A lockstep.DataLoader splits its "
            "data over the ranks: give it all of it, not what a script has split by rank, and no sampler that splits. "
            "Data that is a rank's own goes into a loader with rank=0 and world_size=1"
        )
    lines = [f"  rank {rank}: {text}" for rank, text in known.items()]
    raise CollectiveMismatch(
        "the ranks averaged gradients of different batches (ranks of the engine's group):\n"
        + "\n".join(lines)
        + "\nOne of them has left out a backward pass, or taken a batch more. Every rank must take the batches of a "
        "lockstep.DataLoader in the same order, and make the same backward passes: where one skips a step (a loss that "
        "is not finite, an error), all must; let them agree on it first, with an all_reduce"
    )


class OpenPassCheck:
    """Compares how many forward passes the ranks have left open, and warns once. See [Note: open forward passes].

    Args:
        is_told: this rank is the one that warns.
    """

    def __init__(self, is_told: bool) -> None:
        self._is_told = is_told

    def compare(self, by_rank: Sequence[int]) -> None:
        """The numbers of all ranks of the group. Local."""
        if self._is_told and len(set(by_rank)) > 1:
            self.warn(", ".join(f"rank {rank}: {count}" for rank, count in enumerate(by_rank)))

    def warn(self, numbers: str) -> None:
        """Ranks differ: which has left open how many. Local."""
        if not self._is_told:
            return
        self._is_told = False
        get_logger(__name__).warning(
            "between two averagings of gradients the ranks made different numbers of forward passes that no backward "
            "pass followed (%s; ranks of the engine's group). If one of them has left out a backward pass (a loss that "
            "is not finite, an error), its gradients are averaged with those of another batch from now on, and one "
            "rank waits in the end. Where one skips a step all must: flag = torch.tensor(float(skips)); "
            "dist.all_reduce(flag, dist.ReduceOp.MAX); if flag.item(): continue. Make a forward pass whose output is "
            "only looked at under torch.no_grad()",
            numbers,
        )


def join_claims(claims: dict[str, bool], batches: Collection[tuple[str, int]] = (), num_open: int = 0) -> Claims:
    """Those of one step: text -> whether it is certain. The order of forward passes does not count.

    Args:
        claims: of the forward passes.
        batches: see `fingerprint_of`.
        num_open: see `Claims`.
    """
    if not claims:
        return Claims(num_open=num_open) if num_open else NO_CLAIMS
    texts = sorted(claims)
    if len(texts) > _MAX_SHOWN:
        rest = texts[_MAX_SHOWN:]
        texts[_MAX_SHOWN:] = [f"{len(rest)} more ({fingerprint(str(rest)):x})"]
    return Claims(", ".join(texts), all(claims.values()), fingerprint_of(batches), num_open)


class ClaimCheck:
    """Compares claims over a group that does not compare descriptions.

    Args:
        group: the ranks that compare.
        device: where the group takes small tensors from.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        # Of a GPU: the claim, the compared values on the host, and the event behind their copy.
        self._pending: list[tuple[str, torch.Tensor, torch.cuda.Event]] = []
        self._open_passes = OpenPassCheck(is_told=group.rank() == 0)

    def begin(self, claims: Claims) -> Callable[[], None]:
        """Begin to compare one step's claims, while other things are waited for. Collective.

        Returns:
            What waits for the result. It raises CollectiveMismatch if ranks claim different things, of this step or of
            one shortly before.
        """
        while self._pending and not self._is_capturing() and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            text, values, _ = self._pending.pop(0)
            self._compare(text, values)
        if claims.is_certain or self._is_capturing():
            return lambda: None  # A graph repeats one step, and nobody could be told of what it finds.
        value = fingerprint(claims.text) & ~_OPEN_MASK | claims.num_open & _OPEN_MASK
        # Equal on all ranks if the greatest is the least. Made on the device: a copy from the host would wait for it.
        both = torch.full((2,), value, dtype=torch.int64, device=self._device)
        both[1].neg_()
        work = dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def end() -> None:
            work.wait()
            if self._device.type == "cuda":
                self._compare_later(claims.text, both)
            else:
                self._compare(claims.text, both)

        return end

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _compare_later(self, text: str, both: torch.Tensor) -> None:
        values = torch.empty(2, dtype=torch.int64, pin_memory=True, device="cpu")
        values.copy_(both, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((text, values, event))

    def _compare(self, text: str, values: torch.Tensor) -> None:
        greatest, least = values.tolist()
        least = -least
        if greatest >> _OPEN_BITS == least >> _OPEN_BITS:
            if greatest != least:
                fewest, most = sorted(map(_open_in, (least, greatest)))
                self._open_passes.warn(f"{fewest} on one, {most} on another")
            return
        raise CollectiveMismatch(
            f"the ranks averaged gradients of different batches: rank {dist.get_rank()} took {text}, another rank "
            f"something else. Every rank must take the batches of a lockstep.DataLoader in the same order. {ADVICE}"
        )


def _open_in(value: int) -> int:
    """The number in the low bits, with its sign."""
    low = value & _OPEN_MASK
    return low - (1 << _OPEN_BITS) if low >> (_OPEN_BITS - 1) else low
