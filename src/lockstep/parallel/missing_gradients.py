"""Parameters that a backward pass brought no gradient for: who else will bring it, or whose mistake it is.

See [Note: backward passes] in `distributed.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.autograd.graph import Node

from lockstep.errors import UnusedParameters
from lockstep.parallel.graph import reachable_leaves

__all__ = ["MissingGradients"]

_ADVICE = (
    "Use them, freeze them before wrapping (requires_grad_(False)), or pass find_unused_parameters=True if a step may "
    "leave some out"
)
_ADVICE_FOR_STATIC_GRAPH = "static_graph=True says that the same parameters are used in every step; they were not"
_ADVICE_FOR_OUTPUTS = (
    "They belong to outputs of the model that took no part in the loss, so that step was not averaged. Let the model "
    "return only what the loss uses, call backward() on all of it before the optimizer steps (also where a loss "
    "contains gradients, create_graph=True), or pass find_unused_parameters=True"
)


class MissingGradients:
    """What one engine knows of the outputs of its last forward pass, and of the parameters left out so far.

    Parameters are named by their index.

    Args:
        parameters: that the engine averages.
        names: of each.
        group: whose ranks average.
        device: where the group takes small tensors from.
        static_graph: those that the first step leaves out may be left out in every step, and no others.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        device: torch.device,
        static_graph: bool,
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._group = group
        self._device = device
        self._static_graph = static_graph
        # Of the last forward pass that may have a backward pass, those outputs that none has come to yet.
        self._roots: dict[int, Node] = {}
        self._awaited: list[int] = []  # parameters that a backward pass left to another one
        self._static_unused: frozenset[int] | None = None
        self._static_any_unused = False  # on any rank; the same on all

    def expect(self, roots: Mapping[int, Node]) -> None:
        """A forward pass has these outputs, by number: backward passes may come to them. Local."""
        self._roots.update(roots)

    def reached(self, output: int) -> None:
        """A backward pass has come to that output. Local."""
        self._roots.pop(output, None)

    def forget_outputs(self) -> None:
        """Another forward pass begins. Local."""
        self._roots.clear()

    @property
    def are_awaited(self) -> bool:
        """Whether a backward pass has left gradients to another one."""
        return bool(self._awaited)

    def check_awaited(self, when: str = "in the step before this one") -> None:
        """Another step begins, or an optimizer's. Local.

        Args:
            when: the awaited gradients are missing, for the error.

        Raises:
            UnusedParameters: a backward pass left gradients to another one, which did not come.
        """
        awaited, self._awaited = self._awaited, []
        if awaited:
            self._raise(awaited, when, _ADVICE_FOR_OUTPUTS)

    def come_later(self, missing: list[int], may_be_unused: bool) -> bool:
        """Whether another backward pass will bring what this one did not, over outputs that none has come to. Local.

        Args:
            missing: no gradient came for these.
            may_be_unused: the user said so (`find_unused_parameters`).
        """
        if missing and not may_be_unused and self._roots:
            reachable = reachable_leaves(self._roots.values())
            if any(id(self._parameters[index]) in reachable for index in missing):
                self._awaited = missing
                return True
        self._awaited = []
        self._roots.clear()
        return False

    def check(self, missing: list[int], may_be_unused: bool) -> None:
        """Whether these may be missing at the end of a step. Collective in the first step of a static graph.

        Raises:
            UnusedParameters: they may not.
        """
        if self._static_graph and self._static_unused is None:
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
        if self._static_graph and self._static_unused is None:
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
