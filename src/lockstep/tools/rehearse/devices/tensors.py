"""Replaces the functions that query a tensor's device, move it, or create one.

[Note: moves] `x.to("cuda:1")` is handled here and not below autograd, where both sides look like CPU memory and torch
would find nothing to do. A move copies, as it does between real devices, and its gradient is moved back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nested._internal.nested_tensor import _tensor_symint_registry as _symbols_of_offsets
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from lockstep.tools.rehearse.devices.marks import mark, mark_of, note_on, real_device
from lockstep.tools.rehearse.devices.mode import generator_of, placed
from lockstep.tools.rehearse.devices.naming import CPU, devices
from lockstep.tools.rehearse.patching import replace, wrap

__all__ = ["install", "move"]

_PINNED = "_lockstep_pinned"
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
_FACTORIES = (
    *("zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "logspace"),
    *("eye", "empty_strided", "tril_indices", "triu_indices", "normal", "range", "scalar_tensor"),
)
_RANDOM = frozenset({"rand", "randn", "randint", "randperm", "normal"})
_FROM_DATA = ("tensor", "as_tensor", "asarray", "sparse_coo_tensor", "sparse_csr_tensor")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")

_OTHER_TYPE = {torch.float64: torch.float32}

_data: Any = torch._C.TensorBase.data
_plain_to = torch.Tensor.to
_plain_type = torch.Tensor.type


class _Move(torch.autograd.Function):
    """A copy to another device. See [Note: moves]."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, index: int | None) -> torch.Tensor:
        """Copy the tensor to stand-in `index`, or to host memory for None."""
        ctx.home = mark_of(tensor)
        return _copy(tensor, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Copy the gradient back to the input's device."""
        return _copy(grads[0], ctx.home), None


def _copy(tensor: torch.Tensor, index: int | None) -> torch.Tensor:
    if hasattr(tensor, "__tensor_flatten__"):
        return _copy_parts(tensor.detach(), index)
    with placed(index):
        result = tensor.detach().clone()
    return result if index is None else mark(result, index)


def _copy_parts(tensor: Any, index: int | None) -> torch.Tensor:
    """Copy a tensor that is composed of others to another device, by copying its parts."""
    names, context = tensor.__tensor_flatten__()
    parts = {}
    for name in names:
        part = getattr(tensor, name)
        parts[name] = _copy(part, index) if isinstance(part, torch.Tensor) else part  # a mesh of devices
        # Nested tensors with the same symbol for their offsets are known to have the same row lengths.
        if isinstance(part, torch.Tensor) and part in _symbols_of_offsets:
            _symbols_of_offsets[parts[name]] = _symbols_of_offsets[part]
    result: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return result


def move(tensor: torch.Tensor, index: int | None) -> torch.Tensor:
    """The tensor, copied to stand-in `index` or to host memory for None; the tensor itself if already there."""
    if mark_of(tensor) == index:
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Move.apply(tensor, index)  # type: ignore[no-untyped-call,no-any-return]
    return _copy(tensor, index)


def _arguments_of_to(words: Sequence[Any], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of `to`: the target (a device, a tensor or None), and the others by name, without those of None."""
    names: tuple[str, ...] = ("dtype", "non_blocking", "copy")
    target = options.pop("device", None)
    if words and not isinstance(words[0], torch.dtype):
        # A device of None, as `Module.to` passes it, means to stay on the current one.
        target = target if words[0] is None else words[0]
        names = names[1:] if isinstance(words[0], torch.Tensor) else names
        words = words[1:]
    if len(words) > len(names):
        raise TypeError(f"to() got {len(words) - len(names)} argument(s) too many after {', '.join(names)}")
    target = options.pop("other", None) if target is None else target
    told = {**options, **dict(zip(names, words, strict=False))}
    return target, {name: value for name, value in told.items() if value is not None}


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    target, options = _arguments_of_to(args, dict(kwargs))
    if isinstance(target, torch.Tensor):
        index, options["dtype"] = mark_of(target), target.dtype
        target = CPU if index is None else torch.device("cuda", index)
    if target is None:
        return _plain_to(self, **options)
    known = isinstance(target, int) or torch.device(target).type in ("cpu", "cuda")
    if not known or real_device(self).type != "cpu":
        return _plain_to(self, target, **options)
    options.pop("non_blocking", None)
    moved = move(self, devices.index_of(target))
    if moved is not self:
        options.pop("copy", None)
    return _plain_to(moved, **options) if options else moved


def _cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    moved = self  # As with CUDA: without a device, a tensor that is on a GPU stays there.
    if device is not None or mark_of(self) is None:
        moved = move(self, devices.cuda_index(kwargs.get("async", device) if device is None else device))
    memory_format = kwargs.get("memory_format")
    return moved if memory_format is None else _plain_to(moved, memory_format=memory_format)


def _cpu(self: torch.Tensor, memory_format: Any = torch.preserve_format) -> torch.Tensor:
    return move(self, None)


def _type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    if dtype is None:
        # Otherwise, under a function mode, torch would call the replacement of `type`, which is this function.
        with torch._C.DisableTorchFunction():
            name = _plain_type(self)
        return name if mark_of(self) is None else name.replace("torch.", "torch.cuda.", 1)
    kind: Any = dtype if isinstance(dtype, str) else getattr(dtype, "_lockstep_name", None)
    if isinstance(kind, str) and kind.startswith("torch.cuda."):
        host = _plain_type(self, kind.replace("torch.cuda.", "torch.", 1))
        return move(host, devices.current if mark_of(self) is None else mark_of(self))
    result = _plain_type(self, dtype)
    # The name of a CPU tensor type means host memory; a dtype means the same device.
    return result if isinstance(dtype, torch.dtype) else move(result, None)


def _device(self: torch.Tensor) -> torch.device:
    index = mark_of(self)
    return real_device(self) if index is None else torch.device("cuda", index)


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """Reset a parameter's gradient accumulator on a change of device, by first changing its dtype.

    As on GPUs, torch's DistributedDataParallel, whose hooks are on the old accumulator, then averages nothing more.
    """
    is_plain = type(self) in (torch.Tensor, torch.nn.Parameter) and self.layout is torch.strided
    if is_plain and self.requires_grad and mark_of(self) != mark_of(value):
        _data.__set__(self, torch.empty(0, dtype=_OTHER_TYPE.get(self.dtype, torch.float64), device="cpu"))
    _data.__set__(self, value)


def _refuse_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        index = mark_of(self)
        if index is not None and not kwargs.get("force", False):
            raise TypeError(
                f"can't convert cuda:{index} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        return original(self, *args, **kwargs)

    return to_numpy


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if mark_of(self) is not None:
        raise RuntimeError(f"cannot pin '{_type(self)}' only dense CPU tensors can be pinned")
    if getattr(self.untyped_storage(), _PINNED, False):
        return self
    pinned = self.clone()
    note_on(pinned.untyped_storage(), _PINNED, True)
    return pinned


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return bool(getattr(self.untyped_storage(), _PINNED, False))


def _default_device() -> torch.device | None:
    """The default device of this thread, by `torch.set_default_device` or `with torch.device(…)`; None if not set."""
    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def _with_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accepts a number as `device`, and checks the device before creating the tensor there."""
    has_default = original.__name__ in _FACTORIES

    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None and has_default:
            device = _default_device()
        if device is None:
            return original(*args, **kwargs)
        if isinstance(device, int):
            device = torch.device("cuda", device)
        kwargs["device"] = device
        if torch.device(device).type not in ("cpu", "cuda"):
            return original(*args, **kwargs)
        index = devices.index_of(device)
        kwargs["device"] = CPU
        if index is not None and original.__name__ in _RANDOM and kwargs.get("generator") is None:
            kwargs["generator"] = generator_of(index)
        with placed(index):
            result = original(*args, **kwargs)
        return result if index is None else mark(result, index)

    return make


def _from_data(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device", None)
        source = args[0] if args else kwargs.get("data")
        if device is None and not isinstance(source, torch.Tensor):
            device = _default_device()
        if device is None:
            index = mark_of(source) if isinstance(source, torch.Tensor) else None
        elif isinstance(device, int) or torch.device(device).type in ("cpu", "cuda"):
            index = devices.index_of(device)
        else:
            return original(*args, device=device, **kwargs)
        kwargs.pop("pin_memory", None)
        if index is None and not isinstance(source, torch.Tensor):
            return original(*args, device=CPU, **kwargs)
        wants_grad = kwargs.pop("requires_grad", False)
        result = move(original(*args, **kwargs), index)
        return result.requires_grad_() if wants_grad else result

    return make


def _set_default_tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_default_tensor_type(kind: Any) -> None:
        name = kind if isinstance(kind, str) else getattr(kind, "_lockstep_name", "")
        is_cuda = name.startswith("torch.cuda.")
        original(name.replace("torch.cuda.", "torch.", 1) if is_cuda else kind)
        torch.set_default_device("cuda" if is_cuda else "cpu")

    return set_default_tensor_type


def _parse_to(original: Callable[..., Any]) -> Callable[..., Any]:
    """Parses the arguments of `Module.to`; a number means a GPU, and a tensor its device and dtype."""

    def parse(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", int(args[0])), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return original(*args, **kwargs)

    return parse


def _keep_mark(original: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a deep copy of a storage like the original."""

    def deepcopy(self: Any, memo: Any) -> Any:
        from lockstep.tools.rehearse.devices.marks import _MARK, mark_storage

        result = original(self, memo)
        index = getattr(self, _MARK, None)
        if index is not None:
            mark_storage(result, index)
        return result

    return deepcopy


def _new(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor.new_tensor(data)` and the older `tensor.new(…)`: on the tensor's device, unless told otherwise."""

    def make(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.pop("device", None)
        wants_grad = kwargs.pop("requires_grad", False)
        index = mark_of(self) if device is None else devices.index_of(device)
        result = move(original(self, *args, **kwargs), index)
        return result.requires_grad_() if wants_grad else result

    return make


def _histc(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.histc`, which takes integers on GPUs, but not on CPUs."""

    def histc(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if mark_of(self) is None or self.is_floating_point():
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        counts: torch.Tensor = original(self.double(), *args, **kwargs)
        return counts.to(self.dtype)

    return histc


def _pad_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the padded result, which torch creates empty in host memory and fills; lengths stay in host memory."""

    def pad(data: torch.Tensor, *args: Any) -> Any:
        padded, lengths = original(data, *args)
        index = mark_of(data)
        return (padded if index is None else mark(padded, index)), lengths

    return pad


def _pad(original: Callable[..., Any]) -> Callable[..., Any]:
    """Like `_pad_packed`, for `pad_sequence`."""

    def pad(sequences: Any, *args: Any, **kwargs: Any) -> Any:
        padded = original(sequences, *args, **kwargs)
        index = next((mark_of(each) for each in sequences if isinstance(each, torch.Tensor)), None)
        return padded if index is None else mark(padded, index)

    return pad


def install() -> None:
    """Replace the methods that query or move tensors, and the functions that create them."""
    replace(torch.Tensor, "device", property(_device))
    replace(torch.Tensor, "data", property(_data.__get__, _set_data))
    replace(torch.Tensor, "is_cuda", property(lambda self: mark_of(self) is not None))
    for name, function in (("to", _to), ("cuda", _cuda), ("cpu", _cpu), ("type", _type)):
        replace(torch.Tensor, name, function)
    replace(torch.Tensor, "type_as", lambda self, other: self.to(other.device, other.dtype))
    replace(torch.Tensor, "pin_memory", _pin_memory)
    replace(torch.Tensor, "is_pinned", _is_pinned)
    replace(torch.Tensor, "get_device", lambda self: -1 if mark_of(self) is None else mark_of(self))
    replace(torch.Tensor, "record_stream", lambda self, stream: None)
    for name in ("numpy", "__array__"):
        wrap(torch.Tensor, name, _refuse_numpy)
    for name in (*_FACTORIES, *_LIKE):
        wrap(torch, name, _with_device)
    for name in _FROM_DATA:
        wrap(torch, name, _from_data)
    wrap(torch, "set_default_tensor_type", _set_default_tensor_type)
    for owner in (torch, torch.Tensor):
        wrap(owner, "histc", _histc)
    for name in ("new_tensor", "new"):
        wrap(torch.Tensor, name, _new)
    for name in _NEW:
        wrap(torch.Tensor, name, _with_device)
    wrap(torch._C._nn, "_parse_to", _parse_to)
    wrap(torch._VF, "_pad_packed_sequence", _pad_packed)
    wrap(torch._C._nn, "pad_sequence", _pad)
    wrap(torch.UntypedStorage, "__deepcopy__", _keep_mark)
