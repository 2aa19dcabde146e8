"""Records a process's computation: forward passes sample by sample, losses, gradients, and optimizer steps.

Writes `calls` of a step, the forward passes that train: `name` (class of the outermost module), `resting` (number of
modules in eval mode), `keys` and `unpadded` (of its input rows), `count` of rows, `lengths` (first two sizes of its
first input), `inputs` and `outputs` (sketches of each row, or None; also with `across`, if the rows of a sample are
`count` apart, as in joined views), `widths` (numbers per row of each output), `parameters` (two numbers of each),
`after` (number of backward passes before), `inner` (name, class and sketches of the first input and output of modules
inside, in order), `filler`, `samples` (keys of the last batch if it has as many rows, else `unpadded`), `entered`
(`parameters` before the call) and `buffers` (two numbers of each). Also `others`, the same for the first calls that do
not train, such as of a teacher, and `rounded`: the eps of the coarsest 16-bit numbers that modules return.

Writes `backwards` (`losses`: the numbers that backward() was called on, None for other tensors; `local`: what reached
each parameter in this process, before averaging; `batch`: index of the last batch; `weighed`: whether by lockstep.mean)
and, for the optimizer's step, `optimizer` (its number), `kind`, `precision` (eps of its parameters), `closure` (number
of backward passes within the step), `names` and `shapes` (of its parameters), `held` (the engine of each, or None),
`settings` (of its groups), `after` (`.grad` when the last backward pass returned), `used` (the gradients that it used),
`begin` and `end` (the parameters before and after), and `buffers`. All values are `rows.value_sample`s, and parameters
are identified by their positions in the optimizer.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import batch
from lockstep.parallel.distributed import DistributedDataParallel as OwnDistributedDataParallel
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.verify.recorder import StepRecorder
from lockstep.tools.verify.rows import brief, by_place, row_sketch, sample_keys, samples_first, value_sample
from lockstep.tools.verify.state import plain_name
from lockstep.tree import map_tensors, tensors_in

__all__ = ["TrainingWatch"]

_MOST_INNER, _MOST_OTHERS = 400, 32
_OF_16_BITS = (torch.float16, torch.bfloat16)
# Scale of float16 losses, far from overflow and from vanishing gradients; and the steps after which it grows.
_SCALE, _NEVER = 1024.0, 2**31 - 1
# Graph node of lockstep.mean and similar functions: each rank's loss then has weight 1/N, for any share of the batch.
_OF_MEANS = "_RescaleBackward"
# Settings of an optimizer's group that two runs can compare.
_SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps", "dampening", "alpha", "rho")


class TrainingWatch:
    """Watches modules, backward passes and optimizers of this process.

    Args:
        recorder: recorder of this process.
        on_step: called after a step, before the next begins.
    """

    def __init__(self, recorder: StepRecorder, on_step: Callable[[], None]) -> None:
        self._recorder = recorder
        self._on_step = on_step
        self._thread = threading.get_ident()
        # Modules that have been called and have not returned, the outermost first; and the results of those inside it.
        self._stack: list[nn.Module] = []
        self._inner: list[tuple[dict[str, str], list[Tensor], list[Tensor]]] = []
        self._entered: tuple[Tensor, Tensor] | None = None  # parameters and buffers of the outermost one at its call
        self._called: list[nn.Module] = []  # in this step
        self._is_first_call = False  # of that module
        self._module_names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        # Parameters by id, which is not reused while they are kept.
        self._kept: dict[int, Tensor] = {}
        self._names: dict[int, str] = {}
        self._heard: set[int] = set()
        self._held: dict[int, int] = {}  # number of the engine
        # Gradients that have reached parameters in this backward pass; None outside one.
        self._local: dict[int, Tensor] | None = None
        self._left: dict[int, Tensor] = {}  # and `.grad` after the last one
        self._stepping: Any = None
        self._depth = 0  # calls of its step() within step()
        self._before: dict[str, Any] = {}

    def install(self) -> None:
        """Watch from now on."""
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        wrap(Join, "__init__", self._join)
        wrap(torch.Tensor, "backward", self._backward)
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch.amp.GradScaler, "__init__", self._make_scaler)
        wrap(torch.amp.GradScaler, "unscale_", self._unscale)
        wrap(Optimizer, "__init__", _made(self._see_optimizer))
        wrap(nn.parallel.DistributedDataParallel, "__init__", _made(self._see_engine))
        wrap(OwnDistributedDataParallel, "__init__", _made(self._see_engine))
        # Before the script's own hooks, which may change a parameter's gradient.
        register_module_parameter_registration_hook(lambda module, name, parameter: self._see(parameter, ""))
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    # ---- parameters ----------------------------------------------------------------------------------

    def _see_all(self, module: str, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            self._see(parameter, plain_name(f"{module}.{name}" if module else name))

    def _see_optimizer(self, optimizer: Any) -> None:
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):
            for place, parameter in enumerate(group["params"]):
                self._see(parameter, f"group{number}[{place}]")

    def _see(self, parameter: Tensor | None, name: str) -> None:
        """Record the gradients that reach a parameter."""
        if parameter is None or not parameter.is_leaf or nn.parameter.is_lazy(parameter):
            return
        key = id(parameter)
        self._kept[key] = parameter
        known = self._names.get(key)
        if not known or known.startswith("group"):
            self._names[key] = name
        if parameter.requires_grad and key not in self._heard:
            self._heard.add(key)
            parameter.register_hook(lambda gradient: self._reach(key, gradient))  # type: ignore[no-untyped-call]

    def _reach(self, key: int, gradient: Tensor | None) -> None:
        # None for a path without gradients, such as from an output that the loss does not use.
        if gradient is None or self._local is None or self._recorder.is_cut:
            return
        with self._recorder.aside(), torch.no_grad():
            sample = value_sample(gradient)
            self._local[key] = self._local[key] + sample if key in self._local else sample

    # ---- loss scalers and engines --------------------------------------------------------------------

    def _make_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Give GradScaler a constant scale: a dynamic one skips steps by the size of a loss, which differs on ranks."""

        signature = inspect.signature(original)

        def init(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            asked = bound.arguments
            asked.update(init_scale=min(asked["init_scale"], _SCALE), growth_interval=_NEVER)
            self._recorder.facts["scales"] |= bool(asked["enabled"])
            original(*bound.args, **bound.kwargs)

        return init

    def _unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Ignore the scale's float32 in measuring precision: it is the same number in all runs."""

        def unscale(*args: Any) -> None:
            with self._recorder.aside():
                original(*args)

        return unscale

    def _join(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(context: Any, *args: Any, **kwargs: Any) -> None:
            self._recorder.facts["joins"] |= not kwargs.get("divide_by_initial_world_size", True)
            original(context, *args, **kwargs)

        return init

    def _see_engine(self, engine: Any) -> None:
        engines = self._recorder.facts["engines"]
        number = len(engines)
        engines.append({"own": isinstance(engine, OwnDistributedDataParallel)})
        self._held.update((id(each), number) for each in engine.parameters() if each.requires_grad)
        engine.register_forward_pre_hook(lambda *_: self._recorder.step["engine_calls"].append(number))

    # ---- forward passes ------------------------------------------------------------------------------

    def _is_seen(self) -> bool:
        is_here = self._local is None and threading.get_ident() == self._thread
        return is_here and not _is_without_numbers() and self._recorder.busy == 0

    def _before_forward(self, module: nn.Module, args: Any) -> Any:
        if not self._is_seen():
            return None
        self._stack.append(module)
        if len(self._stack) != 1:
            return None
        self._recorder.check_time()
        self._inner = []
        self._note_called(module)
        if self._trains(module):
            self._recorder.begin_work()
            self._see_all("", module.named_parameters())
            self._recorder.begin_training(module)
        else:
            self._note_untrained(module)
        self._note_entered(module)
        # Data may have a dtype of their own, such as that of images, whatever the default.
        is_wide = self._recorder.settings.double and any(each.dtype is torch.float64 for each in module.parameters())
        return map_tensors(_widened, args) if is_wide else None

    def _note_called(self, module: nn.Module) -> None:
        step = self._recorder.step
        step["forwards"] += 1
        if step["forwards"] == 1:
            self._called.clear()
        self._is_first_call = not any(module is each for each in self._called)
        self._called.append(module)

    def _note_entered(self, module: nn.Module) -> None:
        """Record the parameters before a call in a step."""
        parameters, self._entered = [*module.parameters()], None
        is_computing = self._is_beside_training() and len(self._recorder.step["others"]) < _MOST_OTHERS
        # FSDP2's shards would be gathered, here maybe not by all ranks.
        is_whole = _have_numbers(parameters) and not any(isinstance(each, DTensor) for each in parameters)
        if is_whole and (is_computing or self._trains(module)):
            with self._recorder.aside(), torch.no_grad():
                self._entered = brief(parameters), by_place(each for each in module.buffers() if each.numel())

    def _is_beside_training(self) -> bool:
        """Whether a call that does not train may belong to a step; without a loader, it may come first."""
        recorder = self._recorder
        return recorder.is_computing or (recorder.is_recording and not recorder.facts["passes"])

    def _trains(self, module: nn.Module) -> bool:
        if not torch.is_grad_enabled() or self._recorder.is_cut:
            return False
        parameters = list(module.parameters())
        return _have_numbers(parameters) and any(each.requires_grad for each in parameters)

    def _note_untrained(self, module: nn.Module) -> None:
        """Record the weights of a model that is not trained, such as an average of trained weights."""

        def own() -> list[Tensor]:
            parameters = list[Tensor](module.parameters())
            trained = {id(each) for root in self._recorder.roots for each in root.parameters()}
            return parameters if _have_numbers(parameters) and trained.isdisjoint(map(id, parameters)) else []

        self._recorder.note_untrained(type(module).__name__, own)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, result: Any = None) -> Any:
        # torch leaves an argument out where forward() has raised
        if not self._is_seen() or not self._stack or self._stack[-1] is not module:
            return None
        self._stack.pop()
        if not (self._stack or module.training or torch.is_grad_enabled()) and self._recorder.note_evaluation():
            return map_tensors(_others, result) if self._recorder.settings.moves else None
        self._note_forward(module, args, kwargs, result)
        return None

    def _note_forward(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        is_beside = self._is_beside_training()
        if self._recorder.is_cut or not (torch.is_grad_enabled() or is_beside):
            return
        # Rounding by a communication hook does not count here: it affects the gradients of N ranks.
        rounded = [torch.finfo(each.dtype).eps for each in tensors_in(result) if each.dtype in _OF_16_BITS]
        if torch.is_grad_enabled():
            self._recorder.step["rounded"] = max([self._recorder.step["rounded"], *rounded])
        with self._recorder.aside(), torch.no_grad():
            name = self._name_of(module) if self._stack else ""
            # Again, because FSDP2 has replaced them by whole parameters.
            self._see_all(name, module.named_parameters(recurse=False))
            inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
            if self._stack:
                taken, made = _first(inputs), _first(outputs)
                if len(self._inner) < _MOST_INNER and made:
                    self._inner.append(({"name": name, "kind": type(module).__name__}, taken, made))
                return
        kind = "calls" if self._trains(module) else "others" if is_beside and self._entered is not None else ""
        with self._recorder.aside(), torch.no_grad():
            if kind and result is not None:
                self._recorder.step[kind].append(self._call(module, args, kwargs, inputs, outputs))
            self._inner = []

    def _name_of(self, module: nn.Module) -> str:
        root = self._stack[0]
        names = self._module_names.get(root)
        if names is None:
            names = {id(each): plain_name(name) for name, each in root.named_modules()}
            self._module_names[root] = names
        return names.get(id(module), "")

    def _call(
        self, module: nn.Module, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> dict[str, Any]:
        """The record of a call that has returned."""
        self._recorder.note_line("call")
        step, given = self._recorder.step, list[Any]([args, kwargs])
        last = step["batches"][-1] if step["batches"] else None
        lengths = _lengths_of(inputs)
        columns = self._columns_of(last, lengths)
        if columns:
            given, outputs = (_samples_first(each, columns, last is not None) for each in (inputs, outputs))
            inputs = given
        count = _count_of(args, inputs, last)
        samples = [key for _, key in last["keys"]] if last else []
        keys = sample_keys(given, count, self._recorder.settings.padding) if count else []
        unpadded = [key for _, key in keys]
        return {
            "name": type(getattr(module, "module", module)).__name__,
            "count": count,
            "lengths": lengths,
            "resting": sum(not each.training for each in module.modules()),
            "keys": [key for key, _ in keys],
            "unpadded": unpadded,
            "widths": [each.numel() // count for each in outputs] if count else [],
            "after": len(step["backwards"]),
            "after_batches": len(step["batches"]),
            "inner": [{**names, **_sketches(taken, made, count)} for names, taken, made in self._inner],
            "filler": bool(last and last["filler"]),
            "samples": samples if len(samples) == count else unpadded,
            **self._state_of(module),
            **_sketches(inputs, outputs, count),
        }

    def _state_of(self, module: nn.Module) -> dict[str, Any]:
        held, buffers = brief(module.parameters()), brief(each for each in module.buffers() if each.numel())
        entered, before = (held, torch.zeros(0)) if self._entered is None else self._entered
        numbers = {"parameters": held, "entered": entered, "buffers": buffers, "buffers before": before}
        return {**numbers, "is_first": self._is_first_call}

    def _columns_of(self, last: dict[str, Any] | None, lengths: list[int]) -> int:
        """The number of samples if they are columns, else 0."""
        if last is not None:
            return int(last["rows"]) if last["time_first"] else 0
        return lengths[1] if self._recorder.settings.time_first and len(lengths) == 2 else 0

    # ---- backward passes -----------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._local is not None or not self._recorder.is_recording:
                return original(tensors, *args, **kwargs)
            self._local = {}
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._note_backward(tensors, self._local)
                self._local = None

        return backward

    def _note_backward(self, tensors: Any, reached: dict[int, Tensor]) -> None:
        step = self._recorder.step
        with self._recorder.aside(), torch.no_grad():
            self._recorder.note_line("backward")
            each = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            step["backwards"].append(
                {
                    "losses": [float(one.detach()) if one.numel() == 1 else None for one in each],
                    "local": reached,
                    "batch": len(step["batches"]) - 1,
                    "weighed": all(_OF_MEANS in batch.graph.names_behind(one) for one in each),
                }
            )
            grads = {key: one.grad for key, one in self._kept.items()}
            self._left = {key: value_sample(grad) for key, grad in grads.items() if grad is not None}

    # ---- steps ---------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.is_cut:
            recorder.end()
        self._depth += optimizer is self._stepping
        if self._stepping is not None:
            return  # an inner optimizer, as in ZeroRedundancyOptimizer, or super().step()
        self._stepping = optimizer
        with recorder.aside(), torch.no_grad():
            if not any(optimizer is one for one in recorder.optimizers):
                recorder.optimizers.append(optimizer)
                self._see_optimizer(optimizer)
            self._before = {
                "begin": list(map(value_sample, _parameters_of(optimizer))),
                "used": _gradients_of(optimizer),
                "closure": len(recorder.step["backwards"]),
            }

    def _place(self, backwards: list[dict[str, Any]], parameters: list[Tensor]) -> None:
        """Identify recorded gradients by the positions of their parameters.

        FSDP2 computes with whole parameters instead of an optimizer's, with the same names.
        """
        places = {id(each): place for place, each in enumerate(parameters)}
        named = {self._names.get(key, ""): place for key, place in places.items()}
        for each in backwards:
            reached = each["local"]
            by_name = {self._names[key]: value for key, value in reached.items()}
            each["local"] = {place: by_name[name] for name, place in named.items() if name in by_name}
            each["local"] |= {places[key]: value for key, value in reached.items() if key in places}

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.is_cut or optimizer is not self._stepping:
            return
        if self._depth:
            self._depth -= 1
            return
        self._stepping = None
        with recorder.aside(), torch.no_grad():
            parameters = _parameters_of(optimizer)
            # After the step: Horovod's optimizer averages within it.
            used = _gradients_of(optimizer)
            used = self._before["used"] if all(each is None for each in used) else used
            self._place(recorder.step["backwards"], parameters)
            recorder.note_line("step")
            recorder.step.update(
                optimizer=next(number for number, one in enumerate(recorder.optimizers) if one is optimizer),
                kind=type(optimizer).__name__,
                closure=len(recorder.step["backwards"]) - self._before["closure"],
                precision=max(torch.finfo(each.dtype).eps for each in parameters),
                held=[self._held.get(id(each)) for each in parameters],
                names=[self._names.get(id(each), "") for each in parameters],
                shapes=[list(each.shape) for each in parameters],
                settings=[_settings_of(group) for group in optimizer.param_groups],
                after=[self._left.get(id(each)) for each in parameters],
                used=used,
                begin=self._before["begin"],
                end=list(map(value_sample, parameters)),
                buffers={
                    f"{number}:{plain_name(name)}": value_sample(buffer, in_order=True)
                    for number, root in enumerate(recorder.roots)
                    for name, buffer in root.named_buffers()
                    if buffer.numel()
                },
            )
            self._left = {}
            self._on_step()
            recorder.end_step()


def _made(see: Callable[[Any], None]) -> Callable[..., Any]:
    """A wrapper for constructors that calls `see` with each new object."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            see(made)

        return init

    return make


def _is_without_numbers() -> bool:
    """Whether code is being traced, or transformed by torch.func, so that tensors have no values to read."""
    is_traced = torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
    is_fake = torch._guards.active_fake_mode() is not None
    return is_traced or is_fake or torch._C._functorch.peek_interpreter_stack() is not None


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype is torch.float32 else tensor


def _others(tensor: Tensor) -> Tensor:
    """Other numbers of the same kind, with which an evaluation has another result."""
    return -tensor.flip(0) if tensor.is_floating_point() and tensor.ndim else tensor


def _have_numbers(parameters: Iterable[Tensor]) -> bool:
    return not any(nn.parameter.is_lazy(each) or each.is_meta for each in parameters)


def _lengths_of(inputs: list[Tensor]) -> list[int]:
    return next((list(each.shape[:2]) for each in inputs if each.ndim), [])


def _samples_first(tensors: list[Tensor], columns: int, of_loader: bool) -> list[Tensor]:
    """What a module takes or returns, with samples as rows; without a loader, only what has them as columns."""
    if of_loader:
        return samples_first(tensors, columns)
    return [each.transpose(0, 1) for each in tensors if each.shape[1:2] == (columns,)]


def _count_of(args: Any, inputs: list[Tensor], last: dict[str, Any] | None) -> int:
    """Number of rows of a module's input: from a list with an entry per sample, else from the first tensor."""
    if last is not None and args and isinstance(args[0], list | tuple) and len(args[0]) == last["rows"]:
        return len(args[0])
    return next((each.size(0) for each in inputs if each.ndim), 0)


def _first(tensors: list[Tensor]) -> list[Tensor]:
    return [each.detach() for each in tensors if each.ndim][:1]


def _sketches(inputs: list[Tensor], outputs: list[Tensor], count: int) -> dict[str, Tensor | None]:
    found = {}
    for name, tensors in (("inputs", inputs), ("outputs", outputs)):
        found[name] = found[f"{name} across"] = _joined(row_sketch(each, count) for each in tensors)
        if any(each.ndim and each.size(0) != count for each in tensors):
            found[f"{name} across"] = _joined(row_sketch(each, count, True) for each in tensors)
    return found


def _joined(sketches: Iterable[Tensor | None]) -> Tensor | None:
    found = [each for each in sketches if each is not None]
    return torch.cat(found, 1) if found else None


def _parameters_of(optimizer: Any) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _gradients_of(optimizer: Any) -> list[Tensor | None]:
    return [None if each.grad is None else value_sample(each.grad) for each in _parameters_of(optimizer)]


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _SETTINGS:
        value = group.get(name)
        if isinstance(value, Tensor):
            value = float(value)
        if isinstance(value, int | float | tuple):  # of numpy, too
            found[name] = tuple(map(float, value)) if isinstance(value, tuple) else float(value)
    return found
