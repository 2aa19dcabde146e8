"""Losses, the gradients that a process computes, and what its optimizers make of them.

Writes `backwards` of a step (`losses`: the numbers that backward() was called on, None for what is no number; `local`:
what reached each parameter in this process, before anybody averaged it; `weighed`: by lockstep.mean), `after` (`.grad`
when the last of them had returned), and of the optimizer's step: `optimizer` (its number), `kind`, `precision` (of its
parameters), `closure` (how many backward passes it made itself), `names` (of its parameters), `held` (whether an engine
holds each), `settings` (of its groups), `used` (the gradients that it took), `begin`, `end` (the parameters before and
after it), and `buffers`. All values are `rows.value_sample`s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import batch
from lockstep.parallel.distributed import DistributedDataParallel as OwnDistributedDataParallel
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.verify.forwards import ForwardWatch
from lockstep.tools.verify.recorder import StepRecorder
from lockstep.tools.verify.rows import value_sample
from lockstep.tools.verify.state import plain_name

__all__ = ["GradientWatch"]

# Of losses in float16: far from overflow, and from where gradients vanish; and after how many steps it grows.
_SCALE, _NEVER = 1024.0, 2**31 - 1
# What lockstep.mean and its like leave behind a loss: each rank's then counts one of N, whatever it has of the batch.
_OF_MEANS = "_RescaleBackward"
# What a group of an optimizer says that two runs can compare.
_SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps", "dampening", "alpha", "rho")


class GradientWatch:
    """Watches backward passes and optimizers of this process.

    Args:
        recorder: of this process.
        on_step: called after a step, before the next begins.
    """

    def __init__(self, recorder: StepRecorder, on_step: Callable[[], None]) -> None:
        self._recorder = recorder
        self._on_step = on_step
        self.forwards = ForwardWatch(recorder, self.see_parameters)
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets the id of one
        self._engines: list[nn.Module] = []
        self._held: set[int] = set()
        self._heard: set[int] = set()
        self._local: dict[int, Tensor] | None = None
        self._begin: list[Tensor] = []
        self._used: list[Tensor | None] = []
        self._passes = 0
        self._stepping: Any = None
        self._depth = 0

    def install(self) -> None:
        """Watch from now on."""
        self.forwards.install()
        wrap(torch.Tensor, "backward", self._backward)
        wrap(torch.autograd, "backward", self._backward)
        wrap(Optimizer, "__init__", self._make_optimizer)
        wrap(torch.amp.GradScaler, "__init__", self._make_scaler)
        wrap(nn.parallel.DistributedDataParallel, "__init__", self._make_engine)
        wrap(OwnDistributedDataParallel, "__init__", self._make_engine)
        # Before hooks of the script's own, which may change what reaches a parameter.
        register_module_parameter_registration_hook(lambda module, name, parameter: self._see(parameter, ""))
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    # ---- parameters ----------------------------------------------------------------------------------

    def see_parameters(self, module: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Listen to what reaches parameters of a module that is trained."""
        for name, parameter in named:
            self._see(parameter, plain_name(f"{module}.{name}" if module else name))

    def _see(self, parameter: Tensor | None, name: str) -> None:
        if parameter is None or not parameter.is_leaf or nn.parameter.is_lazy(parameter):
            return
        known = self._names.get(id(parameter))
        if known is None:
            self._kept.append(parameter)
        if not known or known.startswith("group"):
            self._names[id(parameter)] = name
        if parameter.requires_grad and id(parameter) not in self._heard:
            self._heard.add(id(parameter))
            parameter.register_hook(lambda gradient: self._reach(parameter, gradient))  # type: ignore[no-untyped-call]

    def _reach(self, parameter: Tensor, gradient: Tensor) -> None:
        if self._local is None or self._recorder.is_cut:
            return
        with self._recorder.aside(), torch.no_grad():
            sample = value_sample(gradient)
            before = self._local.get(id(parameter))
            self._local[id(parameter)] = sample if before is None else before + sample

    def _make_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._see_optimizer(optimizer)

        return init

    def _make_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of a constant scale: a dynamic one skips steps by the size of a loss, and a rank's is of fewer samples."""

        signature = inspect.signature(original)

        def init(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            asked = bound.arguments
            asked.update(init_scale=min(asked["init_scale"], _SCALE), growth_interval=_NEVER)
            self._recorder.facts["scales"] |= bool(asked["enabled"])
            original(*bound.args, **bound.kwargs)

        return init

    def _see_optimizer(self, optimizer: Any) -> None:
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):
            for place, parameter in enumerate(group["params"]):
                self._see(parameter, f"group{number}[{place}]")

    def _make_engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(engine: Any, *args: Any, **kwargs: Any) -> None:
            original(engine, *args, **kwargs)
            self._engines.append(engine)
            self._held.update(id(each) for each in engine.parameters() if each.requires_grad)
            own = isinstance(engine, OwnDistributedDataParallel)
            self._recorder.facts["engines"].append({"own": own})
            engine.register_forward_pre_hook(lambda *_: self._recorder.step["engine_calls"].append(1))

        return init

    # ---- backward passes -----------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._recorder.is_recording:
                return original(tensors, *args, **kwargs)
            self._depth, self._local = 1, {}
            self.forwards.in_backward += 1
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._depth = 0
                self.forwards.in_backward -= 1
                self._note_backward(tensors)

        return backward

    def _note_backward(self, tensors: Any) -> None:
        recorder = self._recorder
        with recorder.aside(), torch.no_grad():
            recorder.note_line("backward")
            each = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            losses = [float(one.detach()) if one.numel() == 1 else None for one in each]
            local = {self._names[key]: value for key, value in (self._local or {}).items()}
            recorder.step["backwards"].append(
                {
                    "losses": losses,
                    "local": local,
                    "batch": len(recorder.step["batches"]) - 1,
                    "weighed": all(_OF_MEANS in batch.graph.names_behind(one) for one in each),
                }
            )
            recorder.step["after"] = {
                self._names[id(one)]: value_sample(one.grad) for one in self._kept if one.grad is not None
            }
        self._local = None

    # ---- steps ---------------------------------------------------------------------------------------

    def _parameters(self, optimizer: Any) -> list[Tensor]:
        return [each for group in optimizer.param_groups for each in group["params"]]

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.is_cut:
            recorder.end()
        if self._stepping is None:
            self._stepping = optimizer
        if optimizer is not self._stepping:
            return  # one of those that an optimizer is made of, as ZeroRedundancyOptimizer is
        with recorder.aside(), torch.no_grad():
            if not any(optimizer is one for one in recorder.optimizers):
                recorder.optimizers.append(optimizer)
                self._see_optimizer(optimizer)
            self._begin = [value_sample(each) for each in self._parameters(optimizer)]
            self._used = self._gradients(optimizer)
            self._passes = len(recorder.step["backwards"])

    def _gradients(self, optimizer: Any) -> list[Tensor | None]:
        return [None if each.grad is None else value_sample(each.grad) for each in self._parameters(optimizer)]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.is_cut or optimizer is not self._stepping:
            return
        self._stepping = None
        with recorder.aside(), torch.no_grad():
            # After the step: Horovod's optimizer averages within it.
            used = self._gradients(optimizer)
            used = self._used if all(each is None for each in used) else used
            recorder.note_line("step")
            recorder.step.update(
                optimizer=next(number for number, one in enumerate(recorder.optimizers) if one is optimizer),
                kind=type(optimizer).__name__,
                closure=len(recorder.step["backwards"]) - self._passes,
                precision=max(torch.finfo(each.dtype).eps for each in self._parameters(optimizer)),
                held=[id(each) in self._held for each in self._parameters(optimizer)],
                names=[self._names.get(id(each), "") for each in self._parameters(optimizer)],
                settings=[_settings_of(group) for group in optimizer.param_groups],
                used=used,
                begin=self._begin,
                end=[value_sample(each) for each in self._parameters(optimizer)],
                buffers=self._buffers(),
            )
            self._on_step()
            recorder.end_step()

    def _buffers(self) -> dict[str, Tensor]:
        found = {}
        for number, root in enumerate(self._recorder.roots):
            for name, buffer in root.named_buffers():
                if buffer.numel():
                    found[f"{number}:{plain_name(name)}"] = value_sample(buffer, in_order=True)
        return found


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _SETTINGS:
        value = group.get(name)
        if isinstance(value, Tensor):
            value = float(value)
        if isinstance(value, int | float | tuple):  # of numpy, too
            found[name] = tuple(map(float, value)) if isinstance(value, tuple) else float(value)
    return found
