"""A `TorchDispatchMode`, on in every thread of a rehearsal, that marks results with the device of their inputs.

It sees every operator below autograd, including those of backward passes and of C++ code. An operator's newly
allocated outputs get the mark of its first marked input; `device="cuda"` becomes a mark as well. See [Note: marks].
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.tools.rehearse.devices.marks import ledger, mark, mark_of, storage_of
from lockstep.tools.rehearse.devices.naming import CPU, devices
from lockstep.tools.rehearse.patching import wrap

__all__ = [
    "GeneratorOfDevice",
    "Observer",
    "StandIn",
    "check_one_device",
    "enter_here",
    "generator_of",
    "install",
    "is_checked",
    "mixing",
    "observers",
    "placed",
    "tensors_among",
]

# Called with (operator, positional arguments, result) after each operator.
Observer = Callable[[Any, Sequence[Any], Any], None]
observers: list[Observer] = []

_aten = torch.ops.aten
# Operators whose tensor arguments CUDA requires on one device, and which C++ code does not call with temporary tensors
# of its own, so that a mismatch is the script's fault. For arithmetic see `arithmetic.py`.
_STRICT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.convolution.default,
        _aten.embedding.default,
        _aten.nll_loss_forward.default,
        _aten.nll_loss2d_forward.default,
        _aten.mse_loss.default,
        _aten.smooth_l1_loss.default,
        _aten.huber_loss.default,
        _aten.soft_margin_loss.default,
        _aten.binary_cross_entropy.default,
        _aten.binary_cross_entropy_with_logits.default,
        _aten.cat.default,
        _aten.stack.default,
        _aten.where.self,
        _aten.eq.Tensor,
        _aten.native_batch_norm.default,
        _aten._native_batch_norm_legit.default,
        _aten.native_layer_norm.default,
    }
)

# In float16 a CPU is about 50 times slower here. A GPU accumulates in float32 and rounds, and so does `_in_float32`.
_SLOW_IN_HALF = frozenset({_aten.convolution.default, _aten.convolution_backward.default})

# Positions of results that are in host memory with CUDA, too.
_IN_HOST_MEMORY = {_aten._pack_padded_sequence.default: frozenset({1})}

# Operators that may enlarge a tensor's memory.
_RESIZES = frozenset({_aten.resize_.default, _aten.resize_as_.default})

_local = threading.local()
_generators: dict[int, torch.Generator] = {}
# By address of the C++ generator, as C++ code returns it in another Python object.
_of_devices: weakref.WeakValueDictionary[int, GeneratorOfDevice] = weakref.WeakValueDictionary()
# Operator -> (allocates outputs, draws random numbers, writes into its first argument and is not a copy).
_traits: dict[Any, tuple[bool, bool, bool]] = {}
# Operators that may write from one device to another.
_COPIES = frozenset({"aten::copy_", "aten::set_", "aten::resize_as_", "aten::_foreach_copy_"})
# Prefix of Lockstep's own threads, which must see memory as it is.
_OWN_THREADS = "lockstep-"


class GeneratorOfDevice(torch._C.Generator):
    """Random generator of a stand-in; it can only be used for tensors on that device."""

    index: int
    _cdata: int

    def __new__(cls, index: int) -> GeneratorOfDevice:
        """Create a CPU generator that reports the device of the stand-in."""
        self = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        self.index = index
        _of_devices[self._cdata] = self
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that it draws numbers for."""
        return torch.device("cuda", self.index)

    def clone_state(self) -> GeneratorOfDevice:
        """A new generator in the same state."""
        clone = GeneratorOfDevice(self.index)
        clone.set_state(self.get_state())
        return clone

    def __reduce__(self) -> Any:
        """Like torch's own: pickling keeps the state."""
        return GeneratorOfDevice, (self.index,), super().__reduce__()[2]


def generator_of(index: int) -> torch.Generator:
    """The default generator of a stand-in; until seeded, it has CUDA's default seed."""
    generator = _generators.get(index)
    if generator is None:
        generator = _generators[index] = GeneratorOfDevice(index)
        generator.manual_seed(67280421310721)
    return generator


@contextlib.contextmanager
def placed(index: int | None) -> Iterator[None]:
    """Context manager: tensors that this thread creates are placed on that stand-in, or in host memory for None."""
    before = getattr(_local, "override", ())
    _local.override = (index,)
    try:
        yield
    finally:
        _local.override = before


@contextlib.contextmanager
def mixing() -> Iterator[None]:
    """Context manager: this thread's operators accept tensors on different devices."""
    before = getattr(_local, "mixes", False)
    _local.mixes = True
    try:
        yield
    finally:
        _local.mixes = before


def tensors_among(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, including those in lists and tuples."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_among(argument)


def _traits_of(func: Any) -> tuple[bool, bool, bool]:
    found = _traits.get(func)
    if found is None:
        schema = func._schema
        fresh = any(result.alias_info is None for result in schema.returns)
        draws = any(argument.name == "generator" for argument in schema.arguments)
        first = schema.arguments[0].alias_info if schema.arguments else None
        writes = first is not None and first.is_write and schema.name not in _COPIES
        found = _traits[func] = fresh, draws, writes and schema.name.startswith("aten::")
    return found


def is_checked() -> bool:
    """Whether mixing devices is an error of the script: not inside `mixing` or a backward pass of this thread."""
    return not getattr(_local, "mixes", False) and torch._C._current_graph_task_id() == -1


def check_one_device(name: str, arguments: Sequence[Any], index: int) -> None:
    """Reject tensors that are not on stand-in `index`; tensors without dimensions may be anywhere.

    Args:
        name: name of the operator.
        arguments: its arguments: tensors, lists of tensors, and others, which are ignored.
        index: the stand-in of the first argument that is on one.

    Raises:
        RuntimeError: a tensor is elsewhere; with CUDA's message.
    """
    for tensor in tensors_among(arguments):
        other = mark_of(tensor)
        if other != index and tensor.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:{index} and "
                f"{'cpu' if other is None else f'cuda:{other}'}! (when checking arguments of {name})"
            )


def _check_generator(generator: Any, place: int | None) -> None:
    known = _of_devices.get(generator._cdata)
    index = None if known is None else known.index
    if index != place:
        names = ["cpu" if each is None else f"cuda:{each}" for each in (place, index)]
        if None in (place, index):
            names = [name.partition(":")[0] for name in names]
        raise RuntimeError(f"Expected a '{names[0]}' device type for generator but found '{names[1]}'")


def _is_slow(func: Any, args: Sequence[Any]) -> bool:
    return func in _SLOW_IN_HALF and args[0].dtype == torch.float16


def _in_float32(func: Any, args: Sequence[Any]) -> Any:
    """The result of an operator in float16, computed in float32 and rounded."""
    wide = [each.float() if isinstance(each, torch.Tensor) else each for each in args]
    result = func(*wide)
    if isinstance(result, torch.Tensor):
        return result.half()
    return tuple(None if each is None else each.half() for each in result)


def _mark_copies(args: Any, result: Any, place: int) -> None:
    """Marks the copy made by an operator that may also return its argument (`to`, `reshape`), in inference_mode()."""
    own = storage_of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    for each in tensors_among((result,)):
        if own is not None and storage_of(each) is not own:
            mark(each, place)


def _run_higher_order(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a higher-order operator; its results are on the device of its first marked tensor."""
    result = func(*args, **kwargs)
    index = next((place for each in tensors_among(args) if (place := mark_of(each)) is not None), None)
    if index is not None:
        for each in tensors_among(result if isinstance(result, tuple) else (result,)):
            mark(each, index)
    return result


class StandIn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode; see the module's docstring."""

    supports_higher_order_operators = True  # such as flex_attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator on CPU memory, and mark its results."""
        if not isinstance(func, torch._ops.OpOverload):
            return _run_higher_order(func, args, kwargs or {})
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # Tensors composed of others (DTensor, nested tensors) run the operator; it arrives here with their parts.
            return NotImplemented
        kwargs = kwargs or {}
        index: int | None = None
        asked = kwargs.get("device")
        if asked is not None and asked.type == "cuda":
            index = devices.index_of(asked)
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if index is None:
            for tensor in tensors_among(args):
                index = mark_of(tensor)
                if index is not None:
                    break
        override = getattr(_local, "override", ())
        place = override[0] if override else index
        is_fresh, is_random, writes = _traits_of(func)
        if index is not None and func in _STRICT and is_checked():
            check_one_device(func._schema.name.removeprefix("aten::"), args, index)
        if is_random:
            generator = kwargs.get("generator")
            if generator is not None:
                _check_generator(generator, place)
            elif place is not None:
                kwargs = {**kwargs, "generator": generator_of(place)}
        result = _in_float32(func, args) if _is_slow(func, args) else func(*args, **kwargs)
        if is_fresh and place is not None:
            self._mark(func, result, place)
        elif place is not None:
            _mark_copies(args, result, place)
        if writes and index is not None and isinstance(args[0], torch.Tensor):
            # CUDA would reject a tensor elsewhere, so it is an unmarked temporary tensor of C++ code.
            mark(args[0], index)
        if func in _RESIZES:
            storage = storage_of(args[0])
            ledger.resize(storage, storage.nbytes())
        for observer in observers:
            observer(func, args, result)
        return result

    @staticmethod
    def _mark(func: Any, result: Any, place: int) -> None:
        results = result if isinstance(result, list | tuple) else (result,)
        in_host_memory = _IN_HOST_MEMORY.get(func, frozenset())
        for position, (returned, value) in enumerate(zip(func._schema.returns, results, strict=False)):
            # A list of new tensors is one return of the schema.
            single = isinstance(result, list) and len(func._schema.returns) == 1
            if returned.alias_info is None and position not in in_host_memory:
                for tensor in tensors_among(results if single else (value,)):
                    mark(tensor, place)


def enter_here() -> None:
    """Enable the mode in this thread, for good."""
    if not getattr(_local, "entered", False):
        _local.entered = True
        StandIn().__enter__()  # type: ignore[no-untyped-call]


def install() -> None:
    """Enable the mode in this thread and in every Python thread that starts from now on, except Lockstep's."""
    enter_here()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def bootstrap(self: threading.Thread) -> Any:
            if not self.name.startswith(_OWN_THREADS):
                enter_here()
            return original(self)

        return bootstrap

    wrap(threading.Thread, "_bootstrap_inner", make)
