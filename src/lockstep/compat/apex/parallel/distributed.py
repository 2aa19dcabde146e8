"""Apex's `DistributedDataParallel` and `Reducer`, on Lockstep's engine, and its collectives on flattened tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchEngine

import lockstep
from lockstep.agreement import broadcast_tensors
from lockstep.drift.engines import engines
from lockstep.errors import InputError, InputTypeError, NotInitialized
from lockstep.log import get_logger, warn_once
from lockstep.parallel.comm_hooks import GradBucket

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "accumulates",
    "apply_flat_dist_call",
    "flat_dist_call",
    "flatten",
    "look_for_torchs_engines",
    "unflatten",
]

_logger = get_logger(__name__)

_MIB = 1 << 20
_FLOAT32_BYTES = 4
# Larger than any model.
_ALL_MIB = float(1 << 30)


class DistributedDataParallel(lockstep.DistributedDataParallel):
    """`lockstep.DistributedDataParallel` with Apex's arguments.

    As in Apex, each rank has its own buffers, and parameters may be unused. Collective; wrap the model
    after `amp.initialize`.

    Args:
        module: the model, already on its device.
        message_size: number of elements per bucket.
        delay_allreduce: reduce all gradients together, after the backward pass.
        shared_param: refused, as in Apex.
        allreduce_trigger_params: no effect.
        retain_allreduce_buffers: refused.
        allreduce_always_fp32: send and sum 16-bit gradients in float32. (The lockstep group sums in float32
            anyway, and rounds once.)
        num_allreduce_streams: no effect.
        allreduce_communicators: refused.
        gradient_average: divide by the number of ranks; False: sum, and divide by `gradient_predivide_factor`.
        gradient_predivide_factor: divide by this before the sum, and by the number of ranks / this after it.
        gradient_average_split_factor: older name of `gradient_predivide_factor`.
        prof: no effect.
        device_ids: not an argument of Apex, but used by scripts; no effect.
        output_device: the same.

    Raises:
        InputError: an argument is refused; says what to use.
    """

    _compares_rows = False

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        *,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
    ) -> None:
        del prof
        if shared_param is not None:
            raise InputError(
                "shared_param is no longer supported, as in Apex. Leave it out: parameters that several layers "
                "share are averaged once"
            )
        if retain_allreduce_buffers or allreduce_communicators is not None:
            raise InputError(
                "retain_allreduce_buffers and allreduce_communicators are not supported: the engine manages buffers "
                "and streams. For another group of ranks use lockstep.DistributedDataParallel(process_group=...)"
            )
        if num_allreduce_streams != 1 or allreduce_trigger_params is not None:
            warn_once(
                _logger,
                "num_allreduce_streams and allreduce_trigger_params have no effect: gradients are sent as soon as "
                "their bucket is full (message_size)",
            )
        if device_ids is not None or output_device is not None:
            warn_once(_logger, "device_ids is ignored: apex's DistributedDataParallel has no such argument")
        bucket_mib = message_size * _FLOAT32_BYTES / _MIB
        super().__init__(
            module,
            broadcast_buffers=False,
            bucket_cap_mb=_ALL_MIB if delay_allreduce else bucket_mib,
            find_unused_parameters=True,
        )
        if gradient_average_split_factor is not None:
            gradient_predivide_factor = gradient_average_split_factor
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        self.allreduce_always_fp32 = allreduce_always_fp32
        if not gradient_average or gradient_predivide_factor != 1.0 or allreduce_always_fp32:
            self.register_comm_hook(None, self._reduce)

    def _reduce(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket, with divisions before and after according to the options."""
        buffer = bucket.buffer()
        sums = buffer.float() if self.allreduce_always_fp32 and buffer.element_size() < _FLOAT32_BYTES else buffer
        if self.gradient_predivide_factor != 1.0:
            sums.div_(self.gradient_predivide_factor)
        dist.all_reduce(sums, group=self.process_group)
        if self.gradient_average:
            sums.mul_(self.gradient_predivide_factor / self.process_group.size())
        if sums is not buffer:
            buffer.copy_(sums)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def disable_allreduce(self) -> None:
        """Accumulate gradients without reducing them, in later backward passes. Local; call it on all ranks."""
        self._backward.pause(True)

    def enable_allreduce(self) -> None:
        """Reduce gradients, including accumulated ones, in later backward passes. Local; call it on all ranks."""
        # Unlike `no_sync`, not decided in the forward pass: scripts call it between the two passes.
        self._backward.pause(False)


def accumulates(parameters: Iterable[Tensor]) -> bool:
    """Whether reduction is off in an engine of some of these parameters. Local.

    It is turned off by `disable_allreduce()`, or by an enclosing `no_sync()`. Of torch's engines, it considers those
    that `look_for_torchs_engines` has found.
    """
    paused = [each for each in (*engines(), *_torchs_engines) if _is_paused(each)]
    wanted = {id(parameter) for parameter in parameters} if paused else set()
    return any(id(parameter) in wanted for engine in paused for parameter in engine.parameters())


def _is_paused(engine: Any) -> bool:
    is_told = isinstance(engine, DistributedDataParallel) and engine._backward.is_paused
    reduces = getattr(engine, "require_backward_grad_sync", True)  # missing if torch's constructor has raised
    return (is_told or not reduces) and engine.process_group.size() > 1


_torchs_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def look_for_torchs_engines() -> None:
    """Find all instances of `torch.nn.parallel.DistributedDataParallel` in this process. Local."""
    # Not isinstance, which is true for Lockstep's too, and triggers lazy objects.
    _torchs_engines.update(each for each in gc.get_objects() if TorchEngine in type(each).__mro__)


class Reducer:
    """Averages gradients on request.

    Collective: every rank constructs it with the same model or list. A model's parameters become those of rank 0.

    Args:
        module_or_grads_list: a model, or a list of tensors.
    """

    def __init__(self, module_or_grads_list: nn.Module | Sequence[Tensor]) -> None:
        if not dist.is_initialized():
            raise NotInitialized("apex.parallel.Reducer needs a process group: call init_process_group first")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            broadcast_tensors([each.detach() for each in self.module.parameters()], _world())
        elif isinstance(module_or_grads_list, (list, tuple)):
            self.grads = list(module_or_grads_list)
        else:
            raise InputTypeError(
                f"Reducer takes a torch.nn.Module or a list of tensors, got {type(module_or_grads_list).__name__}"
            )

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace gradients by their mean over ranks. Collective."""
        tensors = self.grads
        if self.module is not None:
            tensors = [each.grad for each in self.module.parameters() if each.grad is not None]
        flat_dist_call(tensors, dist.all_reduce)


# ---- functions that scripts import from this module ------------------------------------------------


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """Concatenate flattened tensors of the same dtype and device. Local.

    >>> flatten([torch.tensor([[1, 2]]), torch.tensor(3)]).tolist()
    [1, 2, 3]
    """
    return torch.cat([each.reshape(-1) for each in bucket])


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flattened tensor, in the shapes of a bucket's tensors. Local."""
    parts = torch.split(coalesced, [each.numel() for each in bucket])
    return [part.view(each.shape) for part, each in zip(parts, bucket, strict=True)]


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective on tensors of the same dtype and device as one tensor, in place. Collective.

    Args:
        bucket: the tensors.
        call: a function such as `torch.distributed.broadcast`; the result of `torch.distributed.all_reduce` is divided
            by the number of ranks.
        extra_args: further arguments of the call.
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat.div_(dist.get_world_size())
    for tensor, part in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.copy_(part)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """As `apply_flat_dist_call`, for tensors of any dtypes and devices: one call for each. Collective."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for bucket in by_kind.values():
        apply_flat_dist_call(bucket, call, extra_args)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
