"""Decides what it means that a parameter has no gradient at the end of a backward pass.

Another backward pass will bring it, the parameter is unused, or the script is wrong.

See [Note: backward passes] in `distributed.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from lockstep.errors import UnusedParameters
from lockstep.parallel.backward_pass import BackwardPass
from lockstep.parallel.graph import reachable_leaves

__all__ = ["MissingGradients"]

_ADVICE = (
    "Use them, freeze them (requires_grad_(False)), or pass find_unused_parameters=True if a step may leave some out. "
    "If they have been replaced by others, wrap the model again: lockstep.DistributedDataParallel(model.module)"
)
_ADVICE_FOR_STATIC_GRAPH = "static_graph=True says that the same parameters are used in every step; they were not"
_ADVICE_FOR_OUTPUTS = (
    "They belong to outputs of the model that took no part in the loss, so that step was not averaged. Let the model "
    "return only what the loss uses, call backward() on all of it before the optimizer steps (also where a loss "
    "contains gradients, create_graph=True), or pass find_unused_parameters=True"
)


class MissingGradients:
    """What one engine knows of the parameters that its backward passes leave out. They are named by their index.

    Args:
        parameters: those whose gradients the engine averages.
        names: of these parameters, for errors.
        group: whose ranks average.
        device: where the group takes small tensors from.
        static_graph: those that the first step leaves out may be left out in every step, and no others; an attribute.
    """

    def __init__(
        self,
        backward: BackwardPass,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        device: torch.device,
        static_graph: bool,
    ) -> None:
        self._backward = backward
        self._parameters = parameters
        self._names = names
        self._group = group
        self._device = device
        self.static_graph = static_graph
        self._static_unused: frozenset[int] | None = None
        self._static_any_unused = False  # on any rank; the same on all

    def check_awaited(self, when: str = "in the step before this one") -> None:
        """Another step begins, or an optimizer's. Local.

        Args:
            when: the awaited gradients are missing, for the error.

        Raises:
            UnusedParameters: a backward pass left gradients to another one, which did not come.
        """
        awaited = self._backward.take_awaited()
        if awaited:
            self._raise(awaited, when, _ADVICE_FOR_OUTPUTS)

    def come_later(self, missing: list[int], may_be_unused: bool) -> bool:
        """Wait for another backward pass, if one can bring what is missing over the outputs left. Local.

        Args:
            missing: no gradient came for these.
            may_be_unused: the user said so (`find_unused_parameters`).

        Returns:
            Whether it waits.
        """
        backward = self._backward
        if missing and not may_be_unused and backward.roots:
            reachable = reachable_leaves(backward.roots.values())
            if any(id(self._parameters[index]) in reachable for index in missing):
                backward.wait(missing)
                return True
        backward.take_awaited()
        backward.forget_outputs()
        return False

    def check(self, missing: list[int], may_be_unused: bool) -> None:
        """Whether these may be missing at the end of a step. Collective in the first step of a static graph.

        Raises:
            UnusedParameters: they may not.
        """
        if self.static_graph and self._static_unused is None:
            self._static_unused = frozenset(missing)
            self._static_any_unused = self._any_rank(bool(missing))
        if not missing or may_be_unused:
            return
        if self._static_unused is None:
            self._raise(missing, "in this step", _ADVICE)
        if not self._static_unused.issuperset(missing):
            self._raise(missing, "in this step", _ADVICE_FOR_STATIC_GRAPH)

    def join_first_step(self) -> None:
        """Take part in what `check` asks in the first step, on a rank that has joined before it. Collective."""
        if self.static_graph and self._static_unused is None:
            self._static_any_unused = self._any_rank(False)
            self._static_unused = frozenset()

    def on_all_ranks(self, missing: Sequence[int], may_be_unused: bool) -> frozenset[int]:
        """Parameters that no rank has a gradient for. Collective if the engine was told that there may be any."""
        if not (may_be_unused or self._static_any_unused):
            return frozenset()
        used = torch.ones(len(self._names), dtype=torch.uint8, device=self._device)
        if missing:
            used[list(missing)] = 0
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        # Who has used all of them knows, and does not have to wait for a GPU.
        return frozenset((used == 0).nonzero().flatten().tolist()) if missing else frozenset()

    def _any_rank(self, here: bool) -> bool:
        """Whether something holds on any rank. Collective."""
        flag = torch.tensor([int(here)], device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def _raise(self, indices: list[int], when: str, advice: str) -> NoReturn:
        names = [self._names[index] for index in indices]
        listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        raise UnusedParameters(
            f"{len(names)} parameter(s) got no gradient on rank {dist.get_rank()} {when}: {listed}. {advice}"
        )
