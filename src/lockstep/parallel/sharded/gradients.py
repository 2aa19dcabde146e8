"""`.grad` between backward pass and step: a tensor that represents a gradient of which each rank has a share.

It has shape, dtype and device of the gradient, and supports the operations of training loops: norms (collective),
scaling, clipping, zeroing, unscaling by a GradScaler. Operations that need all elements on one rank raise an error that
says how to get them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from lockstep.agreement import collective_device
from lockstep.comm.backend import engine_of
from lockstep.errors import ModelError
from lockstep.parallel.sharded.exchange import compare, exchange
from lockstep.parallel.sharded.shares import Share, shaped_like
from lockstep.torch_private.autograd import current_graph_task_id
from lockstep.torch_private.tensors import amp_unscale_, make_wrapper, plain_torch_function

__all__ = ["JOIN_ADVICE", "ShardedGradient", "find_stand_ins", "refuse_others", "whole_gradients"]

JOIN_ADVICE = (
    "a rank that has joined would still have to step its share of the parameters of ZeroRedundancyOptimizer. Let "
    "lockstep.DataLoader give all ranks the same number of batches, or use a plain optimizer"
)
_Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


class ShardedGradient(torch.Tensor):
    """Represents the mean gradient of one parameter, of which this rank has a share.

    Args:
        share: this rank's share of the parameter.
        mates: the gradients whose norms are computed together, including this one; a list that may grow.
        group: the ranks that have the other shares.
        owner: the optimizer that updates the parameter.

    Attributes:
        share: this rank's share.
        added: this rank's sum of backward passes since the averaging; None if there were none.
        sent: what an engine sets as `.grad` when the gradient has left, until the ranks have met; None if gradients
            stay in place until then.
    """

    share: Share
    mates: Sequence[ShardedGradient]
    group: dist.ProcessGroup
    added: torch.Tensor | None
    sent: torch.Tensor | None

    __torch_function__ = plain_torch_function

    @staticmethod
    def __new__(cls, share: Share, *_: object) -> ShardedGradient:
        parameter = share.parameter
        strides = torch.empty_like(parameter, device="meta").stride()
        return make_wrapper(cls, parameter.shape, strides=strides, dtype=parameter.dtype, device=parameter.device)  # type: ignore[no-any-return]

    def __init__(
        self,
        share: Share,
        mates: Sequence[ShardedGradient],
        group: dist.ProcessGroup,
        owner: weakref.ref[Optimizer],
    ) -> None:
        self.share, self.mates, self.group, self.owner = share, mates, group, owner
        self.added = self.sent = None

    @property
    def is_sent(self) -> bool:
        """Whether the gradient has left, and the ranks have not met since."""
        return self.sent is not None and self.share.gradient is self.sent

    @property
    def is_held(self) -> bool:
        """Whether it is the parameter's `.grad`."""
        return self.share.gradient is self

    def whole(self) -> torch.Tensor:
        """A copy of the whole mean gradient. Collective."""
        return whole_gradients([self])[0]

    def take_added(self) -> torch.Tensor | None:
        """Return the sum of later backward passes, and clear it."""
        added, self.added = self.added, None
        return added

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        share = self.share
        return (
            f"ShardedGradient({list(self.shape)}, {self.dtype}, elements {share.first} to {share.last} of "
            f"{self.numel()} are on this rank; optimizer.full_gradients() has all)"
        )

    def __reduce_ex__(self, _: Any) -> NoReturn:
        _refuse("pickle")

    def numpy(self, **_: Any) -> NoReturn:
        """Has all elements on one rank; refused."""
        _refuse("numpy")

    def tolist(self) -> NoReturn:
        """Has all elements on one rank; refused."""
        _refuse("tolist")

    def share_memory_(self) -> NoReturn:
        """Refused, as there is no memory of its own that torch could copy."""
        _refuse("share_memory_")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("numpy")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(function.overloadpacket.__name__)
        if handler is None:
            _refuse(function.overloadpacket.__name__)
        return handler(function, args, kwargs or {})


def whole_gradients(gradients: Sequence[ShardedGradient]) -> list[torch.Tensor]:
    """The whole mean gradients of the same parameters on all ranks; zeros if there is none. Collective."""
    _check_averaged((each for each in gradients if each.is_held), "full_gradients()")
    shares = [each.share for each in gradients]
    _compare_calls("full gradients of ZeroRedundancyOptimizer, which every rank requests", gradients[0])
    flats = [torch.zeros(each.numel(), dtype=each.dtype, device=each.device) for each in gradients]
    for share, flat in zip(shares, flats, strict=True):
        if share.has_gradient:
            flat[share.first : share.last] = share.mean()
    exchange(shares, flats, gradients[0].group)
    return [shaped_like(flat, share.parameter) for share, flat in zip(shares, flats, strict=True)]


def find_stand_ins(
    parameters: Sequence[torch.Tensor], known: Mapping[int, ShardedGradient]
) -> dict[int, ShardedGradient]:
    """The sharded gradients of these parameters, by index; `known` has them by `id` of the parameter. Local.

    Raises:
        ModelError: a parameter was converted, so that its gradient now has another dtype.
    """
    found = {index: known[id(each)] for index, each in enumerate(parameters) if id(each) in known}
    for index, each in found.items():
        if each.dtype != parameters[index].dtype:
            raise ModelError(
                f"parameters were converted from {each.dtype} to {parameters[index].dtype} after "
                "ZeroRedundancyOptimizer was created (model.half(), model.double(), model.to(dtype)), but its shares "
                "and state have the old dtype. Convert the model first, then wrap it, then create the optimizer"
            )
    return found


def refuse_others(
    optimizer: Optimizer, parameters: Iterable[torch.Tensor], known: Mapping[int, ShardedGradient]
) -> None:
    """Refuse a step of these parameters by an optimizer other than their owner, as each rank would update all. Local.

    Raises:
        ModelError: it is another optimizer.
    """
    if any(id(each) in known and known[id(each)].owner() is not optimizer for each in parameters):
        raise ModelError(
            f"{type(optimizer).__name__}.step(): some of its parameters belong to another ZeroRedundancyOptimizer, "
            "which has sharded their gradients over the ranks. Use one optimizer for them: create a new "
            "ZeroRedundancyOptimizer over them, and delete the others"
        )


def _refuse(name: str) -> NoReturn:
    raise ModelError(
        f"{name} is not supported for gradients sharded over the ranks (ZeroRedundancyOptimizer). norm(), "
        "clip_grad_norm_, clip_grad_value_, mul_, div_, zero_ and GradScaler work; optimizer.full_gradients() "
        "returns all gradients whole (collective: on every rank)"
    )


def _itself(_: Any, args: Sequence[Any], __: dict[str, Any]) -> Any:
    return args[0]


def _change(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply an elementwise in-place operation: every rank applies it to its share."""
    gradient, *others = args
    if not isinstance(gradient, ShardedGradient):
        _refuse(function.overloadpacket.__name__)
    _change_added(function, gradient, others, kwargs)
    share = gradient.share
    mean = share.mean()
    function(mean, *(_own(share, each) for each in others), **{key: _own(share, each) for key, each in kwargs.items()})
    share.norms.clear()
    return gradient


def _change_added(function: Any, gradient: ShardedGradient, others: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Apply an operation also to the sum of passes under `no_sync()`."""
    name = function.overloadpacket.__name__
    if gradient.added is None or name in ("add_", "sub_"):
        return
    if name in ("zero_", "fill_", "copy_"):
        gradient.added = None
    elif name not in ("mul_", "div_", "neg_") or kwargs or any(isinstance(each, ShardedGradient) for each in others):
        _check_averaged([gradient], name)
    else:
        function(gradient.added, *others)


def _check_averaged(gradients: Iterable[ShardedGradient], name: str) -> None:
    """Check that nothing has been added since the averaging. Local."""
    if any(each.added is not None for each in gradients):
        _refuse(f"{name}, before passes under no_sync() have been averaged,")


def _own(share: Share, value: Any) -> Any:
    if isinstance(value, ShardedGradient):
        if value.share.bounds != share.bounds:
            _refuse("an operation with the gradient of another parameter")
        return value.share.mean()
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return value.reshape(()) if value.numel() == 1 else share.own(value.expand(share.parameter.shape))


def _add(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    gradient = args[0]
    if current_graph_task_id() == -1 or not isinstance(gradient, ShardedGradient):
        return _change(function, args, kwargs)
    with torch.no_grad():  # autograd accumulates
        gradient.added = args[1].clone() if gradient.added is None else gradient.added.add_(args[1])
    return gradient


def _norm(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    gradient = args[0]
    order = float(args[1]) if len(args) > 1 and args[1] is not None else float(kwargs.get("ord", kwargs.get("p", 2)))
    if any(each not in (None, False, []) for each in args[2:4]) or kwargs.get("dim"):
        _refuse("norm over one dimension")
    if order not in gradient.share.norms:
        held = [each for each in gradient.mates if each.is_held or each is gradient]
        _check_averaged(held, "norm")
        _compute_norms([each for each in held if order not in each.share.norms], order, gradient.group)
    norm: torch.Tensor = gradient.share.norms[order]
    return norm.to(gradient.device, kwargs.get("dtype") or gradient.dtype)


def _compute_norms(gradients: Sequence[ShardedGradient], order: float, group: dist.ProcessGroup) -> None:
    """Compute norms of whole gradients from the parts on each rank. Collective."""
    _compare_calls("norms of gradients of ZeroRedundancyOptimizer, which every rank requests", gradients[0])
    parts = torch.zeros(len(gradients), dtype=torch.float64, device=collective_device(group, gradients[0].device))
    if order == -math.inf:
        parts.fill_(math.inf)
    for position, gradient in enumerate(gradients):
        own = gradient.share.mean()
        if own.numel():
            wide = torch.float32 if own.dtype in (torch.float16, torch.bfloat16) else None
            parts[position] = torch.linalg.vector_norm(own, order, dtype=wide).real
    op = {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}.get(order, dist.ReduceOp.SUM)
    is_sum_of_powers = not math.isinf(order) and order != 0
    parts = parts**order if is_sum_of_powers else parts
    dist.all_reduce(parts, op, group=group)
    norms = parts ** (1 / order) if is_sum_of_powers else parts
    for gradient, norm in zip(gradients, norms, strict=True):
        gradient.share.norms[order] = norm


def _compare_calls(text: str, gradient: ShardedGradient) -> None:
    if engine_of(gradient.group) is None:  # our own groups compare calls by themselves
        compare(text, gradient.group, collective_device(gradient.group, gradient.device))


def _norms(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(each, *args[1:], **kwargs) for each in args[0]]


def _change_each(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """`_foreach_mul_` and similar functions, tensor by tensor."""
    name = function.overloadpacket.__name__.removeprefix("_foreach_")
    operation = getattr(torch.ops.aten, name)
    others = args[1:]
    for position, tensor in enumerate(args[0]):
        operation(tensor, *(each[position] if isinstance(each, (list, tuple)) else each for each in others), **kwargs)


def _unscale(_: Any, args: Sequence[Any], __: dict[str, Any]) -> None:
    """GradScaler's unscaling: a non-finite value on one rank counts for all. Collective."""
    tensors, found, factor = args
    sharded = [each for each in tensors if isinstance(each, ShardedGradient)]
    _check_averaged(sharded, "unscaling")
    means = [each.share.mean() if isinstance(each, ShardedGradient) else each for each in tensors]
    means = [each for each in means if each.numel()]
    if means:
        amp_unscale_(means, found, factor)
    for each in sharded:
        each.share.norms.clear()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=sharded[0].group)


_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(("detach", "alias"), _itself),
    **dict.fromkeys(("mul_", "div_", "sub_", "addcmul_", "neg_", "sign_", "nan_to_num_"), _change),
    **dict.fromkeys(("clamp_", "clamp_min_", "clamp_max_", "copy_", "zero_", "fill_"), _change),
    **dict.fromkeys(("abs_", "pow_", "sqrt_", "tanh_", "round_", "lerp_", "masked_fill_", "addcdiv_"), _change),
    "add_": _add,
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    "_foreach_norm": _norms,
    **dict.fromkeys(("_foreach_mul_", "_foreach_div_", "_foreach_neg_", "_foreach_zero_"), _change_each),
    **dict.fromkeys(("_foreach_copy_", "_foreach_clamp_min_", "_foreach_clamp_max_"), _change_each),
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
"""By the operator's name."""
