"""Detects parameters that require a gradient only since the model was wrapped.

A parameter that was frozen and is unfrozen (`requires_grad_(True)`) has the same values on all ranks: the engine adopts
it in its next forward pass. New parameters (`load_state_dict(assign=True)`, a new head) may differ: no engine averages
their gradients, and an optimizer's step is an error, on one rank as on several. The check is made before steps, because
during a forward pass `torch.func.functional_call` may have replaced parameters temporarily. torch notifies us when a
module of the process registers new parameters: the model is searched only in the first step after that, and in the step
after a backward pass that came from the model and reached none of its parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import Optimizer

from lockstep.drift.engines import engines
from lockstep.drift.watch import describe_step
from lockstep.errors import ModelError
from lockstep.torch_private.autograd import innermost_transform

__all__ = ["ParameterChanges"]

_num_registered = 0  # parameters and submodules of all modules of the process


def _note_registration(*_: object) -> None:
    global _num_registered
    _num_registered += 1


@functools.cache
def _install() -> None:
    register_module_parameter_registration_hook(_note_registration)
    register_module_module_registration_hook(_note_registration)


class ParameterChanges:
    """Finds parameters of one model that require a gradient and that no engine averages.

    Args:
        own: `id` of each averaged parameter.
        ignored: names that the user has told the engine to ignore.
    """

    def __init__(self, module: torch.nn.Module, own: frozenset[int], ignored: Collection[str]) -> None:
        self._module = weakref.ref(module)
        self.own = own
        self._ignored = frozenset(ignored)
        self._frozen = [
            weakref.ref(parameter)
            for name, parameter in module.named_parameters()
            if id(parameter) not in own and name not in self._ignored
        ]
        _install()
        self._num_registered_then = _num_registered
        self._is_suspicious = False

    def suspect(self) -> None:
        """Check before the next step, as a backward pass from the model's output reached no parameter. Local."""
        self._is_suspicious = True

    def were_unfrozen(self) -> bool:
        """Whether a parameter that was frozen at the engine's last look now requires a gradient. Local."""
        return any(each is not None and each.requires_grad for each in (frozen() for frozen in self._frozen))

    def are_transformed(self) -> bool:
        """Whether this runs inside `torch.func.grad` or similar, with other parameters in the model. Local."""
        module = self._module()
        if innermost_transform() is None or module is None:
            return False
        return not any(id(parameter) in self.own for parameter in module.parameters())

    def check(self, optimizer: Optimizer) -> None:
        """Check the model when an optimizer is about to step. Local.

        Raises:
            ModelError: there are such parameters; names them.
        """
        if not self._is_suspicious and self._num_registered_then == _num_registered:
            return
        self._num_registered_then, self._is_suspicious = _num_registered, False
        new = self._find()
        if new:
            listed = ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
            raise ModelError(
                f"{describe_step(optimizer)}: {len(new)} parameter(s) of the model require a gradient that is not "
                f"averaged: {listed}. They are new since the model was wrapped. Replace parameters first "
                "(load_state_dict(assign=True) replaces all), then wrap the model: "
                "lockstep.DistributedDataParallel(model.module), and recreate the optimizer"
            )

    def _find(self) -> list[str]:
        module = self._module()
        known = self.own.union(id(reference()) for reference in self._frozen)  # those: with the next forward pass
        new = [
            (name, id(each))
            for name, each in (() if module is None else module.named_parameters())
            if each.requires_grad and id(each) not in known and name not in self._ignored
        ]
        # The model may have been wrapped again, as the error advises, while this engine is still referenced.
        return [name for name, each in new if not any(each in engine.changes.own for engine in engines())]
