"""Forward passes that train: what enters the outermost module and comes out of it, sample by sample, and what is
inside.

Writes `calls` of a step: `name` (its class), `resting` (modules in eval mode), `keys` (of its inputs), `count` of
rows, `inputs` and `outputs` (sketches of each row, or None), `across` (of outputs, if the rows of a sample are
`count` apart, as those of views are that are joined), `widths` (numbers in a row of each output), `parameters` (two
numbers of each), `after` (how many backward passes), `inner` (name, class and sketches of what the modules inside
return, in order), `filler` and `samples` (keys of the batch that it was computed from, if that has as many rows).
Besides, `rounded`: the eps of the coarsest numbers of 16 bits that modules return.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep.tools.verify.recorder import StepRecorder, line_of_script
from lockstep.tools.verify.rows import row_sketch, sample_keys, samples_first, value_sample
from lockstep.tools.verify.state import plain_name
from lockstep.tree import tensors_in

__all__ = ["ForwardWatch"]

_MOST_INNER = 400
_OF_16_BITS = (torch.float16, torch.bfloat16)


class ForwardWatch:
    """Watches the forward passes of this process.

    Args:
        recorder: of this process.
        on_parameters: called with a module's name and its named parameters before it is called to train, and when it
            has returned, which is when FSDP2 has put in whole ones.
    """

    def __init__(self, recorder: StepRecorder, on_parameters: Any) -> None:
        self._recorder = recorder
        self._on_parameters = on_parameters
        self._stack: list[nn.Module] = []
        self._inner: list[dict[str, Any]] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._thread = threading.get_ident()
        self.in_backward = 0

    def install(self) -> None:
        """Watch from now on."""
        register_module_forward_pre_hook(self._before)
        register_module_forward_hook(self._after, with_kwargs=True, always_call=True)

    def _is_seen(self) -> bool:
        is_plain = not _is_without_numbers()
        is_here = not self.in_backward and threading.get_ident() == self._thread
        return is_here and is_plain and self._recorder.busy == 0

    def _before(self, module: nn.Module, args: Any) -> None:
        if not self._is_seen():
            return
        self._stack.append(module)
        if len(self._stack) == 1:
            self._recorder.check_time()
            self._inner = []
            if self._trains(module):
                self._recorder.begin_work()
                self._on_parameters("", module.named_parameters())
                self._recorder.begin_training(module)
            else:
                self._note_untrained(module)

    def _note_untrained(self, module: nn.Module) -> None:
        """Of a model that is none of those which are trained, such as a mean of their weights: what it consists of."""
        recorder, key = self._recorder, f"{type(module).__name__} after {len(self._recorder.steps)} steps"
        if not recorder.steps or key in recorder.facts["untrained"] or any(each["rounded"] for each in recorder.steps):
            return
        parameters = list(module.parameters())
        trained = {id(each) for root in recorder.roots for each in root.parameters()}
        if parameters and _have_numbers(parameters) and trained.isdisjoint(map(id, parameters)):
            with recorder.aside(), torch.no_grad():
                recorder.facts["untrained"][key] = (_brief(module), line_of_script())

    def _trains(self, module: nn.Module) -> bool:
        if not torch.is_grad_enabled() or self._recorder.is_cut:
            return False
        parameters = list(module.parameters())
        return _have_numbers(parameters) and any(each.requires_grad for each in parameters)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, result: Any = None) -> None:
        # torch leaves an argument out where forward() has raised
        if not self._is_seen() or not self._stack or self._stack[-1] is not module:
            return
        self._stack.pop()
        if self._recorder.is_cut or not torch.is_grad_enabled():
            return
        trains = not self._stack and self._trains(module)
        # What a communication hook rounds is another matter: the gradients of N ranks.
        rounded = [torch.finfo(each.dtype).eps for each in tensors_in(result) if each.dtype in _OF_16_BITS]
        self._recorder.step["rounded"] = max([self._recorder.step["rounded"], *rounded])
        with self._recorder.aside(), torch.no_grad():
            self._on_parameters(self._name(module) if self._stack else "", module.named_parameters(recurse=False))
            if self._stack:
                self._note_inner(module, args, kwargs, result)
            elif trains and result is not None:
                self._note(module, args, kwargs, result)

    def _name(self, module: nn.Module) -> str:
        root = self._stack[0]
        names = self._names.get(root)
        if names is None:
            names = self._names[root] = {id(each): plain_name(name) for name, each in root.named_modules()}
        return names.get(id(module), "")

    def _note_inner(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [each for each in tensors_in(result) if each.ndim]
        if len(self._inner) >= _MOST_INNER or not outputs:
            return
        inputs = [each for each in tensors_in((args, kwargs)) if each.ndim]
        self._inner.append(
            {
                "name": self._name(module),
                "kind": type(module).__name__,
                "input": inputs[0].detach() if inputs else None,
                "output": outputs[0].detach(),
            }
        )

    def _note(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._recorder.note_line("call")
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        batches = self._recorder.step["batches"]
        last = batches[-1] if batches else None
        given: Any = (args, kwargs)
        if last and last["time_first"]:
            given = inputs = samples_first(inputs, last["rows"])
            outputs = samples_first(outputs, last["rows"])
        count = _count_of(args, inputs, last)
        self._recorder.step["calls"].append(
            {
                "name": type(getattr(module, "module", module)).__name__,
                "count": count,
                "resting": sum(not each.training for each in module.modules()),
                "keys": [key for key, _ in sample_keys(given, count)] if count else [],
                "inputs": _joined([row_sketch(each, count) for each in inputs]),
                "outputs": _joined([row_sketch(each, count) for each in outputs]),
                "across": _joined([row_sketch(each, count, True) for each in outputs]),
                "widths": [each.numel() // count for each in outputs] if count else [],
                "parameters": _brief(module),
                "after": len(self._recorder.step["backwards"]),
                "inner": [_sketched(each, count) for each in self._inner],
                **_came_with(last, count),
            }
        )
        self._inner = []


def _is_without_numbers() -> bool:
    """Whether what runs is traced, or transformed by torch.func: tensors have no numbers to read then."""
    is_traced = torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
    is_fake = torch._guards.active_fake_mode() is not None
    return is_traced or is_fake or torch._C._functorch.peek_interpreter_stack() is not None


def _have_numbers(parameters: Iterable[Tensor]) -> bool:
    return not any(nn.parameter.is_lazy(each) or each.is_meta for each in parameters)


def _count_of(args: Any, inputs: list[Tensor], batch: dict[str, Any] | None) -> int:
    """Rows of what enters a module: a list with an entry for each sample of the batch, or else the first tensor's."""
    if batch is not None and args and isinstance(args[0], list | tuple) and len(args[0]) == batch["rows"]:
        return len(args[0])
    return next((each.size(0) for each in inputs if each.ndim), 0)


def _came_with(batch: dict[str, Any] | None, count: int) -> dict[str, Any]:
    """What a batch of a loader says of the rows that go through a module after it."""
    if batch is None:
        return {"filler": False, "samples": None}
    keys = [key for _, key in batch["keys"]]
    return {"filler": bool(batch["filler"]), "samples": keys if len(keys) == count else None}


def _joined(sketches: list[Tensor | None]) -> Tensor | None:
    found = [each for each in sketches if each is not None]
    return torch.cat(found, 1) if found else None


def _brief(module: nn.Module) -> Tensor:
    """Two numbers of each parameter."""
    samples = [value_sample(each) for each in module.parameters()]
    return torch.stack([number for each in samples for number in (each.sum(), each[-1])])


def _sketched(inner: dict[str, Any], count: int) -> dict[str, Any]:
    tensors = {part: None if inner[part] is None else row_sketch(inner[part], count) for part in ("input", "output")}
    across = None if inner["output"] is None else row_sketch(inner["output"], count, True)
    return {"name": inner["name"], "kind": inner["kind"], **tensors, "across": across}
