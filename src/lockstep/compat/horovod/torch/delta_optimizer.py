"""The optimizer for Adasum, which combines the parameter updates of all ranks' local steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lockstep.compat.horovod.torch.compression import Compressor
from lockstep.compat.horovod.torch.counting import CountingOptimizer, Counts
from lockstep.compat.horovod.torch.mpi_ops.reductions import Adasum, grouped_allreduce

__all__ = ["DeltaOptimizer"]


class DeltaOptimizer(CountingOptimizer):
    """The part of a distributed optimizer with `op=Adasum`, added to the wrapped optimizer's class.

    Created by `DistributedOptimizer`. A step runs the optimizer's own step on this rank's gradients, computes
    the change of each parameter, and combines the changes of all ranks by Adasum.
    """

    def _prepare(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], compression: type[Compressor], passes: int
    ) -> None:
        self._compression = compression
        self._parameter_names = dict(zip(parameters, names, strict=True))
        self._required = [parameter for parameter in parameters if parameter.requires_grad]
        self._counts = Counts([passes] * len(self._required))
        self.backward_passes_per_step = passes
        self.op = Adasum
        self._remove_at_end([self._watch(index, parameter) for index, parameter in enumerate(self._required)])

    def _watch(self, index: int, parameter: torch.Tensor) -> RemovableHandle:
        reference = weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._counts.count(index)

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
        return handle

    def synchronize(self) -> None:
        """Does nothing, because updates are combined in `step`."""

    def skip_synchronize(self) -> Any:
        """Not supported with Adasum.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run this rank's step, and combine the changes of all ranks. Collective.

        Args:
            closure: computes the loss and the gradients; called once, before the step.
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
        self._counts.reset(self.backward_passes_per_step)
        return loss
