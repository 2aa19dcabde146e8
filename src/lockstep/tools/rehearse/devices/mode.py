"""A `TorchDispatchMode`, on in every thread of a rehearsal, that marks results with the device of their inputs.

It sees every operator below autograd, so also those of backward passes and of C++ code. An operator's fresh
outputs get the mark of its first marked input; a `device="cuda"` becomes a mark as well. [Note: marks]
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
# Operators whose tensor arguments CUDA wants on one device, with nothing in between that C++ code may have
# made for itself: a mismatch here is the script's. Arithmetic is none of them: see `arithmetic.py`.
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

# In float16 a CPU takes some 50 times as long for these. A GPU adds up in float32 and rounds, and so it is done here.
_SLOW_IN_HALF = frozenset({_aten.convolution.default, _aten.convolution_backward.default})

# Results that CUDA's own operators leave in host memory, by their position.
_IN_HOST_MEMORY = {_aten._pack_padded_sequence.default: frozenset({1})}

# What makes a tensor's memory larger.
_RESIZES = frozenset({_aten.resize_.default, _aten.resize_as_.default})

_local = threading.local()
_generators: dict[int, torch.Generator] = {}
# By the address of what is behind them: what comes out of C++ is another Python object.
_of_devices: weakref.WeakValueDictionary[int, GeneratorOfDevice] = weakref.WeakValueDictionary()
# Operator -> (has it fresh outputs, does it draw random numbers, does it write into its first argument).
_traits: dict[Any, tuple[bool, bool, bool]] = {}
# What may write from one device into another.
_COPIES = frozenset({"aten::copy_", "aten::set_", "aten::resize_as_", "aten::_foreach_copy_"})
# Threads of Lockstep's own, which must see memory as it is.
_OWN_THREADS = "lockstep-"


class GeneratorOfDevice(torch._C.Generator):
    """Random numbers for a stand-in, and for nothing else."""

    index: int
    _cdata: int

    def __new__(cls, index: int) -> GeneratorOfDevice:
        """A generator on the CPU, which says otherwise."""
        self = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        self.index = index
        _of_devices[self._cdata] = self
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its numbers are for."""
        return torch.device("cuda", self.index)

    def clone_state(self) -> GeneratorOfDevice:
        """Another in the same state."""
        clone = GeneratorOfDevice(self.index)
        clone.set_state(self.get_state())
        return clone

    def __reduce__(self) -> Any:
        """As torch's own, which makes another and gives it the state."""
        return GeneratorOfDevice, (self.index,), super().__reduce__()[2]


def generator_of(index: int) -> torch.Generator:
    """The random numbers of a stand-in; from CUDA's own first seed until it is seeded."""
    generator = _generators.get(index)
    if generator is None:
        generator = _generators[index] = GeneratorOfDevice(index)
        generator.manual_seed(67280421310721)
    return generator


@contextlib.contextmanager
def placed(index: int | None) -> Iterator[None]:
    """A context: tensors that this thread makes inside lie on that stand-in, or in host memory for None."""
    before = getattr(_local, "override", ())
    _local.override = (index,)
    try:
        yield
    finally:
        _local.override = before


@contextlib.contextmanager
def mixing() -> Iterator[None]:
    """A context: inside, this thread's operators take tensors of several devices without an error."""
    before = getattr(_local, "mixes", False)
    _local.mixes = True
    try:
        yield
    finally:
        _local.mixes = before


def tensors_among(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, those in lists and tuples included."""
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
    """Whether tensors of several devices are a mistake of the script's now, in this thread."""
    return not getattr(_local, "mixes", False) and torch._C._current_graph_task_id() == -1


def check_one_device(name: str, arguments: Sequence[Any], index: int) -> None:
    """Refuse tensors that do not lie on stand-in `index`; single numbers may lie in host memory.

    Args:
        name: of the operator.
        arguments: tensors, lists of them, and others.
        index: the device of the first that lies on any.

    Raises:
        RuntimeError: one lies elsewhere, in CUDA's words.
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
    """Marks what an operator that may return its argument (`to`, `reshape`) has copied: in inference_mode() it does."""
    own = storage_of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    for each in tensors_among((result,)):
        if own is not None and storage_of(each) is not own:
            mark(each, place)


def _run_higher_order(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator of functions, whose results lie where its first tensor does."""
    result = func(*args, **kwargs)
    index = next((place for each in tensors_among(args) if (place := mark_of(each)) is not None), None)
    if index is not None:
        for each in tensors_among(result if isinstance(result, tuple) else (result,)):
            mark(each, index)
    return result


class StandIn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module's docstring."""

    supports_higher_order_operators = True  # such as flex_attention, of which operators come by here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator on CPU memory, and say where its results lie."""
        if not isinstance(func, torch._ops.OpOverload):
            return _run_higher_order(func, args, kwargs or {})
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # Tensors that are made of others (DTensor, nested ones): they do it, and their parts come by here.
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
            # CUDA takes no other tensor there: it is one that C++ has made for itself.
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
            # A list of fresh tensors is one return of the schema.
            single = isinstance(result, list) and len(func._schema.returns) == 1
            if returned.alias_info is None and position not in in_host_memory:
                for tensor in tensors_among(results if single else (value,)):
                    mark(tensor, place)


def enter_here() -> None:
    """Turn the mode on in this thread, for good."""
    if not getattr(_local, "entered", False):
        _local.entered = True
        StandIn().__enter__()  # type: ignore[no-untyped-call]


def install() -> None:
    """Turn it on in this thread and in every Python thread that starts from now on."""
    enter_here()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def bootstrap(self: threading.Thread) -> Any:
            if not self.name.startswith(_OWN_THREADS):
                enter_here()
            return original(self)

        return bootstrap

    wrap(threading.Thread, "_bootstrap_inner", make)
