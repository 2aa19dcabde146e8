"""Kernels over lists of tensors, internals of sparse tensors, and the quantisation of wire format int8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.torch_private.lookup import attribute, find, need

__all__ = [
    "amp_unscale_",
    "byte_prepack",
    "byte_unpack",
    "can_count_references",
    "foreach_copy_",
    "foreach_mul_",
    "indices_of",
    "make_sparse",
    "make_wrapper",
    "may_overlap",
    "num_specified",
    "plain_torch_function",
    "storage_address",
    "storage_key",
    "storage_use_count",
    "use_count",
    "values_of",
]

_BYTES_OF_HEAD = 8  # scale and bias, float32 each, after the values of a row
_LEAST_RANGE = 1e-8  # added by torch's kernel to the range of a row

_Tensors = Sequence[torch.Tensor]


def _copy_one_by_one(targets: _Tensors, tensors: _Tensors) -> None:
    for target, tensor in zip(targets, tensors, strict=True):
        target.copy_(tensor)


def _mul_one_by_one(tensors: _Tensors, factor: Any) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _prepack_by_operators(rows: torch.Tensor) -> torch.Tensor:
    """The same as `embedding_bag_byte_prepack`: from float32[n, k] to uint8[n, k + 8]."""
    low = rows.amin(dim=1, keepdim=True)
    spread = rows.amax(dim=1, keepdim=True) - low
    values = ((rows - low) * (255.0 / (spread + _LEAST_RANGE))).round_().to(torch.uint8)
    head = torch.cat([spread / 255.0, low], dim=1).view(torch.uint8)
    return torch.cat([values, head], dim=1)


def _unpack_by_operators(rows: torch.Tensor) -> torch.Tensor:
    """The same as `embedding_bag_byte_unpack`: from uint8[n, k + 8] to float32[n, k]."""
    head = rows[:, -_BYTES_OF_HEAD:].contiguous().view(torch.float32)
    return rows[:, :-_BYTES_OF_HEAD].float() * head[:, :1] + head[:, 1:]


foreach_copy_: Callable[..., Any] = find("torch._foreach_copy_") or _copy_one_by_one
"""`foreach_copy_(targets, tensors)`: copy each tensor into its target."""

foreach_mul_: Callable[..., Any] = find("torch._foreach_mul_") or _mul_one_by_one
"""`foreach_mul_(tensors, factor)`, in place."""

amp_unscale_: Callable[..., Any] = need("torch._amp_foreach_non_finite_check_and_unscale_")
"""`amp_unscale_(tensors, flag, factor)`: multiply in place, and set the flag if a value is not finite."""

make_wrapper: Callable[..., Any] = need("torch.Tensor._make_wrapper_subclass")
"""`make_wrapper(class, size, strides=, dtype=, device=)`: a tensor without memory; its class runs its operations."""

plain_torch_function: Any = need("torch._C._disabled_torch_function_impl")
"""The `__torch_function__` of a class whose operations return their results as they are, not converted to the class."""

byte_prepack: Callable[[torch.Tensor], torch.Tensor] = (
    find("torch.ops.quantized.embedding_bag_byte_prepack") or _prepack_by_operators
)
"""From float32[n, k] to uint8[n, k + 8]: rows of 8-bit values with the scale and bias of each row."""

byte_unpack: Callable[[torch.Tensor], torch.Tensor] = (
    find("torch.ops.quantized.embedding_bag_byte_unpack") or _unpack_by_operators
)
"""The inverse, back to float32[n, k]."""

_internal_overlap: Callable[[torch.Tensor], int] = find("torch._debug_has_internal_overlap") or (lambda _: 0)
_count_storage: Callable[[int], int] | None = find("torch._C._storage_Use_Count")
_count_tensor: Callable[[torch.Tensor], int] | None = find("torch.Tensor._use_count")

can_count_references = _count_storage is not None and _count_tensor is not None
"""Whether `storage_use_count` and `use_count` work."""

storage_use_count: Callable[[int], int] = _count_storage or (lambda _: 0)
"""The number of tensors, views and arrays that hold the memory identified by `storage_key`."""

use_count: Callable[[torch.Tensor], int] = _count_tensor or (lambda _: 0)
"""The number of references to a tensor in C++: a parameter whose `.grad` it is, a graph that has saved it."""

_key_of: Callable[[Any], int] = attribute("torch.UntypedStorage._cdata", default=0)
_values: Callable[[torch.Tensor], torch.Tensor] = need("torch.Tensor._values")
_indices: Callable[[torch.Tensor], torch.Tensor] = need("torch.Tensor._indices")
_nnz: Callable[[torch.Tensor], int] = need("torch.Tensor._nnz")


def may_overlap(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor certainly share an address, as after `expand`."""
    return _internal_overlap(tensor) == 1


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor for `storage_use_count`, as long as the tensor is alive."""
    return _key_of(tensor.untyped_storage())


def storage_address(storage: torch.UntypedStorage) -> int:
    """An id of a storage, unique as long as a `StorageWeakRef` to it exists."""
    return _key_of(storage) or int(StorageWeakRef(storage).cdata)  # type: ignore[no-untyped-call]


def values_of(sparse: torch.Tensor) -> torch.Tensor:
    """The values of a sparse COO tensor, coalesced or not, without autograd."""
    return _values(sparse)


def make_sparse(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: torch.Size,
    *,
    is_checked: bool = False,
    is_coalesced: bool | None = None,
) -> torch.Tensor:
    """Create a sparse tensor on the device of its values.

    torch 2.11 warns that tensors are not checked, whatever is specified for a single one, unless it is set globally.
    """
    with torch.sparse.check_sparse_tensor_invariants(enable=is_checked):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(indices, values, shape, device=values.device, is_coalesced=is_coalesced)


def indices_of(sparse: torch.Tensor) -> torch.Tensor:
    """The indices of a sparse COO tensor, coalesced or not."""
    return _indices(sparse)


def num_specified(sparse: torch.Tensor) -> int:
    """The number of entries of a sparse COO tensor."""
    return _nnz(sparse)
