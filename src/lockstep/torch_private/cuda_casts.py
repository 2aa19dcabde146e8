"""Makes autocast cast CPU tensors like CUDA tensors.

torch has a list of operators to cast for each device type, and the CPU's is shorter: its softmax, its sums and its
layer norm stay in 16 bits, while CUDA's run in float32. To make the CPU compute as a GPU would, this module registers
CUDA's list as kernels under the CPU's autocast key. They are only called while autocast for the CPU is enabled.

[Note: lists] The operators are grouped by how CUDA casts them in `ATen/autocast_mode.h`; those that the installed torch
does not cast on CUDA are left alone. Operators that are only in the CPU's list are unchanged: it computes in float32
those that have no 16-bit kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lockstep.torch_private.lookup import find

__all__ = ["BANNED", "FLOAT32", "LOWER", "RECURRENT", "WIDEST", "CudaCasts"]

_KEY = "AutocastCPU"

LOWER = frozenset(
    {"_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d"}
    | {"conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul"}
    | {"einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot"}
    | {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
    | {"_scaled_dot_product_flash_attention", "scaled_dot_product_attention"}
)
"""Floating-point arguments are cast to the dtype of autocast."""

RECURRENT = frozenset(
    f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
)
"""The same; CUDA's list has the cuDNN functions that implement them, which are not called on a CPU."""

FLOAT32 = frozenset(
    {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"}
    | {"tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm"}
    | {"rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"}
    | {"poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div"}
    | {"l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"}
    | {"soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits"}
    | {"dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d"}
    | {"upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d"}
    | {"upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"}
    | {"upsample_bicubic2d", "_upsample_bicubic2d_aa", "norm.Scalar", "norm.ScalarOpt_dim"}
    | {"prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"}
    | {"linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_matrix_sqrth", "sum", "sum.dim_IntList"}
)
"""Floating-point arguments are cast to float32, unless the call specifies the dtype of its result."""

WIDEST = frozenset(
    {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"}
    | {"scatter_add"}
)
"""Floating-point arguments are cast to the widest dtype among them."""

BANNED = frozenset({"binary_cross_entropy"})
"""These raise an error, whatever the arguments are."""

_REFUSAL = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
    "binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss) without the sigmoid before it, or compute in "
    "float32 inside `with torch.autocast(..., enabled=False)`"
)


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map(change, each) for each in value]
    return value


class _Kernel:
    """The kernel of one operator under the CPU's autocast key.

    Args:
        name: name of the operator.
        casts_cpu: whether to also cast tensors whose device is the CPU.
        off: creates a context without casts.
    """

    def __init__(self, name: str, casts_cpu: bool, off: Callable[[], AbstractContextManager[None]]) -> None:
        packet, _, overload = name.partition(".")
        self._operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        self._name = name
        self._casts_cpu = casts_cpu
        names = [argument.name for argument in self._operator._schema.arguments]
        self._index_of_dtype = names.index("dtype") if "dtype" in names else None
        self._off = off

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cast the arguments, and run the operator itself without casts."""
        change = self._change(args, kwargs)
        if change is None:
            # The operators that it consists of may be in the CPU's list.
            result = self._operator.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        else:
            args, kwargs = _map(change, args), {name: _map(change, value) for name, value in kwargs.items()}
        with self._off():
            return self._operator(*args, **kwargs)

    def _lower(self, tensor: Tensor) -> torch.dtype | None:
        """The dtype of autocast for a tensor; None if it is not cast."""
        if not tensor.is_floating_point() or tensor.dtype is torch.float64:
            return None
        kind = tensor.device.type
        if kind not in ("cpu", "cuda") or (kind == "cpu" and not self._casts_cpu):
            return None
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _change(self, args: Any, kwargs: Any) -> Callable[[Tensor], Tensor] | None:
        """The change to apply to each tensor among the arguments; None for none."""
        lower: list[tuple[Tensor, torch.dtype]] = []

        def look(tensor: Tensor) -> Tensor:
            dtype = self._lower(tensor)
            if dtype is not None:
                lower.append((tensor, dtype))
            return tensor

        _map(look, [*args, *kwargs.values()])
        if not lower or (self._name in FLOAT32 and self._names_dtype(args, kwargs)):
            return None
        if self._name in BANNED:
            raise RuntimeError(_REFUSAL)
        target = lower[0][1]
        if self._name in FLOAT32:
            target = torch.float32
        elif self._name in WIDEST:
            target = functools.reduce(torch.promote_types, (tensor.dtype for tensor, _ in lower), target)
        chosen = {id(tensor) for tensor, _ in lower}
        return lambda tensor: tensor.to(target) if id(tensor) in chosen else tensor

    def _names_dtype(self, args: Any, kwargs: Any) -> bool:
        index = self._index_of_dtype
        is_positional = index is not None and index < len(args) and args[index] is not None
        return is_positional or kwargs.get("dtype") is not None


def _casts_off() -> Callable[[], AbstractContextManager[None]] | None:
    """A factory of contexts in which autocast for the CPU is disabled; None if this torch has none."""
    guard, keys = find("torch._C._ExcludeDispatchKeyGuard"), find("torch._C.DispatchKeySet")
    key = getattr(find("torch._C.DispatchKey"), _KEY, None)
    return None if guard is None or keys is None or key is None else functools.partial(guard, keys(key))


def _listed(key: str) -> frozenset[str]:
    """The operators that this torch casts under an autocast key."""
    known = find("torch._C._dispatch_get_registrations_for_dispatch_key")
    return frozenset() if known is None else frozenset(name.removeprefix("aten::") for name in known(key))


class CudaCasts:
    """CUDA's list, in force from construction until `remove`. For the whole process; at most one at a time is active.

    Args:
        everywhere: apply to all tensors that autocast for the CPU casts, except for banned functions. Otherwise to
            those whose device is CUDA; others are then cast according to the CPU's own list, as far as both lists
            agree.
    """

    _current: CudaCasts | None = None

    def __init__(self, everywhere: bool) -> None:
        self._library: Any = None
        if CudaCasts._current is not None:
            return  # the existing one casts everything that this one would
        CudaCasts._current = self
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        off, on_cpu, on_cuda = _casts_off(), _listed(_KEY), _listed("AutocastCUDA")
        names = ((LOWER | FLOAT32 | WIDEST | BANNED) & on_cuda) | RECURRENT
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name in sorted(names) if on_cuda else ():
                if off is None:
                    break
                if everywhere and (name in BANNED or (name in on_cpu and name not in WIDEST)):
                    continue  # the CPU's own kernel does the same
                self._library.impl(name, _Kernel(name, everywhere or name in on_cpu, off), _KEY)

    def remove(self) -> None:
        """Restore autocast for the CPU."""
        if CudaCasts._current is self:
            CudaCasts._current = None
            self._library._destroy()
