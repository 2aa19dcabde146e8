"""Notices parameters that came to a model after it was wrapped: no engine averages their gradients.

It happens when a frozen part is unfrozen (`requires_grad_(True)`), and when parameters are replaced by others
(`load_state_dict(assign=True)`, a new head). Optimizers' steps are where to look: during a forward pass
`torch.func.functional_call` may have put others in their place for a moment. Parameters that were frozen are looked at
in each step; looking for new ones means to walk through the modules, so only some steps do, and the one behind a
backward pass that came from the model and reached none of its parameters.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep.drift.engines import engines
from lockstep.drift.watch import describe_step
from lockstep.errors import ModelError
from lockstep.torch_private.autograd import innermost_transform

__all__ = ["ParameterChanges", "install"]

_ALWAYS, _EVERY = 2, 8  # steps, the first ones, and of those behind them


@functools.cache
def install() -> None:
    """From now on look before optimizers step. Local; may be called again."""
    register_optimizer_step_pre_hook(_look)


def _look(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    found = [engine.changes.look() for engine in engines()]  # all count their looks
    if any(found):
        gc.collect()  # what waits for that, on some ranks, averages nothing; see `drift/engines.py`
        for engine in engines():
            engine.changes.refuse(optimizer)


class ParameterChanges:
    """Looks for parameters of one model that require a gradient and that no engine averages.

    Args:
        module: the model.
        own: `id` of the parameters that are averaged.
        ignored: names that the user has told the engine to leave alone.
        is_shared: several ranks train the model; one alone averages nothing anyway.
    """

    def __init__(self, module: torch.nn.Module, own: frozenset[int], ignored: Collection[str], is_shared: bool) -> None:
        self._module = weakref.ref(module)
        self.own = own
        self._ignored = frozenset(ignored)
        self._is_shared = is_shared
        self._frozen = [
            weakref.ref(parameter)
            for name, parameter in module.named_parameters()
            if id(parameter) not in own and name not in self._ignored
        ]
        self._num_looks = 0
        self._is_suspicious = False

    def suspect(self) -> None:
        """A backward pass over the model's output reached no parameter: look before the next step. Local."""
        self._is_suspicious = True

    def are_transformed(self) -> bool:
        """Whether this is inside of `torch.func.grad` or the like, with other parameters in the model. Local."""
        module = self._module()
        if innermost_transform() is None or module is None:
            return False
        return not any(id(parameter) in self.own for parameter in module.parameters())

    def look(self) -> bool:
        """An optimizer is about to step: whether this step is one to look in, and there are such parameters. Local."""
        if not self._is_shared:
            return False
        self._num_looks += 1
        is_due = self._is_suspicious or self._num_looks <= _ALWAYS or self._num_looks % _EVERY == 0
        self._is_suspicious = False
        return bool((is_due or any(map(_requires_gradient, self._frozen))) and self._find())

    def refuse(self, optimizer: Optimizer) -> None:
        """Local.

        Raises:
            ModelError: there are such parameters; names them.
        """
        new = self._find() if self._is_shared else []
        if new:
            listed = ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
            raise ModelError(
                f"{describe_step(optimizer)}: {len(new)} parameter(s) of the model require a gradient that nobody "
                f"averages: {listed}. They were frozen, or not there, when the model was wrapped. Unfreeze or replace "
                "parameters first (load_state_dict(assign=True) replaces all), then wrap the model: "
                "lockstep.DistributedDataParallel(model.module), and make the optimizer anew"
            )

    def _find(self) -> list[str]:
        module = self._module()
        found = [] if module is None else [each for each in module.named_parameters() if each[1].requires_grad]
        found = [(name, each) for name, each in found if id(each) not in self.own and name not in self._ignored]
        if not found:
            return []
        # The model may have been wrapped anew, as the error says to, while somebody keeps this engine.
        others = [engine.changes.own for engine in engines()]
        return [name for name, each in found if not any(id(each) in own for own in others)]


def _requires_gradient(reference: weakref.ref[torch.nn.Parameter]) -> bool:
    parameter = reference()
    return parameter is not None and parameter.requires_grad
