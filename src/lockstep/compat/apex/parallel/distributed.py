"""Apex's `DistributedDataParallel` and `Reducer` over the one engine, and its collectives on flattened tensors."""

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
# More than any model has.
_ALL_MIB = float(1 << 30)


class DistributedDataParallel(lockstep.DistributedDataParallel):
    """`lockstep.DistributedDataParallel` with Apex's arguments.

    As in Apex, buffers stay each rank's own, and a parameter may go without a gradient. Collective; wrap the model
    after `amp.initialize`.

    Args:
        module: the model, already on its device.
        message_size: numbers that go out together.
        delay_allreduce: let gradients go out together.
        shared_param: refused, as in Apex.
        allreduce_trigger_params: no effect.
        retain_allreduce_buffers: refused.
        allreduce_always_fp32: sum 16-bit gradients in float32, on the way too. (The lockstep group adds in float32
            anyway, and rounds once.)
        num_allreduce_streams: no effect.
        allreduce_communicators: refused.
        gradient_average: divide by the number of ranks; False: sums, divided by `gradient_predivide_factor`.
        gradient_predivide_factor: divide by this before the sum, and by the rest of the number of ranks after it.
        gradient_average_split_factor: older name of `gradient_predivide_factor`.
        prof: no effect.
        device_ids: no argument of Apex's, which scripts give nevertheless; no effect.
        output_device: the same.

    Raises:
        InputError: an argument that is refused; the message says what to use.
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
                "shared_param is no longer an option, here as in Apex. Leave it out: parameters that several layers "
                "share are averaged once"
            )
        if retain_allreduce_buffers or allreduce_communicators is not None:
            raise InputError(
                "retain_allreduce_buffers and allreduce_communicators are not supported: buffers and streams are the "
                "engine's own. For another group of ranks use lockstep.DistributedDataParallel(process_group=...)"
            )
        if num_allreduce_streams != 1 or allreduce_trigger_params is not None:
            warn_once(
                _logger,
                "num_allreduce_streams and allreduce_trigger_params have no effect: gradients go out as soon as "
                "their bucket is full (message_size)",
            )
        if device_ids is not None or output_device is not None:
            warn_once(_logger, "apex's DistributedDataParallel has no device_ids: ignored")
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
        """Sum a bucket, divided before and after as was asked for."""
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
        """Accumulate gradients without reducing them, in backward passes from now on. Local, on all ranks alike."""
        self._backward.pause(True)

    def enable_allreduce(self) -> None:
        """Reduce gradients again, and what has accumulated with them, in backward passes from now on. Local."""
        # Not decided in the forward pass, as by `no_sync`: scripts switch between the two passes.
        self._backward.pause(False)


def accumulates(parameters: Iterable[Tensor]) -> bool:
    """Whether an engine over some of these parameters has been told not to reduce. Local.

    Told by `disable_allreduce()`, or by the `no_sync()` that the caller is in. Of torch's engines those count that
    `look_for_torchs_engines` has found.
    """
    paused = [each for each in (*engines(), *_torchs_engines) if _is_paused(each)]
    wanted = {id(parameter) for parameter in parameters} if paused else set()
    return any(id(parameter) in wanted for engine in paused for parameter in engine.parameters())


def _is_paused(engine: Any) -> bool:
    is_told = isinstance(engine, DistributedDataParallel) and engine._backward.is_paused
    reduces = getattr(engine, "require_backward_grad_sync", True)  # one that torch has refused has none
    return (is_told or not reduces) and engine.process_group.size() > 1


_torchs_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def look_for_torchs_engines() -> None:
    """Find all `torch.nn.parallel.DistributedDataParallel` among the objects of this process. Local."""
    # Not isinstance, which holds for ours as well, and asks objects that import or compute something when asked.
    _torchs_engines.update(each for each in gc.get_objects() if TorchEngine in type(each).__mro__)


class Reducer:
    """Averages gradients when it is told to.

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
    """Tensors of one dtype and device, one after the other. Local.

    >>> flatten([torch.tensor([[1, 2]]), torch.tensor(3)]).tolist()
    [1, 2, 3]
    """
    return torch.cat([each.reshape(-1) for each in bucket])


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flattened tensor, in the shapes of the tensors of a bucket. Local; they share its memory."""
    parts = torch.split(coalesced, [each.numel() for each in bucket])
    return [part.view(each.shape) for part, each in zip(parts, bucket, strict=True)]


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective on tensors of one dtype and device as one tensor, in place. Collective.

    Args:
        bucket: the tensors.
        call: such as `torch.distributed.broadcast`; the result of `torch.distributed.all_reduce` is divided by the
            number of ranks.
        extra_args: its arguments after the tensor.
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
    """As `apply_flat_dist_call`, for tensors of any dtypes and devices: once for each. Collective."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for bucket in by_kind.values():
        apply_flat_dist_call(bucket, call, extra_args)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
