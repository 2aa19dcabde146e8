"""Checks the tensors passed to a group, and accesses their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from lockstep.comm import staging
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.comm.wording import describe_tensor
from lockstep.errors import CollectiveMismatch, InputError, InputTypeError
from lockstep.torch_private.tensors import may_overlap

__all__ = [
    "FlatTensor",
    "check_exchange",
    "check_memory",
    "check_output",
    "check_pairs",
    "check_root",
    "check_row",
    "check_some",
    "check_tensor",
    "settled",
]

_STRIDED = torch.strided

# Dtypes that torch can store but not copy: their tensors travel as bytes.
_BYTES_ONLY = frozenset(
    getattr(torch, f"{sign}int{bits}")
    for sign in ("", "u")
    for bits in range(1, 8)
    if hasattr(torch, f"{sign}int{bits}")
)


def check_tensor(tensor: object, operation: str) -> torch.Tensor:
    """Check for a dense tensor on the CPU or a GPU; returns it.

    Raises:
        InputTypeError: not a tensor, or not a dense one of plain numbers.
        InputError: on another device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InputTypeError(f"{operation} takes tensors, got {type(tensor).__name__}: {tensor!r:.80}")
    if not tensor.is_cpu and not tensor.is_cuda:
        raise InputError(
            f"{operation}: the lockstep group supports CPU and CUDA tensors, got one on {tensor.device}. Move it with "
            ".cpu()"
        )
    if tensor.layout is not _STRIDED:
        raise InputTypeError(f"{operation} takes dense tensors, got layout {tensor.layout}; use .to_dense()")
    if tensor.is_nested:
        raise InputTypeError(f"{operation} takes dense tensors, got a nested one; use .to_padded_tensor()")
    if tensor.is_quantized:
        raise InputTypeError(
            f"{operation} takes tensors of plain numbers, got {tensor.dtype}: move .int_repr() and the scales"
        )
    return tensor


def check_output(tensor: object, operation: str) -> torch.Tensor:
    """Check a tensor that is written: in addition, no two of its elements may share memory.

    Raises:
        InputError: on another device, or an expanded tensor.
    """
    checked = check_tensor(tensor, operation)
    if not checked.is_contiguous() and may_overlap(checked):
        raise InputError(
            f"{operation}: {describe_tensor(checked)} with strides {checked.stride()} has several elements in the "
            "same memory, so it cannot be written; call .clone() or .contiguous() on it"
        )
    return checked


def check_row(
    operation: str,
    row: Sequence[torch.Tensor],
    like: torch.Tensor,
    world_size: int,
    *,
    check: Callable[[object, str], torch.Tensor] = check_tensor,
    same_numel: bool = False,
) -> None:
    """Check a list with a tensor for each rank, all of `like`'s dtype; returns it.

    Raises:
        InputError: wrong number of tensors or of elements.
        InputTypeError: wrong dtype.
    """
    if len(row) != world_size:
        raise InputError(
            f"{operation}: got a list of {len(row)} tensors for a group of {world_size} ranks; one per rank"
        )
    for tensor in row:
        check(tensor, operation)
        if tensor.dtype != like.dtype:
            raise InputTypeError(f"{operation}: {describe_tensor(tensor)} and {describe_tensor(like)} differ in dtype")
        if same_numel and tensor.numel() != like.numel():
            raise InputError(
                f"{operation}: {describe_tensor(tensor)} and {describe_tensor(like)} differ in the number of elements"
            )


def check_pairs(operation: str, outputs: Sequence[object], inputs: Sequence[object]) -> None:
    """Check that a coalesced call has as many outputs as inputs.

    Raises:
        InputError: their numbers differ.
    """
    if len(outputs) != len(inputs):
        raise InputError(f"{operation}: got {len(outputs)} outputs for {len(inputs)} inputs; one for each")


def check_some(operation: str, tensors: Sequence[object]) -> None:
    """Check that the list is not empty: an empty call would move nothing, and so not meet its peers.

    Raises:
        InputError: an empty list, which torch's own groups refuse as well.
    """
    if not tensors:
        raise InputError(f"{operation}: got an empty list of tensors; pass one or more, the same number on all ranks")


def check_root(operation: str, root: int, recorder: FlightRecorder) -> None:
    """Check that the root is a rank of the group; torch.distributed does not, for the default group.

    Raises:
        InputError: it is not.
    """
    world_size = len(recorder.global_ranks)
    if not 0 <= root < world_size:
        raise InputError(
            f"{operation}: there is no rank {root} in {recorder.group_name}, which has {world_size} ranks; pass one "
            "of them as the root"
        )


def check_exchange(recorder: FlightRecorder, sent: torch.Tensor, expected: torch.Tensor) -> None:
    """Check the numbers of elements from each sender to each receiver; the same on all ranks, so that all raise.

    Raises:
        CollectiveMismatch: a sender and a receiver disagree.
    """
    for sender, receiver in (sent != expected).nonzero().tolist():
        raise CollectiveMismatch(
            f"all_to_all: {recorder.name(sender)} sends {int(sent[sender, receiver])} elements to "
            f"{recorder.name(receiver)}, which has room for {int(expected[sender, receiver])}. The input split "
            "of a sender must equal the output split of the receiver",
            (recorder.global_rank(sender), recorder.global_rank(receiver)),
        )


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a functional collective; any other tensor is returned unchanged."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else cast(torch.Tensor, wait())


def check_memory(tensor: torch.Tensor, operation: str) -> None:
    """Check that a tensor has its own storage, so that its bytes can be copied.

    Raises:
        InputTypeError: it wraps another tensor.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return
    try:
        has_memory = tensor.data_ptr() != 0
    except RuntimeError:  # newer torch reports it itself
        has_memory = False
    if not has_memory:
        raise InputTypeError(
            f"{operation} takes plain tensors, got a {type(tensor).__name__}, which has no memory of its own: pass "
            "the tensor that it holds, such as .to_local() of a DTensor"
        )


class FlatTensor:
    """A tensor as flat contiguous host memory: the tensor itself if it is that, otherwise a copy to be written back.

    Args:
        tensor: on the CPU or a GPU; see [Note: staging].
        is_read: whether its values are needed. False for a tensor that is overwritten completely, which then need not
            be copied from a GPU.

    Attributes:
        tensor: the tensor, detached from autograd.
        flat: shape (numel,), of the tensor's dtype; uint8 if torch cannot copy that dtype.
    """

    __slots__ = ("_event", "flat", "tensor")

    def __init__(self, tensor: torch.Tensor, is_read: bool = True) -> None:
        # Detached, so that nothing below is recorded by autograd.
        tensor = settled(tensor)
        self.tensor = plain = tensor.detach() if tensor.requires_grad else tensor
        if plain.is_complex() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        if plain.dtype in _BYTES_ONLY:
            plain = plain.view(torch.uint8)
        self._event = None
        if not plain.is_cpu:  # not is_cuda, which a simulated GPU tensor in host memory also claims
            # Another thread may write back, and its stream does not wait for what is queued here.
            self._event = staging.mark_now(plain.device)
            plain = staging.host_memory(plain, is_read)
        plain = plain.contiguous()
        if plain.dim() == 1 and plain.stride(0) == 1:
            self.flat = plain
        elif plain.numel() > 1:
            self.flat = plain.view(-1)
        else:
            # A tensor of at most one element is contiguous whatever its strides, and a view keeps these.
            self.flat = plain.as_strided((plain.numel(),), (1,))

    def write_back(self) -> None:
        """Copy the flat memory into the tensor, unless it is the tensor's own memory."""
        if self.flat is not self.tensor and self.flat.data_ptr() != self.tensor.data_ptr():
            if self._event is not None:
                torch.cuda.current_stream(self.tensor.device).wait_event(self._event)
            if self.tensor.dtype in _BYTES_ONLY:
                self.tensor.view(torch.uint8).copy_(self.flat.view(self.tensor.shape))
            else:
                self.tensor.copy_(self.flat.view(self.tensor.shape))
