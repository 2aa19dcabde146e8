"""Whether a process communicates between a gradient and the step that uses it.

[Note: gradients of one rank] A program may communicate in every step and average nothing: it reduces a loss to show it.
What averages gradients does so after they are there and before the optimizer steps. So a parameter says when its
gradient arrives, before any hook of the script sees it, since such hooks may average; and a step is *alone* if nothing
was communicated since. Several steps in a row must be. Who averages parameters instead, after each step, changes them
outside of steps; some of their values are kept to see that. Gradients that nothing accumulates, those of
`torch.autograd.grad`, are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.torch_private.autograd import register_first_hook

__all__ = ["LoneGradients"]

_STEPS = 3
_MAX_KEPT = 4096  # values of the parameter


class LoneGradients:
    """Watches one parameter for a few steps. Local.

    Args:
        parameter: a dense leaf that an optimizer steps.
        communication: tells how much this process has communicated, in values that can be compared.
    """

    def __init__(self, parameter: torch.Tensor, communication: Callable[[], object]) -> None:
        self._parameter = parameter
        self._communication = communication
        self._at_arrival: object = None
        self._at_gradient: object = None
        self._after_step: torch.Tensor | None = None
        self._num_alone = 0
        watched: Any = parameter  # whose types say nothing of the method
        self._handles: list[Any] = [
            register_first_hook(parameter, self._note_arrival),
            watched.register_post_accumulate_grad_hook(self._note),
        ]

    def _note_arrival(self, _gradient: torch.Tensor) -> None:
        self._at_arrival = self._communication()

    def _note(self, _parameter: torch.Tensor) -> None:
        if self._after_step is not None and not torch.equal(self._after_step, self._some_values()):
            self.stop()
        self._at_gradient = self._at_arrival

    def _some_values(self) -> torch.Tensor:
        flat = self._parameter.detach().reshape(-1)
        return flat[:: flat.numel() // _MAX_KEPT + 1].clone()

    def note_step(self) -> bool:
        """Call after each step. True once, when so many steps in a row were alone; it watches no longer then."""
        if not self._handles or self._at_gradient is None:
            return False
        if self._at_gradient != self._communication():
            self.stop()
            return False
        self._at_gradient, self._after_step = None, self._some_values()
        self._num_alone += 1
        if self._num_alone < _STEPS:
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._after_step = [], None
