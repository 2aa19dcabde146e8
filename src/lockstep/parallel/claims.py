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

import torch
import torch.distributed as dist

from lockstep.agreement import all_reduce_options, first_that_differ
from lockstep.comm.flight_recorder import fingerprint
from lockstep.comm.staging import is_capturing
from lockstep.errors import CollectiveMismatch

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
        # With a GPU: the claim, its `_unset`, the averaged elements on the host, and the event after their copy.
        self._unread: list[tuple[str, int, torch.Tensor, torch.cuda.Event]] = []

    def set_elements(self, elements: torch.Tensor) -> None:
        """Write claims to these elements from now on. Local.

        Args:
            elements: shape (NUM_ELEMENTS,), any dtype that is averaged, contiguous.
        """
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
        elements = self._elements
        assert elements is not None
        if self._memory is not None:
            self._check(self._claim, self._unset, self._memory, is_late=False)
        elif not is_capturing(elements.device):
            self.read_arrived(_MOST_UNREAD)
            values, event = elements.to("cpu", non_blocking=True, copy=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._unread.append((self._claim, self._unset, values, event))

    def exchange(self, claim: str) -> None:
        """Compare claims by an all_reduce, where no bucket takes them along. Collective.

        Raises:
            CollectiveMismatch: as in `read`.
        """
        elements = self._elements
        if elements is None:
            elements = torch.zeros(NUM_ELEMENTS, dtype=torch.int32, device=self._device)  # exact on any wire
            self.set_elements(elements)
        self.write(claim)
        self._group.allreduce([elements], all_reduce_options(dist.ReduceOp.SUM)).wait()
        self.read()

    def read_arrived(self, num_unread: int) -> None:
        """Check results that have arrived from a GPU, waiting for all but the latest `num_unread`. Local.

        Raises:
            CollectiveMismatch: the ranks' claims differed.
        """
        while self._unread and (len(self._unread) > num_unread or self._unread[0][3].query()):  # type: ignore[no-untyped-call]
            claim, unset, values, event = self._unread.pop(0)
            event.synchronize()
            self._check(claim, unset, _bytes_of(values), is_late=True)

    def _check(self, claim: str, unset: int, averaged: memoryview, is_late: bool) -> None:
        if not _number(averaged) & unset:
            return
        had = f"rank {dist.get_rank()} had {claim}, another rank did not"
        if not is_late:  # otherwise ranks may have moved on by now
            found = first_that_differ(claim, self._group, self._device)
            had = ", ".join(f"rank {rank} had {each or 'no sample count'}" for rank, each in found)
        raise CollectiveMismatch(
            f"the ranks averaged gradients of different batches: {had}. Every rank must run the same passes, and "
            f"take the batches of a lockstep.DataLoader in the same order. {ADVICE}"
        )


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
