"""The user's optimizer over this rank's shares, in pieces that fit into a cache.

[Note: pieces] An elementwise optimizer can step any part of a parameter as it would step the whole. So each share is
cut into pieces, which are the parameters of an inner optimizer of the user's class. A few pieces are stepped at a time,
right after their gradients have been summed. Torch's own elementwise classes are known; for other classes the user says
so (`elementwise=True`). All others (LARS, Muon, Shampoo) step whole parameters, each on one rank.

A class of the user may count its steps, in `self` or in a group, and look at parameters without a gradient. So its
`step` is called once per step, on every rank, with everything that the rank has. Its constructor gets parameters or
groups, as the script passes them, and may look at the first parameter: if a rank has no piece of a group, that is an
empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lockstep.errors import InputError, InputTypeError, ModelError
from lockstep.parallel.sharded.shares import Share, layout_of, shaped_like
from lockstep.tree import map_tensors

__all__ = ["InnerOptimizer", "ShardPiece", "check_class", "is_elementwise"]

# Largest number of elements of a piece, and of the pieces that are stepped together.
_PIECE = 512 << 10

_ELEMENTWISE = frozenset(
    (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
        *(torch.optim.Rprop, torch.optim.ASGD),
    )
)
_REFUSED: Mapping[type, str] = {
    torch.optim.LBFGS: "it uses all parameters together, several times per step; use it unsharded",
    torch.optim.SparseAdam: "sparse gradients are not sharded; use it unsharded",
}


def check_class(optimizer_class: Any) -> type[Optimizer]:
    """The given class, if it can be sharded.

    Raises:
        InputTypeError: it is not an optimizer class.
        InputError: it cannot be sharded.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        what = optimizer_class.__name__ if isinstance(optimizer_class, type) else type(optimizer_class).__name__
        raise InputTypeError(f"optimizer_class must be a class, such as torch.optim.AdamW, got {what}")
    for refused, why in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise InputError(f"ZeroRedundancyOptimizer cannot shard {optimizer_class.__name__}: {why}")
    return optimizer_class


def is_elementwise(optimizer_class: type[Optimizer], said: bool | None) -> bool:
    """Whether it steps each element independently: as the user says, else known only of torch's own classes."""
    return optimizer_class in _ELEMENTWISE if said is None else said


class ShardPiece:
    """A part of this rank's share of a parameter, as a parameter of the inner optimizer.

    Args:
        share: this rank's share of the parameter.
        flat: the memory of the whole parameter.
        start: first element, within the share.
        stop: one past the last element.
        is_whole: whether it is the whole parameter, and has its shape.

    Attributes:
        parameter: its shape is (stop - start,), or that of the whole parameter.
        layout: layout of the whole parameter, see `layout_of`; the state has the same one.
    """

    def __init__(self, share: Share, flat: torch.Tensor, start: int, stop: int, is_whole: bool) -> None:
        self.share, self.start, self.stop, self.is_whole = share, start, stop, is_whole
        self.parameter = torch.nn.Parameter(self._memory(flat))
        self.layout = layout_of(share.parameter)

    def _memory(self, flat: torch.Tensor) -> torch.Tensor:
        part = flat[self.share.first + self.start : self.share.first + self.stop]
        return shaped_like(part, self.share.parameter) if self.is_whole else part

    def move(self, flat: torch.Tensor) -> None:
        """Use new memory of the parameter.

        Raises:
            ModelError: its shape or strides have changed.
        """
        layout = layout_of(self.share.parameter)
        if layout != self.layout:
            (before, strides_before), (now, strides_now) = self.layout, layout
            raise ModelError(
                f"a parameter of ZeroRedundancyOptimizer had shape {before} and strides {strides_before} when the "
                f"optimizer was created, but now has {now} and {strides_now}. Its shares and state have the old "
                "layout. Reshape the model, or change its memory format (model.to(memory_format=...)), before "
                "wrapping it, then create the optimizer"
            )
        self.parameter.data = self._memory(flat)

    def take(self, gradient: torch.Tensor | None) -> None:
        """Set its gradient, given flat; None for none."""
        if gradient is not None and self.is_whole:
            gradient = shaped_like(gradient, self.share.parameter)
        self.parameter.grad = gradient


class InnerOptimizer:
    """An optimizer of the user's class over the pieces of this rank.

    Args:
        optimizer_class: the user's class.
        defaults: its keyword arguments.
        elementwise: whether shares may be cut. See [Note: pieces].
        in_groups: whether its constructor gets groups, or parameters.

    Attributes:
        optimizer: the optimizer; created with the first groups.
    """

    optimizer: Optimizer

    def __init__(
        self, optimizer_class: type[Optimizer], defaults: Mapping[str, Any], elementwise: bool, in_groups: bool
    ) -> None:
        self._class, self._defaults, self._is_elementwise = optimizer_class, dict(defaults), elementwise
        self._in_groups = in_groups
        self._goes_piecewise = elementwise and optimizer_class in _ELEMENTWISE
        self.pieces: list[list[ShardPiece]] = []  # by group

    def add_groups(
        self, groups: Sequence[dict[str, Any]], shares: Sequence[Sequence[tuple[Share, torch.Tensor]]]
    ) -> None:
        """Add groups of parameters. Local.

        Args:
            groups: groups of the outer optimizer; options that they lack are set to those of the class.
            shares: for each group, the shares of its parameters, and the flat memory of each whole parameter.
        """
        made = []
        for group, members in zip(groups, shares, strict=True):
            pieces = [piece for share, flat in members for piece in self._cut(share, flat)]
            self.pieces.append(pieces)
            parameters = _parameters_of(pieces) or [_empty_like(each) for each in group["params"][:1]]
            made.append({**_options_of(group), "params": parameters})
        if not hasattr(self, "optimizer"):
            self.optimizer = self._class(made if self._in_groups else made[0]["params"], **self._defaults)
        else:
            for each in made:
                self.optimizer.add_param_group(each)
        first = len(self.pieces) - len(made)
        for group, inner, pieces in zip(groups, self.optimizer.param_groups[first:], self.pieces[first:], strict=True):
            group.update({key: value for key, value in inner.items() if key not in group})
            for each in [] if pieces else inner["params"]:
                self.optimizer.state.pop(each, None)
            inner["params"] = _parameters_of(pieces)
        self._step = _plain_step(self.optimizer)

    def _cut(self, share: Share, flat: torch.Tensor) -> Iterator[ShardPiece]:
        numel = share.parameter.numel()
        if not self._is_elementwise or share.parameter.dim() == 0 or numel == 0:
            if share.numel or (numel == 0 and share.rank == 0):
                yield ShardPiece(share, flat, 0, share.numel, is_whole=True)
            return
        size = _PIECE if self._goes_piecewise else max(share.numel, 1)
        for start in range(0, share.numel, size):
            yield ShardPiece(share, flat, start, min(start + size, share.numel), is_whole=False)

    def step(self, groups: Sequence[dict[str, Any]], gradient_of: Callable[[ShardPiece], torch.Tensor | None]) -> None:
        """Step all pieces that have a gradient, with the options of the outer groups. Local.

        Args:
            groups: groups of the outer optimizer.
            gradient_of: returns the flat gradient of a piece; None if it has none.
        """
        inner = self.optimizer
        whole = inner.param_groups
        try:
            if self._goes_piecewise:
                for group, pieces in zip(groups, self.pieces, strict=True):
                    for batch in _batches(pieces):
                        self._step_some(group, batch, gradient_of)
            else:
                self._step_at_once(groups, gradient_of)
        finally:
            inner.param_groups = whole
            for piece in self:
                piece.parameter.grad = None

    def _step_some(
        self,
        group: dict[str, Any],
        pieces: Sequence[ShardPiece],
        gradient_of: Callable[[ShardPiece], torch.Tensor | None],
    ) -> None:
        parameters = []
        for piece in pieces:
            piece.take(gradient_of(piece))
            if piece.parameter.grad is not None:
                parameters.append(piece.parameter)
        if parameters:
            self.optimizer.param_groups = [{**_options_of(group), "params": parameters}]
            self._step(self.optimizer)

    def _step_at_once(
        self, groups: Sequence[dict[str, Any]], gradient_of: Callable[[ShardPiece], torch.Tensor | None]
    ) -> None:
        for piece in self:
            piece.take(gradient_of(piece))
        made = [
            {**_options_of(group), "params": _parameters_of(pieces)}
            for group, pieces in zip(groups, self.pieces, strict=True)
        ]
        self.optimizer.param_groups = made
        self._step(self.optimizer)
        for group, each in zip(groups, made, strict=True):
            group.update(_options_of(each))
        for piece in self:
            self._unshare(piece)

    def _unshare(self, piece: ShardPiece) -> None:
        """Copy gradients that the optimizer keeps in its state (`state["previous"] = p.grad`) out of the bucket."""
        state, gradient = self.optimizer.state.get(piece.parameter), piece.parameter.grad
        if not state or gradient is None:
            return
        memory = gradient.untyped_storage().data_ptr()

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            is_plain = type(tensor) is torch.Tensor
            return tensor.clone() if is_plain and tensor.untyped_storage().data_ptr() == memory else tensor

        state.update(map_tensors(copy, dict(state)))

    def __iter__(self) -> Iterator[ShardPiece]:
        return (piece for pieces in self.pieces for piece in pieces)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _parameters_of(pieces: Iterable[ShardPiece]) -> list[torch.nn.Parameter]:
    return [piece.parameter for piece in pieces]


def _empty_like(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A parameter without elements, with the same dtype, device and number of dimensions (at least one)."""
    return torch.nn.Parameter(parameter.detach().view(parameter.shape or (1,))[:0])


def _batches(pieces: Sequence[ShardPiece]) -> Iterator[list[ShardPiece]]:
    """Pieces that are stepped together: several small ones in one call."""
    batch: list[ShardPiece] = []
    numel = 0
    for piece in pieces:
        if batch and numel + piece.stop - piece.start > _PIECE:
            yield batch
            batch, numel = [], 0
        batch.append(piece)
        numel += piece.stop - piece.start
    if batch:
        yield batch


def _plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Its `step` without torch's hooks, which belong to the outer optimizer."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]
