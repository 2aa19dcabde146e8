"""`lockstep.SyncBatchNorm`: batch normalization over the batches of all ranks, on CPU and CUDA.

[Note: statistics] Each rank computes mean and variance of its samples and sends them with its count, in one all_gather
in float64. All ranks combine them in rank order (Chan, Golub and LeVeque 1979: the squared deviations of a union are
those of its parts plus those of the parts' means), which avoids cancellation and gives the same bits on all ranks. A
rank may hold any number of samples, including none, and the result is that of one process with all samples. The
backward pass adds up two sums per channel, in one all_reduce.

[Note: fillers] On a rank for which a global batch has no sample, `lockstep.DataLoader` yields a filler. It is
normalized like the samples of the others, so that the script can continue, but it is not counted. A group of only some
ranks may have only fillers: each is then normalized by itself. Without normalization it could grow from layer to layer
until it is infinite, and a gradient of zero times that is nan.

[Note: gradients of a rank] The gradient that comes back to a rank is that of its own loss, a mean over its n_r rows,
until an engine multiplies it by the rank's weight w_r = n_r·W/n. This is the engine of the network around the layer, at
its outputs; or, if that network is frozen or not wrapped, the engine that its inputs come from, which comes later. The
layer's sums over ranks must be weighted in both cases. So in the second case it multiplies its two sums by w_r, and
divides their contribution to this rank's gradient by w_r again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx import Proxy
from torch.nn import functional
from torch.nn.parameter import is_lazy

from lockstep import batch
from lockstep.batch.share import BatchShare
from lockstep.errors import InputError, InputTypeError, ModelError
from lockstep.log import get_logger, warn_once
from lockstep.parallel.forward_pass import ForwardPass
from lockstep.torch_private.autograd import current_graph_task_id
from lockstep.torch_private.modules import BatchNorm, buffers_of, children_of, parameters_of

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm", "explain_forward_error", "warn_of_batch_statistics"]

_logger = get_logger(__name__)


class SyncBatchNorm(BatchNorm):
    """Batch normalization with the mean and variance of the batches of all ranks.

    A drop-in replacement for `torch.nn.SyncBatchNorm`, with the same state_dict, that also runs on the CPU. In
    evaluation mode, on one rank and without a process group it is ordinary batch normalization. Works inside
    `lockstep.DistributedDataParallel` and torch's. Does not support double backward, as in torch.

    Collective: in training mode every rank of the group runs the forward pass and, if the input requires a gradient,
    the backward pass.

    Args:
        num_features: number of channels, the size of dimension 1 of the input.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics; None averages over all batches.
        affine: whether to learn a scale and a shift per channel.
        track_running_stats: whether to keep running statistics, which evaluation mode then uses.
        process_group: the ranks that share batches; by default all ranks.
        device: device of parameters and buffers.
        dtype: dtype of parameters and buffers.
        bias: with `affine`, whether to learn a shift.

    Shapes:
        Input and output: (N, C), (N, C, L), (N, C, H, W), (N, C, D, H, W); N may differ between ranks and be 0. Any
        floating dtype, which is also that of the output; statistics of 16-bit inputs are computed in float32.

    Raises:
        InputError: from the forward pass, on every rank if all ranks together have one value per channel; on this one
            if the input has other dimensions.
    """

    process_group: dist.ProcessGroup | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if affine and not bias:  # older releases of torch have no such argument
            self.register_parameter("bias", None)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of `input`. Collective in training mode."""
        given: object = input
        if isinstance(given, Proxy):  # traced by torch.fx: one call, as for torch's own layers. It looks into others
            tracer: Any = given.tracer
            traced: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(self), (given,), {})
            return traced
        self._check_input(input)
        factor = self._count_batch()
        group = self._group_to_sync()
        if group is None:
            uses_batch = self.training or self.running_mean is None
            tracked = (self.running_mean, self.running_var)
            if self.training and not self.track_running_stats:
                tracked = (None, None)
            return functional.batch_norm(input, *tracked, self.weight, self.bias, uses_batch, factor, self.eps)
        rows = _rows_of(input)
        moments = _gather_moments(input.detach(), rows.count, group)
        if self.track_running_stats and self.running_mean is not None and not moments.is_empty:
            assert self.running_var is not None
            unbiased = moments.variance * (moments.count / (moments.count - 1))
            self.running_mean.mul_(1 - factor).add_(moments.mean.to(self.running_mean.dtype), alpha=factor)
            self.running_var.mul_(1 - factor).add_(unbiased.to(self.running_var.dtype), alpha=factor)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, moments, rows, self.eps, group
        )
        return output

    def _count_batch(self) -> float:
        """Count a batch; returns its weight in the running statistics."""
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    def _group_to_sync(self) -> dist.ProcessGroup | None:
        """The group whose batches make up the statistics, or None for this rank only."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group: object = dist.group.WORLD if self.process_group is None else self.process_group
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise InputError(
                f"SyncBatchNorm: rank {dist.get_rank()} is not a member of its process_group. Give each rank the "
                "group that it belongs to"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise InputTypeError(
                f"SyncBatchNorm: process_group must be a ProcessGroup or None, got {type(group).__name__}"
            )
        return group if group.size() > 1 else None

    def _check_input(self, tensor: Tensor) -> None:
        if tensor.dim() < 2:
            raise InputError(f"SyncBatchNorm expects (N, C, …), at least 2 dimensions, got {tuple(tensor.shape)}")
        if tensor.size(1) != self.num_features:
            raise InputError(
                f"SyncBatchNorm({self.num_features}) got an input of shape {tuple(tensor.shape)}, which has "
                f"{tensor.size(1)} channels in dimension 1"
            )
        if not tensor.is_floating_point():
            raise InputTypeError(f"SyncBatchNorm expects a floating dtype, got {tensor.dtype}")

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """`lockstep.convert_sync_batchnorm`, as a method for compatibility with torch."""
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace every BatchNorm layer by a `SyncBatchNorm` with the same parameters and buffers.

    The parameters remain the same objects, so that an existing optimizer still works. A layer used in several places is
    converted once; an existing `SyncBatchNorm` gets the group. Mirrors `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.
    Local.

    Args:
        module: a model, changed in place, or one BatchNorm layer.
        process_group: who shares batches; default all ranks.

    Returns:
        The module; a new one if it is a BatchNorm layer itself.

    Raises:
        ModelError: a layer derived from BatchNorm has its own forward pass, which a conversion would lose, or is lazy
            and has no shape yet. Names it.
    """
    if not isinstance(module, nn.Module):
        raise InputTypeError(f"convert_sync_batchnorm: expected a model, got {type(module).__name__}")
    done: dict[nn.Module, nn.Module] = {}
    # All before any: a model that cannot be converted is left unchanged.
    for name, layer in module.named_modules():
        if isinstance(layer, BatchNorm) and not isinstance(layer, SyncBatchNorm):
            done[layer] = _convert_layer(name, layer, process_group)
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.process_group = process_group
    for parent in list(module.modules()):
        for name, child in children_of(parent).items():
            if child in done:
                children_of(parent)[name] = done[child]
    return done.get(module, module)


def warn_of_batch_statistics(module: nn.Module, is_told: bool) -> None:
    """Warn once, when a model is wrapped, that its BatchNorm layers only see the samples of one rank. Local.

    This is not a guess: in training mode the results of such a layer depend on how a batch is split. Those of converted
    layers, and in evaluation mode, do not.

    Args:
        is_told: whether several ranks train it, and this one warns for all.
    """
    are_converted = (SyncBatchNorm, nn.SyncBatchNorm)
    norms = [(name, each) for name, each in module.named_modules() if isinstance(each, BatchNorm) and each.training]
    layers = [name for name, each in norms if not isinstance(each, are_converted)]
    if layers and is_told:
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        warn_once(
            _logger,
            f"BatchNorm in training mode ({layers[0] or type(module).__name__}{more}) normalizes over each rank's own "
            "samples, so the training differs from that of one process. Before wrapping the model, pass it to "
            "lockstep.convert_sync_batchnorm, or call eval() on frozen layers. If this is intended: "
            f"logging.getLogger({__name__!r}).setLevel('ERROR')",
        )


def _convert_layer(name: str, layer: BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
    where = f"layer {name!r} ({type(layer).__name__})"
    if any(is_lazy(each) for each in (layer.weight, layer.running_mean) if each is not None):
        raise ModelError(f"{where} is lazy and has no shape yet. Run one forward pass before converting")
    if type(layer).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise ModelError(
            f"{where} overrides forward(), which lockstep.SyncBatchNorm would not run. Replace the layer by hand, or "
            "skip it: convert the submodules that do not contain it"
        )
    converted = SyncBatchNorm(
        layer.num_features,
        layer.eps,
        layer.momentum,
        layer.affine,
        layer.track_running_stats,
        process_group,
        device="meta",  # Its parameters and buffers are replaced at once.
    )
    parameters_of(converted).update(parameters_of(layer))
    buffers_of(converted).update(buffers_of(layer))
    vars(converted).update({name: value for name, value in vars(layer).items() if "_hook" in name})
    converted.training = layer.training
    if hasattr(layer, "qconfig"):
        converted.qconfig = layer.qconfig
    return converted


@dataclass(frozen=True)
class _Rows:
    """How the rows that this rank has passed to a layer count.

    Attributes:
        count: whether they are part of the statistics, as they are not of a filler.
        forward: the engine's forward pass that the layer is in, else the one that its input comes from, or None.
        is_inside: whether the layer is in that forward pass.
    """

    count: bool
    forward: ForwardPass | None
    is_inside: bool = False

    def weight_to_come(self) -> float:
        """The weight that has yet to be applied to the incoming gradient; see [Note: gradients of a rank].

        Collective if the forward pass does not know its weight yet.
        """
        if self.forward is None or (self.is_inside and self.forward.has_weighted):
            return 1.0
        return self.forward.settle()


def _rows_of(values: Tensor) -> _Rows:
    """How the rows of a layer's input count. Collective if a forward pass that they come from must ask other ranks.

    Raises:
        InputError: they come from forward passes of which this rank holds different shares; or the layer is in no
            engine, and it is unknown whether the loop's batch is a filler.
    """
    share = batch.hand.active_share(in_backward=current_graph_task_id() != -1)
    around = cast("ForwardPass | None", batch.hand.active_forward())
    if share is not None or around is not None:
        return _Rows(share is None or share.local_samples > 0, around, is_inside=True)
    forwards = cast("list[ForwardPass]", batch.graph.find_marks(values) if batch.graph.marks_tell_shares() else [])
    if len({forward.settle() for forward in forwards}) > 1:
        raise InputError(
            "SyncBatchNorm: its input comes from forward passes on two batches, of which this rank has different "
            "shares. Call the network that contains it once per batch"
        )
    if forwards:
        return _Rows(not forwards[0].is_filler, forwards[0])
    tag = batch.tags.find_tag(values)
    found = [tag.share] if tag is not None else batch.hand.in_hand(lambda iteration: iteration.num_batches - 1)
    fillers = [share for share in found if share.local_samples == 0]
    if fillers and len(fillers) < len(found):
        raise InputError(
            "SyncBatchNorm: cannot tell whether this rank's rows are a filler, which must not count, because the "
            "loop prefetches batches or uses several loaders. Wrap the network in lockstep.DistributedDataParallel"
        )
    return _Rows(not fillers, None)


@dataclass(frozen=True)
class _Moments:
    """Moments of the values of all ranks, per channel.

    Attributes:
        mean: (C), float64.
        variance: (C), float64, biased.
        count: 0-dimensional, float64: number of values; on the input's device, to avoid waiting for a GPU.
        is_empty: whether no rank has any value that counts. Known on all ranks; mean and variance are then local.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    is_empty: bool


def _gather_moments(values: Tensor, counts: bool, group: dist.ProcessGroup) -> _Moments:
    """Mean and variance over all ranks; see [Note: statistics]. Collective."""
    num_channels = values.size(1)
    count = values.numel() // num_channels if counts and num_channels else 0
    own = torch.zeros(2 * num_channels + 1, dtype=torch.float64, device=values.device)
    if count:
        own[:num_channels], own[num_channels:-1] = _moments_of(values)
        own[-1] = count
    gathered = own.new_empty(group.size(), own.numel())
    dist.all_gather(list(gathered.unbind()), own, group=group)
    means, variances, each_count = gathered[:, :num_channels], gathered[:, num_channels:-1], gathered[:, -1:]
    total = each_count.sum()
    is_empty = False
    if count <= 1:  # Only then can the total be so small, and then every rank checks.
        num_values = int(total.item())
        is_empty = num_values == 0
        if num_values == 1:
            raise InputError(
                "SyncBatchNorm in training mode needs more than 1 value per channel, but all ranks together have 1 "
                f"(rank {dist.get_rank()} has an input of shape {tuple(values.shape)})"
            )
        if is_empty and values.numel():
            mean, variance = (each.double() for each in _moments_of(values))
            return _Moments(mean, variance, total, is_empty)
    share = each_count / total.clamp(min=1)
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean).square())).sum(0)
    return _Moments(mean, variance, total, is_empty)


def _moments_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, for a non-empty tensor. Local."""
    moments: tuple[Tensor, Tensor]
    moments = torch.ops.aten.batch_norm_update_stats(values.to(_statistics_dtype(values)), None, None, 0.0)
    return moments


def _statistics_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


class _Normalize(torch.autograd.Function):
    """Normalization by the moments of all ranks, with the gradient through them."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: _Moments,
        rows: _Rows,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Local. `rows`: how `values` count in the moments."""
        dtype = _statistics_dtype(values)
        mean, variance = moments.mean.to(dtype), (moments.variance + eps).to(dtype)
        ctx.save_for_backward(values, weight, mean, variance, moments.count)
        ctx.group, ctx.rows = group, rows
        ctx.bias_dtype = None if bias is None else bias.dtype
        scale, shift = (None if each is None else each.to(dtype) for each in (weight, bias))
        # The operator itself: `functional.batch_norm` of torch 2.11 refuses an eps of 0; here it is in the variance.
        cudnn = torch.backends.cudnn.enabled
        return torch.batch_norm(values, scale, shift, mean, variance, False, 0.0, 0.0, cudnn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Collective if the input requires a gradient. Gradients of weight and bias are local."""
        values, weight, mean, variance, count = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        gradient = gradient.to(values.dtype)
        sums = _sums(values, gradient, scale, mean, variance)
        of_weight = sums[1].to(weight.dtype, copy=True) if needs_weight else None
        of_bias = sums[0].to(ctx.bias_dtype, copy=True) if needs_bias else None
        of_input = None
        if needs_input:
            weight_to_come = ctx.rows.weight_to_come()
            sums = sums * weight_to_come if weight_to_come else torch.zeros_like(sums)  # a filler's may be infinite
            dist.all_reduce(sums, group=ctx.group)
            factor = scale * variance.rsqrt()
            of_input = _like_channels(factor, values) * gradient
            if ctx.rows.count and weight_to_come:  # The rows influenced mean and variance as well.
                means = (sums / (count.clamp(min=1) * weight_to_come)).to(mean.dtype)
                centred = values - _like_channels(mean, values)
                through_variance = _like_channels(factor * variance.rsqrt() * means[1], values)
                of_input.sub_(_like_channels(factor * means[0], values)).sub_(centred.mul_(through_variance))
            of_input = of_input.to(values.dtype)
        return of_input, of_weight, of_bias, None, None, None, None


def _like_channels(per_channel: Tensor, values: Tensor) -> Tensor:
    """A (C) tensor as (1, C, 1, …), to be combined with `values`."""
    return per_channel.view(1, -1, *[1] * (values.dim() - 2))


def _sums(values: Tensor, gradient: Tensor, scale: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Sums over this rank's values, (2, C): of the gradient, and of the gradient times the normalized values."""
    if not values.numel():
        return mean.new_zeros(2, len(mean))
    # As if mean and variance were constants: one pass of the kernel for evaluation mode. On CPUs they are passed as
    # that mode's running statistics, on CUDA as saved statistics, which it requires.
    _, of_scale, of_shift = torch.ops.aten.native_batch_norm_backward(
        gradient, values, scale, mean, variance, mean, variance.rsqrt(), False, 0.0, [False, True, True]
    )
    return torch.stack([of_shift, of_scale]).to(mean.dtype)


def explain_forward_error(error: Exception, world_size: int, share: BatchShare | None) -> None:
    """Replace torch's error for too few values, raised by the model, by one with a remedy. Local.

    Args:
        error: the exception of the forward pass.
        share: this rank's share of the batch; None if unknown.
    """
    if world_size == 1 or "Expected more than 1 value per channel when training" not in str(error):  # torch's words
        return
    held = "few samples" if share is None else f"{share.local_samples} of the {share.global_samples} sample(s)"
    raise InputError(
        f"rank {dist.get_rank()} had {held} of this batch, but batch normalization needs more than one value per "
        f"channel on each of the {world_size} ranks: {error}. Normalize over all ranks: model = "
        "lockstep.convert_sync_batchnorm(model) before DistributedDataParallel(model)"
    ) from error
