"""The casts of opt level O1 in torch functions, and in functions that users decorate or register.

[Note: autocast] Apex replaced some two hundred functions of torch by wrappers; since 1.6 torch has autocast, which does
the same. CUDA's list of functions is used on the CPU too (`lockstep.torch_private.cuda_casts`). Autocast is
enabled for the whole process, not for a `with` block, since scripts compute losses outside of their models.
Two things follow. Its cache of cast parameters is disabled, since it is only cleared at the end of a `with` block and
would return parameters of earlier steps. And it is off during backward passes (`scale_loss`), where functions must run
in the dtype of their forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.compat.apex.amp._amp_state import AmpValueError, Casts, _amp_state
from lockstep.torch_private.cuda_casts import CudaCasts
from lockstep.torch_private.patching import replace_attribute
from lockstep.torch_private.trees import tree_leaves, tree_map

__all__ = [
    "AmpHandle",
    "casts_off",
    "disable_casts",
    "float_function",
    "half_function",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "usual_device_types",
]

_Function = Callable[..., Any]
# Chooses the dtype of a function's tensor arguments.
_Choice = Callable[[Casts, list[Tensor]], torch.dtype]


class AmpHandle:
    """The casts of opt level O1, active from construction until `_deactivate`.

    Args:
        dtype: the 16-bit dtype that functions cast to.
        device_types: device types on which functions cast.
        verbose: print the casts of decorated and registered functions.
        allow_banned: let `binary_cross_entropy` take 16-bit inputs.
    """

    has_cache = False

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        device_types: Iterable[str] = (),
        verbose: bool = False,
        allow_banned: bool = False,
    ) -> None:
        self.dtype = dtype
        self.verbose = verbose
        self.allow_banned = allow_banned
        self._device_types = tuple(device_types) or usual_device_types()
        self._is_installed = self._is_active = True
        self._replaced: list[tuple[Any, str, _Function]] = []
        if _amp_state.handle is not None:
            _amp_state.handle._deactivate()
        self._before = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._device_types
        ]
        self._cached_before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        for kind in self._device_types:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)
        self._cuda_casts = CudaCasts(everywhere=True) if "cpu" in self._device_types else None
        self._replace(nn.functional, "binary_cross_entropy", _guard_binary_cross_entropy)
        # Tensors moved to the host are often read by NumPy: in float32, as in Apex.
        self._replace(Tensor, "cpu", functools.partial(_casting, _float))
        for name in _FLOAT32_IN_PLACE:
            self._replace(Tensor, name, _guard_in_place)
        for module, name, choice in _registered:
            self._replace(module, name, functools.partial(_casting, choice))
        _amp_state.handle = self

    def is_active(self) -> bool:
        """Whether casts are active now."""
        return self._is_active

    def _clear_cache(self) -> None:
        """Does nothing, as there is no cache; see [Note: autocast]."""

    def _replace(self, module: Any, name: str, wrap: Callable[[_Function], _Function]) -> None:
        original = getattr(module, name)
        self._replaced.append((module, name, original))
        replace_attribute(module, name, wrap(original))

    def _deactivate(self) -> None:
        """Remove the casts."""
        if not self._is_installed:
            return
        self._is_installed = self._is_active = False
        for module, name, original in reversed(self._replaced):
            replace_attribute(module, name, original)
        self._replaced.clear()
        for kind, enabled, dtype in self._before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cached_before)
        if self._cuda_casts is not None:
            self._cuda_casts.remove()
        if _amp_state.handle is self:
            _amp_state.handle = None

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        was_active = self._is_active
        enabled = [(kind, torch.is_autocast_enabled(kind)) for kind in self._device_types]
        self._is_active = False
        for kind, _ in enabled:
            torch.set_autocast_enabled(kind, False)
        try:
            yield
        finally:
            if self._is_installed:
                self._is_active = was_active
                for kind, was_enabled in enabled:
                    torch.set_autocast_enabled(kind, was_enabled)


def usual_device_types() -> tuple[str, ...]:
    """Default device types of casts: CUDA, or the CPU on machines without CUDA."""
    return ("cuda",) if torch.cuda.is_available() else ("cpu",)


@contextmanager
def casts_off() -> Iterator[None]:
    """A context without casts, whether or not O1 is active."""
    if _amp_state.handle is None:
        yield
        return
    with _amp_state.handle._disable_casts():
        yield


def disable_casts() -> Any:
    """A context in which torch functions run in the dtype of their inputs. Local."""
    return casts_off()


# ---- functions of users -------------------------------------------------------------------------


def _is_castable(value: object) -> bool:
    # As in autocast, float64 is left alone.
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _is_torchs(function: _Function) -> bool:
    """Whether a function is torch's, so that autocast may choose the dtype in which it runs."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return False  # `apply`, which by its module is torch's; a builtin since torch 2.14
    module = getattr(function, "__module__", None) or "torch"  # builtins have none
    return module.partition(".")[0] == "torch"


def _casting(choice: _Choice, function: _Function) -> _Function:
    is_torchs = _is_torchs(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_castable(leaf)]
        if handle is None or not handle.is_active() or not tensors:
            return function(*args, **kwargs)
        dtype = choice(handle, tensors)
        if handle.verbose:
            for tensor in tensors:
                if tensor.dtype != dtype:
                    print(f"{tensor.dtype} -> {dtype} ({getattr(function, '__name__', function)})")
        args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if _is_castable(leaf) else leaf, (args, kwargs))
        if not is_torchs:  # a user's function, inside which the usual casts apply
            return function(*args, **kwargs)
        with handle._disable_casts():
            return function(*args, **kwargs)

    return wrapper


def _half(handle: Casts, tensors: list[Tensor]) -> torch.dtype:
    return handle.dtype


def _float(handle: Casts, tensors: list[Tensor]) -> torch.dtype:
    return torch.float32


def _widest(handle: Casts, tensors: list[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def half_function(fn: _Function) -> _Function:
    """Decorator: under O1, cast floating-point arguments to 16 bits."""
    return _casting(_half, fn)


def float_function(fn: _Function) -> _Function:
    """Decorator: under O1, cast floating-point arguments to float32."""
    return _casting(_float, fn)


def promote_function(fn: _Function) -> _Function:
    """Decorator: under O1, cast floating-point arguments to the widest of their dtypes."""
    return _casting(_widest, fn)


_registered: list[tuple[Any, str, _Choice]] = []


def _register(module: Any, name: str, choice: _Choice) -> None:
    if not hasattr(module, name):
        raise AmpValueError(f"No function named {name} in module {module}.")
    _registered[:] = [entry for entry in _registered if entry[:2] != (module, name)]
    _registered.append((module, name, choice))


def register_half_function(module: Any, name: str) -> None:
    """Have `module.name` called with 16-bit tensors, from the next `initialize` at O1 on."""
    _register(module, name, _half)


def register_float_function(module: Any, name: str) -> None:
    """Have `module.name` called with float32 tensors, from the next `initialize` at O1 on."""
    _register(module, name, _float)


def register_promote_function(module: Any, name: str) -> None:
    """Have `module.name` called with tensors in the widest of their dtypes, from the next `initialize` at O1 on."""
    _register(module, name, _widest)


# ---- functions that must not run in 16 bits ------------------------------------------------------

_BANNED = (
    "binary_cross_entropy (and torch.nn.BCELoss) does not work on 16-bit inputs: the logarithm of a probability that "
    "16 bits round to 0 or 1 is infinite. Remove the sigmoid before it and use "
    "binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss), which is safe. Or compute the sigmoid in "
    "float32, with amp.register_float_function(torch, 'sigmoid') before amp.initialize. If you are sure of "
    "your inputs, use amp.init(allow_banned=True)"
)


def _guard_binary_cross_entropy(original: _Function) -> _Function:
    @functools.wraps(original)
    def binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if handle is None or not handle.is_active():
            return original(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_castable(leaf)]
        if any(tensor.element_size() < 4 for tensor in tensors) and not handle.allow_banned:
            raise NotImplementedError(_BANNED)
        # On CUDA, autocast refuses this function for any inputs.
        with handle._disable_casts():
            args, kwargs = tree_map(lambda leaf: leaf.float() if _is_castable(leaf) else leaf, (args, kwargs))
            return original(*args, **kwargs)

    return binary_cross_entropy


_FLOAT32_IN_PLACE = (
    *("acos_", "asin_", "cosh_", "erfinv_", "exp_", "expm1_", "log_", "log10_", "log2_", "reciprocal_", "rsqrt_"),
    *("sinh_", "tan_", "pow_", "__ipow__", "cumprod_", "cumsum_"),
)


def _guard_in_place(original: _Function) -> _Function:
    @functools.wraps(original)
    def in_place(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if handle is not None and handle.is_active() and self.is_floating_point() and self.element_size() < 4:
            name = original.__name__
            raise NotImplementedError(
                f"Tensor.{name} on a tensor of {self.dtype}: at opt level O1 this function runs in float32, and the "
                f"tensor has 16 bits. Write x = x.{name.strip('_').removeprefix('i')}(...), whose result "
                "is float32, or call it inside `with amp.disable_casts():`"
            )
        return original(self, *args, **kwargs)

    return in_place
