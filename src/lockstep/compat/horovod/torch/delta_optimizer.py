"""The optimizer for Adasum: what ranks combine is the change that a step of each would make."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lockstep.compat.horovod.torch.compression import Compressor
from lockstep.compat.horovod.torch.mpi_ops.reductions import Adasum, grouped_allreduce

__all__ = ["DeltaOptimizer"]

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


class DeltaOptimizer:
    """What a distributed optimizer with `op=Adasum` adds to the class of the optimizer it was made from.

    Made by `DistributedOptimizer`, not by hand. A step makes the optimizer's own step on this rank's gradients, takes
    the difference that it made to each parameter, and combines the differences of all ranks by Adasum.
    """

    def _prepare(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], compression: type[Compressor], passes: int
    ) -> None:
        self._compression = compression
        self._parameter_names = dict(zip(parameters, names, strict=True))
        self._required = [parameter for parameter in parameters if parameter.requires_grad]
        self._delays = [passes] * len(self._required)
        self._num_open = 0
        self.backward_passes_per_step = passes
        self.op = Adasum
        hooks = [self._watch(index, parameter) for index, parameter in enumerate(self._required)]
        # Parameters may outlive the optimizer, and get another.
        weakref.finalize(self, _remove_all, hooks).atexit = False

    def _watch(self, index: int, parameter: torch.Tensor) -> RemovableHandle:
        reference = weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            optimizer = reference()
            if optimizer is None:
                return
            if optimizer._delays[index] <= 0:
                raise AssertionError(_TOO_MANY_PASSES)
            optimizer._delays[index] -= 1
            optimizer._num_open += 1

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
        return handle

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on so many backward passes come before each step. Local."""
        self.backward_passes_per_step = passes
        self._delays[:] = [passes] * len(self._delays)

    def synchronize(self) -> None:
        """Nothing: what is combined comes into being in `step`."""

    def skip_synchronize(self) -> Any:
        """Not with Adasum.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make this rank's step, and combine what all ranks' steps changed. Collective.

        Args:
            closure: computes the loss and the gradients, once, before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = [parameter.detach().clone() for parameter in self._required]
        for parameter in self._required:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().step()  # type: ignore[misc]
        with torch.no_grad():
            deltas = [parameter.detach() - start for parameter, start in zip(self._required, before, strict=True)]
            combined = grouped_allreduce(deltas, name="adasum_deltas", compression=self._compression, op=Adasum)
            for parameter, start, delta in zip(self._required, before, combined, strict=True):
                parameter.copy_(start + delta)
        self._num_open = 0
        self._delays[:] = [self.backward_passes_per_step] * len(self._delays)
        return loss

    def step_locally(self) -> Any:
        """The optimizer's own step. Local."""
        return super().step()  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own.

        Raises:
            AssertionError: gradients were computed, and no step was made.
        """
        if self._num_open:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


def _remove_all(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
