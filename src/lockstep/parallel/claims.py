"""Compares the ranks' claims over groups that only add: a claim travels with the gradients.

[Note: claims as bits] Each bit of a claim's hash is two elements at the end of the last bucket: 1 and 0, or 0 and 1.
None is negative, so after the averaging an element is 0 only if all ranks wrote 0: in every dtype, with any rounding
and any divisor. A rank's claim is that of all others if every element that is 0 in its own is still 0; if two ranks
differ, this fails on all. So the comparison takes no collective of its own.

With a GPU, no rank waits for the result: it is read once it has arrived, in one of the next steps or when the world is
left. Nothing is compared while a CUDA graph is captured: it repeats one step, and could not report a result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.agreement import all_reduce_options, first_that_differ
from lockstep.comm.backend import mismatch_in
from lockstep.comm.flight_recorder import fingerprint
from lockstep.comm.staging import is_capturing

__all__ = ["ADVICE", "NUM_ELEMENTS", "Claims"]

_NUM_BITS = 32
NUM_ELEMENTS = 2 * _NUM_BITS
_MOST_UNREAD = 16  # steps by which a host may be ahead of its GPU without waiting for the comparison

ADVICE = (
    "If the ranks had different numbers of rows, say how many samples each rank's loss is the mean over: `with "
    "model.samples(n):`; pass a loss that is divided by a count of all ranks to lockstep.global_loss, too"
)


class Claims:
    """Writes this rank's claim to elements that are averaged, and compares the result with it.

    Args:
        group: the ranks that compare.
        device: device of small tensors in the group's collectives.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._elements: torch.Tensor | None = None
        # Elements on the host are written and read as bytes, which takes a fraction of any operator's time.
        self._memory: memoryview | None = None
        self._claim, self._unset = "", 0  # as written last
        # With a GPU: the claim, whether the result on the host differs from it, and the event after its copy.
        self._unread: list[tuple[str, Callable[[], bool], torch.cuda.Event]] = []

    def set_elements(self, elements: torch.Tensor) -> None:
        """Write claims to these elements from now on: contiguous, of shape (NUM_ELEMENTS,) and any dtype. Local."""
        self._elements = elements
        self._memory = _bytes_of(elements) if elements.device.type == "cpu" else None

    def write(self, claim: str) -> None:
        """Write the claim, before the averaging. Local."""
        elements = self._elements
        assert elements is not None
        if self._memory is None and is_capturing(elements.device):
            return
        bits, on_host, self._unset = _encode(claim, elements.dtype, elements.device)
        self._claim = claim
        if self._memory is not None:
            self._memory[:] = on_host
        else:
            elements.copy_(bits)

    def read(self) -> None:
        """Compare the averaged elements with the claim. Local, unless the claims differ.

        Raises:
            CollectiveMismatch: on every rank; the ranks' claims differ, for this step or, on a GPU, for one of the
                sixteen before.
        """
        elements, unset = self._elements, self._unset
        assert elements is not None
        if self._memory is not None:
            self._check(self._claim, bool(_number(self._memory) & unset), is_late=False)
        elif not is_capturing(elements.device):
            self._read_later(self._claim, elements, lambda values: bool(_number(_bytes_of(values)) & unset))

    def exchange(self, claim: str) -> None:
        """Compare claims by the call of `texts_that_differ`: if another rank makes that alone, both notice. Collective.

        Raises:
            CollectiveMismatch: as in `read`.
        """
        if is_capturing(self._device):
            return
        pair = torch.full((2,), fingerprint(claim), dtype=torch.int64, device=self._device)
        pair[1].neg_()
        self._group.allreduce([pair], all_reduce_options(dist.ReduceOp.MAX)).wait()
        if self._device.type == "cpu":
            self._check(claim, bool(pair.sum()), is_late=False)
        else:
            self._read_later(claim, pair, lambda values: bool(values.sum()))

    def _read_later(self, claim: str, result: torch.Tensor, differs: Callable[[torch.Tensor], bool]) -> None:
        self.read_arrived(_MOST_UNREAD)
        values, event = result.to("cpu", non_blocking=True, copy=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._unread.append((claim, functools.partial(differs, values), event))

    def read_arrived(self, num_unread: int) -> None:
        """Check results that have arrived from a GPU, waiting for all but the latest `num_unread`. Local.

        Raises:
            CollectiveMismatch: the ranks' claims differed.
        """
        while self._unread and (len(self._unread) > num_unread or self._unread[0][2].query()):  # type: ignore[no-untyped-call]
            claim, differs, event = self._unread.pop(0)
            event.synchronize()
            self._check(claim, differs(), is_late=True)

    def _check(self, claim: str, differs: bool, is_late: bool) -> None:
        if not differs:
            return
        had = f"rank {dist.get_rank()} had {claim}, another rank did not"
        if not is_late:  # otherwise ranks may have moved on by now
            found = first_that_differ(claim, self._group, self._device)
            had = ", ".join(f"rank {rank} had {each or 'no sample count'}" for rank, each in found)
        text = f"the ranks averaged gradients of different batches: {had}. Every rank must run the same passes, and "
        text += f"take the batches of a lockstep.DataLoader in the same order. {ADVICE}"
        raise mismatch_in(self._group, text)


@functools.lru_cache(maxsize=64)
def _encode(claim: str, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, bytes, int]:
    """The elements for a claim: on the device, as bytes, and as a mask of the bytes of those that are 0."""
    number = fingerprint(claim) % (1 << _NUM_BITS)

    def elements_on(device: torch.device) -> torch.Tensor:
        ones = number >> torch.arange(_NUM_BITS, device=device) & 1
        return torch.cat((ones, 1 - ones)).to(dtype)

    on_host = elements_on(torch.device("cpu"))
    unset = (on_host == 0).to(torch.uint8).mul(255).repeat_interleave(dtype.itemsize)
    # Made on the device: a copy from the host would wait for it.
    return elements_on(device), bytes(_bytes_of(on_host)), _number(_bytes_of(unset))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.view(torch.uint8).numpy().data


def _number(content: bytes | memoryview) -> int:
    return int.from_bytes(content, "little")
